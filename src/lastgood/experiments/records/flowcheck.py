"""FlowCheck's figure: what each of its parts is asked for, and what it gives. Needs no torch.

One kind of measurement with parts: a spec holds the settings of exactly one, and its record that part's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.experiments.records.base import MachineLabel, Record, Scale, SpecWithoutWorkload
from lastgood.experiments.records.mirror_node import LargeModel, MirrorNode, NodeRates
from lastgood.experiments.records.watched_training import (
    ALONE,
    MIRRORED,
    STAGES,
    WATCHED,
    GptShape,
    LivesResult,
    LivesSettings,
    NodeLook,
    StageBlock,
    StagesResult,
    StagesSettings,
    TrainingBlock,
    TrainingResult,
    TrainingSettings,
    Variant,
    WatchedLife,
    Window,
)
from lastgood.models import FrozenModel

__all__ = [
    "ALONE",
    "FLOWCHECK_METHOD",
    "FLOWCHECK_PARTS",
    "MIRRORED",
    "STAGES",
    "WATCHED",
    "CapturePoint",
    "CaptureResult",
    "CaptureSettings",
    "FlowcheckRecord",
    "FlowcheckSpec",
    "GptShape",
    "LivesResult",
    "LivesSettings",
    "MeasuredRate",
    "NodeLook",
    "RecoveryPoint",
    "RecoveryResult",
    "RecoverySettings",
    "SizingResult",
    "SizingSettings",
    "StageBlock",
    "StagesResult",
    "StagesSettings",
    "TrainingBlock",
    "TrainingResult",
    "TrainingSettings",
    "Variant",
    "WatchedLife",
    "Window",
]

FLOWCHECK_METHOD: Final = 1
"""Version of how the parts are measured, in every run's identity."""
FLOWCHECK_PARTS: Final = ("training", "lives", "capture", "recovery", "stages", "sizing")
"""In the order in which they are made: each is a panel of the figure."""
_Count = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RecoverySettings(FrozenModel):
    """How many iterations survive a lossy mirror: a ring of ranks of which some are watched."""

    part: Literal["recovery"] = "recovery"
    ranks: int = Field(ge=2, le=1024)
    gradient_bytes: _Count
    """Reduced in each iteration."""
    payload_bytes: int = Field(ge=64, le=65_536)
    """Of each packet."""
    watched: tuple[tuple[int, ...], ...] = Field(min_length=1, max_length=16)
    """Sets of ranks whose links are mirrored, both directions of each."""
    loss_rates: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(min_length=1, max_length=64)
    """Shares of mirrored packets that are lost, independently."""
    simulated: int = Field(ge=0, le=10_000_000)
    """Iterations simulated at each point."""
    measured: int = Field(ge=0, le=1_000_000)
    """Iterations whose generated packets go through parser and extractor, at each point."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for ranks in self.watched:
            if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.ranks)):
                raise ValueError(f"{ranks}: not different ranks of a ring of {self.ranks}")
        return self


class SizingSettings(FrozenModel):
    """What a mirror node of a large training needs, by a model whose rates are measured here."""

    part: Literal["sizing"] = "sizing"
    models: tuple[LargeModel, ...] = Field(min_length=1, max_length=16)
    node: MirrorNode
    optimizer: Literal["sgd", "adam", "adamw"]
    update_shape: str = Field(pattern=r"^[A-Za-z0-9_]{1,40}$")
    """Of `lastgood shadow bench`, for the rate of updates."""
    updates: _Count
    """Timed."""
    traffic_bytes: _Count
    """Parsed and extracted, for the rate of it."""
    payload_bytes: int = Field(ge=64, le=65_536)
    """Of each packet of it."""


class CaptureSettings(FrozenModel):
    """How many frames a mirror node misses: raw frames over a virtual link at given rates. Needs root."""

    part: Literal["capture"] = "capture"
    device: Literal["af_packet"] = "af_packet"
    """What captures."""
    frame_bytes: tuple[Annotated[int, Field(ge=64, le=65_535)], ...] = Field(min_length=1, max_length=16)
    offered_bits_per_s: tuple[_Rate, ...] = Field(min_length=1, max_length=64)
    """Asked of the sender, which may not reach it: what it sent is in the record."""
    seconds: float = Field(gt=0, le=600)
    """Of each point."""
    ring_bytes: int = Field(ge=2 << 20, le=64 << 30)
    """The kernel's ring."""


Settings = Annotated[
    TrainingSettings | LivesSettings | CaptureSettings | RecoverySettings | StagesSettings | SizingSettings,
    Field(discriminator="part"),
]


class FlowcheckSpec(SpecWithoutWorkload):
    """One run of one part."""

    NOT_IN_CELL: ClassVar[Mapping[str, Any]] = {"repetition": True, "seed": True}

    spec_version: Literal[1] = 1
    method: int = Field(default=FLOWCHECK_METHOD, ge=1)
    machine: MachineLabel
    scale: Scale
    settings: Settings
    seed: int = Field(default=0, ge=0)
    repetition: int = Field(default=0, ge=0)

    @property
    def part(self) -> str:
        """Which one."""
        return self.settings.part

    @property
    def panel(self) -> str:
        """A panel for each part."""
        return self.settings.part

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        name = f"r{self.repetition}.json"
        return PurePosixPath(self.machine, self.scale, "flowcheck", self.part, f"c{self.cell_hash}", name)

    def title(self) -> str:
        """A short name for logs."""
        return f"flowcheck {self.part} r{self.repetition}"


