"""StellaTrain's figure: what each of its parts is asked for, and its record. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.experiments.records.base import MachineLabel, Record, Scale, SpecWithoutWorkload
from lastgood.models import FrozenModel

__all__ = [
    "ALONE",
    "KERNELS",
    "READ",
    "STELLATRAIN_METHOD",
    "STELLATRAIN_PARTS",
    "WAYS",
    "Kernel",
    "KernelTimes",
    "KernelsSettings",
    "LinkBlock",
    "LinksSettings",
    "StellatrainPart",
    "StellatrainRecord",
    "StellatrainSpec",
    "Way",
]

STELLATRAIN_METHOD: Final = 1
"""Version of how the parts are measured, in every run's identity."""
StellatrainPart = Literal["links", "kernels"]
STELLATRAIN_PARTS: Final[tuple[StellatrainPart, ...]] = ("links", "kernels")
"""In the order in which they are made: each is a panel of the figure."""

Way = Literal[
    "alone",
    "ddp",
    "fp16",
    "powersgd-1",
    "powersgd-4",
    "post-local",
    "topk-0",
    "v16-0",
    "topk-1",
    "v16-1",
]
ALONE: Final[Way] = "alone"
"""Both nodes compute at the same time, forward and backward, and send nothing: what no way of training can avoid."""
WAYS: Final[tuple[Way, ...]] = (
    ALONE,
    "ddp",
    "fp16",
    "powersgd-1",
    "powersgd-4",
    "post-local",
    "topk-0",
    "v16-0",
    "topk-1",
    "v16-1",
)
"""In the order of the picture. ``fp16``, ``powersgd-RANK``, ``post-local``: torch's hooks for DDP;
``COMPRESSOR-STALENESS``: Lastgood's engine."""

Kernel = Literal[
    "read",
    "sgd-dense",
    "sgd-single",
    "sgd-blocks",
    "adam-dense",
    "adam-single",
    "adam-blocks",
    "torch-topk",
    "topk",
    "threshold",
    "v16",
    "randomk",
]
READ: Final[Kernel] = "read"
"""One sum over as many floats, which no compressor can do without."""
KERNELS: Final[tuple[Kernel, ...]] = (
    READ,
    "sgd-dense",
    "sgd-single",
    "sgd-blocks",
    "adam-dense",
    "adam-single",
    "adam-blocks",
    "torch-topk",
    "topk",
    "threshold",
    "v16",
    "randomk",
)
"""In the order of the picture: optimizers, then compressors."""
_Count = Annotated[int, Field(ge=1, le=10**10)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class LinksSettings(FrozenModel):
    """Iterations per second of one training on two nodes of a testbed, by rate of their links. Needs root."""

    model: Literal["resnet18", "mlp"]
    classes: _Count
    size_px: _Count
    """Of a picture, or as many inputs of the small network."""
    batch: _Count
    """Of each node."""
    threads: _Count
    """Of each node."""
    rates_bits_per_s: tuple[Annotated[int, Field(ge=10**6, le=10**11)], ...] = Field(min_length=1, max_length=16)
    ways: tuple[Way, ...] = Field(min_length=1, max_length=16)
    """Beside `ALONE`, which is always measured."""
    compression: _Share
    average_every: _Count
    """Iterations from one average to the next under post-local SGD."""
    warmup: Annotated[int, Field(ge=4, le=1000)]
    """Iterations before those that are timed: DDP rebuilds its buckets, and PowerSGD begins, in the first three."""
    block_s: _Seconds
    """About so long is a block, of at least two iterations."""
    most_steps: Annotated[int, Field(ge=2, le=100_000)]
    """Of a block."""
    rounds: Annotated[int, Field(ge=1, le=100)]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.ways)) < len(self.ways) or ALONE in self.ways:
            raise ValueError(f"ways: each once, and not {ALONE}, which is always measured")
        return self


