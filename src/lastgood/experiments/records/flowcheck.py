"""FlowCheck's figure: what each of its parts is asked for, and what it gives. Needs no torch.

One kind of measurement with parts: a spec holds the settings of exactly one, and its record that part's result.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.experiments.records.base import MachineLabel, Record, Scale, SpecWithoutWorkload
from lastgood.experiments.records.mirror_node import LargeModel, MirrorNode, NodeRates
from lastgood.models import FrozenModel

__all__ = [
    "ALONE",
    "FLOWCHECK_METHOD",
    "FLOWCHECK_PARTS",
    "MIRRORED",
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
    "RecoveryPoint",
    "RecoveryResult",
    "RecoverySettings",
    "SizingResult",
    "SizingSettings",
    "TrainingBlock",
    "TrainingResult",
    "TrainingSettings",
    "Variant",
    "WatchedLife",
    "Window",
]

FLOWCHECK_METHOD: Final = 1
"""Version of how the parts are measured, in every run's identity."""
FLOWCHECK_PARTS: Final = ("training", "lives", "capture", "recovery", "sizing")
"""In the order in which they are made: each is a panel of the figure."""
Variant = str
"""Of a training: `ALONE`, `MIRRORED`, `WATCHED`, or a system that saves each step."""
ALONE: Final = "none"
MIRRORED: Final = "mirror"
"""Its frames are copied, and nobody reads them."""
WATCHED: Final = "node"
"""A mirror node reads them, and holds each step."""
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


class GptShape(FrozenModel):
    """The small GPT that is trained."""

    vocabulary: _Count = 2048
    width: _Count = 256
    heads: _Count = 4
    blocks: _Count = 4
    length: _Count = 32
    batch: _Count = 2
    """Sequences of each rank."""


class TrainingSettings(FrozenModel):
    """Iterations of one training with a checkpoint of each, by system, on a testbed. Needs root."""

    part: Literal["training"] = "training"
    shape: GptShape
    ranks: int = Field(ge=2, le=64)
    """Each on a node of its own; the first is watched."""
    rate: str | None
    """Of each node's link."""
    threads: _Count
    """Of each rank."""
    systems: tuple[str, ...] = Field(max_length=16)
    """That save after each step, on rank 0; training alone, mirrored and watched are always there."""
    warmup: int = Field(ge=0, le=1000)
    steps: int = Field(ge=1, le=100_000)
    """Timed in each block."""
    rounds: int = Field(ge=1, le=1000)
    """Blocks of each variant, in a shuffled order each time."""


class LivesSettings(FrozenModel):
    """Useful iterations of a training that is killed now and then, as a trace has it. Needs root."""

    part: Literal["lives"] = "lives"
    training: TrainingSettings
    """Its systems restore as well; FlowCheck is always there."""
    window_s: float = Field(gt=0, le=86_400)
    """Of restoring and training; what processes need to start stands outside."""
    failures_s: tuple[Annotated[float, Field(gt=0)], ...] = Field(max_length=1000)
    """When all ranks are killed, from the window's begin."""
    trace_name: str
    trace_sha256: str
    trace_s: float = Field(gt=0)
    trace_failures: int = Field(ge=0)
    """In all of the trace, for the share at its own rate."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if list(self.failures_s) != sorted(self.failures_s) or any(at >= self.window_s for at in self.failures_s):
            raise ValueError("failures_s: not in order, or not inside window_s")
        return self


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
    TrainingSettings | LivesSettings | CaptureSettings | RecoverySettings | SizingSettings, Field(discriminator="part")
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


class TrainingBlock(FrozenModel):
    """One training from its start, in one way."""

    variant: Variant
    round: int = Field(ge=0)
    iteration_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Of each timed step, on rank 0."""
    mirrored_frames: int | None = None
    """That the mirror copied."""
    held_step: int | None = None
    """The newest step that the mirror node held in the end."""

    @property
    def median_s(self) -> float:
        """Of an iteration."""
        return statistics.median(self.iteration_s)


class TrainingResult(FrozenModel):
    """All blocks."""

    part: Literal["training"] = "training"
    blocks: list[TrainingBlock] = Field(min_length=1)
    left_out: list[str] = Field(default_factory=list)
    """Variants that could not be, and why."""


class WatchedLife(FrozenModel):
    """From a start to a kill."""

    restored_step: int | None = Field(default=None, ge=0)
    """None: it was the first."""
    restore_s: float | None = Field(default=None, ge=0)
    """From all ranks being there until the first step began; None: it was killed before."""
    last_step: int = Field(ge=0)
    """Updates done at its end."""


class Window(FrozenModel):
    """One way of training through the window."""

    variant: Variant
    lives: list[WatchedLife] = Field(min_length=1)
    differing: int = Field(ge=0)
    """Losses of steps done again that are other ones than before: must be none."""

    @property
    def useful_steps(self) -> int:
        """What is left in the end."""
        return self.lives[-1].last_step

    @property
    def lost_steps(self) -> list[int]:
        """By kill: done before it, and not restored after it."""
        pairs = zip(self.lives, self.lives[1:], strict=False)
        return [before.last_step - (after.restored_step or 0) for before, after in pairs]


class LivesResult(FrozenModel):
    """All windows."""

    part: Literal["lives"] = "lives"
    alone: list[TrainingBlock] = Field(min_length=1)
    """Training with nothing beside it, before and after the windows."""
    windows: list[Window]
    left_out: list[str] = Field(default_factory=list)

    @property
    def alone_s(self) -> float:
        """Median iteration of training alone."""
        return statistics.median(second for block in self.alone for second in block.iteration_s)


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
    TrainingResult | LivesResult | CaptureResult | RecoveryResult | SizingResult, Field(discriminator="part")
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
        if isinstance(self.result, TrainingResult):
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
            steps = self.spec.settings.warmup + self.spec.settings.steps
            watched = [block for block in self.result.blocks if block.variant == WATCHED]
            late = sum(block.held_step != steps for block in watched)
            return [f"THE MIRROR NODE DID NOT HOLD THE LAST STEP OF {late} OF {len(watched)} BLOCKS"] if late else []
        if isinstance(self.result, LivesResult):
            wrong = sum(window.differing for window in self.result.windows)
            return [f"{wrong} LOSSES OF STEPS DONE AGAIN DIFFER"] if wrong else []
        if not isinstance(self.result, RecoveryResult):
            return []
        wrong = sum(point.differing for point in self.result.points)
        return [f"{wrong} GRADIENTS CALLED COMPLETE DIFFER FROM THE TRUE ONES"] if wrong else []