class CapturePoint(FrozenModel):
    """One size of frames at one rate."""

    device: str
    frame_bytes: _Count
    asked_bits_per_s: _Rate
    sent_frames: _Count
    sent_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    captured_frames: int = Field(ge=0)
    kernel_dropped: int = Field(ge=0)
    """Of those that are missing, dropped since the kernel's ring was full; others were lost before it."""
    capture_cpu_s: float = Field(ge=0)
    """Of the process that captures."""

    @property
    def offered_bits_per_s(self) -> float:
        """What was sent."""
        return self.sent_frames * self.frame_bytes * 8 / self.sent_s

    @property
    def lost_share(self) -> float:
        """Of the frames sent."""
        return max(0.0, 1 - self.captured_frames / self.sent_frames)


class CaptureResult(FrozenModel):
    """All points."""

    part: Literal["capture"] = "capture"
    points: list[CapturePoint] = Field(min_length=1)
    left_out: list[str] = Field(default_factory=list)
    """Devices that are not here, and why."""


class RecoveryPoint(FrozenModel):
    """Iterations under one loss rate, with one set of watched ranks."""

    source: Literal["simulation", "measurement"]
    watched: tuple[int, ...]
    loss_rate: float
    iterations: _Count
    recovered: int = Field(ge=0)
    """Of these, iterations of which every byte of the reduced gradient was seen."""
    differing: int = Field(default=0, ge=0)
    """Iterations with a byte that was taken for known and is not the true one: must be none."""

    @property
    def share(self) -> float:
        """Of iterations that can be recovered."""
        return self.recovered / self.iterations


class RecoveryResult(FrozenModel):
    """Points that were simulated and measured; the formula needs no record."""

    part: Literal["recovery"] = "recovery"
    points: list[RecoveryPoint]
    left_out: list[str] = Field(default_factory=list)
    """What could not be measured here, and why."""


class MeasuredRate(FrozenModel):
    """A rate of this machine that the model starts from."""

    name: Literal["capture", "parse", "update"]
    per_core_s: _Rate
    """Bytes of frames, or parameters, that a core does in a second."""
    how: str
    """What was timed."""
    seconds: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Of each repetition; the rate is that of the median."""


class SizingResult(FrozenModel):
    """The measured rates: all else follows from them and the spec."""

    part: Literal["sizing"] = "sizing"
    rates: list[MeasuredRate] = Field(min_length=1)

    @property
    def node_rates(self) -> NodeRates:
        """For the model; what was not measured is None."""
        found = {rate.name: rate.per_core_s for rate in self.rates}
        return NodeRates(
            capture_bytes_per_s=found.get("capture"),
            parse_bytes_per_s=found.get("parse"),
            update_parameters_per_s=found.get("update"),
        )


Result = Annotated[
    TrainingResult | LivesResult | CaptureResult | RecoveryResult | StagesResult | SizingResult,
    Field(discriminator="part"),
]


class FlowcheckRecord(Record[FlowcheckSpec]):
    """One run, complete."""

    NAME: ClassVar[str] = "a record of FlowCheck's figure"

    result: Result

    @model_validator(mode="after")
    def _of_its_part(self) -> Self:
        if self.result.part != self.spec.part:
            raise ValueError(f"a result of {self.result.part} in a record of {self.spec.part}")
        return self

    def summary(self) -> str:
        """How much it holds."""
        if isinstance(self.result, TrainingResult | StagesResult):
            return f"{len(self.result.blocks)} blocks, {self.wall_s:.0f} s in all"
        if isinstance(self.result, LivesResult):
            told = ", ".join(f"{window.variant} {window.useful_steps}" for window in self.result.windows)
            return f"useful steps: {told}; {self.wall_s:.0f} s in all"
        if isinstance(self.result, CaptureResult | RecoveryResult):
            return f"{len(self.result.points)} points, {self.wall_s:.0f} s in all"
        return ", ".join(f"{rate.name} {rate.per_core_s:.3g}/s a core" for rate in self.result.rates)

    def marks(self) -> list[str]:
        """What figures mark about it."""
        if isinstance(self.result, TrainingResult) and isinstance(self.spec.settings, TrainingSettings):
            watched = [block.held_step for block in self.result.blocks if block.variant == WATCHED]
            return _late_mark(self.spec.settings, watched)
        if isinstance(self.result, StagesResult) and isinstance(self.spec.settings, StagesSettings):
            return _late_mark(self.spec.settings.training, [block.held_step for block in self.result.blocks])
        if isinstance(self.result, LivesResult):
            wrong = sum(window.differing for window in self.result.windows)
            return [f"{wrong} LOSSES OF STEPS DONE AGAIN DIFFER"] if wrong else []
        if not isinstance(self.result, RecoveryResult):
            return []
        wrong = sum(point.differing for point in self.result.points)
        return [f"{wrong} GRADIENTS CALLED COMPLETE DIFFER FROM THE TRUE ONES"] if wrong else []


def _late_mark(training: TrainingSettings, held: list[int | None]) -> list[str]:
    """Said of nodes that did not hold a training's last step in the end."""
    late = sum(step != training.warmup + training.steps for step in held)
    return [f"THE MIRROR NODE DID NOT HOLD THE LAST STEP OF {late} OF {len(held)} BLOCKS"] if late else []