class KernelsSettings(FrozenModel):
    """Optimizers and compressors on one tensor, in one process, in another order each round."""

    elements: Annotated[int, Field(ge=1024, le=2**32)]
    compression: _Share
    threads: _Count
    rounds: Annotated[int, Field(ge=1, le=1000)]


class StellatrainSpec(SpecWithoutWorkload):
    """One run: one part, that of the settings that it has."""

    NOT_IN_CELL: ClassVar[Mapping[str, Any]] = {"repetition": True, "seed": True}

    spec_version: Literal[1] = 1
    method: int = Field(default=STELLATRAIN_METHOD, ge=1)
    machine: MachineLabel
    scale: Scale
    links: LinksSettings | None = None
    kernels: KernelsSettings | None = None
    seed: int = Field(default=0, ge=0)
    repetition: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_part(self) -> Self:
        given = [part for part in STELLATRAIN_PARTS if getattr(self, part) is not None]
        if len(given) != 1:
            raise ValueError(f"settings of one part of {', '.join(STELLATRAIN_PARTS)}, not of {len(given)}")
        return self

    @property
    def part(self) -> StellatrainPart:
        """What it measures."""
        return "kernels" if self.links is None else "links"

    @property
    def panel(self) -> str:
        """A panel for each part."""
        return self.part

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        folder = PurePosixPath(self.machine, self.scale, "stellatrain", self.part)
        return folder / f"c{self.cell_hash}" / f"r{self.repetition}.json"

    def title(self) -> str:
        """A short name for logs."""
        return f"stellatrain {self.part} r{self.repetition}"


class LinkBlock(FrozenModel):
    """Iterations of one way at one rate, after each other; of both nodes the slower, and the one that sent more."""

    rate_bits_per_s: _Count
    way: Way
    round: int = Field(ge=0)
    steps: _Count
    seconds: _Seconds
    sent_bytes: int = Field(ge=0)
    """Over the link, by the kernel's count: with headers, acknowledgements, and what was sent again."""

    @property
    def steps_per_s(self) -> float:
        """Iterations per second."""
        return self.steps / self.seconds

    @property
    def sent_bytes_per_step(self) -> float:
        """Of one node."""
        return self.sent_bytes / self.steps


class KernelTimes(FrozenModel):
    """What one kernel takes, in the order of the rounds."""

    kernel: Kernel
    seconds: list[_Seconds] = Field(min_length=1)
    energy_kept: Annotated[float, Field(ge=0, le=1.001)] | None = None
    """Of a compressor: the share of the sum of squares that is sent, of one gradient, with no residual."""
    elements_kept: int | None = None
    """As many elements hold it."""


class StellatrainRecord(Record[StellatrainSpec]):
    """One run, complete. Of the two lists that of its part is filled."""

    NAME: ClassVar[str] = "a record of StellaTrain's figure"

    parameters: int | None = Field(default=None, ge=1)
    """Of the model that is trained."""
    blocks: list[LinkBlock] = Field(default_factory=list)
    times: list[KernelTimes] = Field(default_factory=list)

    @model_validator(mode="after")
    def _of_its_part(self) -> Self:
        if (bool(self.blocks), bool(self.times)) != (self.spec.part == "links", self.spec.part == "kernels"):
            raise ValueError(f"not what a record of {self.spec.part} holds")
        return self

    def summary(self) -> str:
        """One number for each way, at the lowest rate, or for each kernel."""
        if self.times:
            return ", ".join(f"{one.kernel} {1000 * statistics.median(one.seconds):.3g} ms" for one in self.times)
        lowest = min(block.rate_bits_per_s for block in self.blocks)
        found: dict[str, list[float]] = {}
        for block in self.blocks:
            if block.rate_bits_per_s == lowest:
                found.setdefault(block.way, []).append(block.steps_per_s)
        told = ", ".join(f"{way} {statistics.median(rates):.3g}" for way, rates in found.items())
        return f"iterations/s at {lowest / 1e6:g} Mbit/s: {told}"
