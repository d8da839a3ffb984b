"""RunSpec: what one measurement is, where its record lies, and how it is asked for again. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from typing_extensions import Self

from lastgood.checkpointers.registry import system_traits
from lastgood.experiments.records.base import MachineLabel, Scale, Spec
from lastgood.experiments.records.blocks import PairPlan, without_none_pairs

__all__ = ["SPEC_VERSION", "Parallel", "RunSpec"]

SPEC_VERSION: Literal[1] = 1
Parallel = Literal["none", "ddp", "fsdp2", "zero1", "zero2", "zero3", "pipeline"]
"""How several ranks train one model: data-parallel copies, each rank a shard of every parameter, DeepSpeed's ZeRO with
optimizer states, gradients too, or parameters too partitioned, or DeepSpeed's pipeline with a stage on each rank."""
Scalar = str | int | float | bool | None
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
"""It becomes the name of a folder."""


class RunSpec(Spec):
    """One measurement: workload, system, interval, repetition, and every option resolved.

    Two specs that differ only in repetition or seed are repetitions of one *cell* and share a `variant`.
    """

    CAME_LATER: ClassVar[tuple[str, ...]] = ("drain_each", "ranks", "nodes", "parallel", "shadows", "kills")
    NOT_IN_CELL: ClassVar[Mapping[str, Any]] = {"repetition": True, "seed": True, "proof": True}

    spec_version: Literal[1] = SPEC_VERSION
    machine: MachineLabel
    scale: Scale
    workload: _Name
    workload_options: dict[str, Scalar] = Field(default_factory=dict)
    system: _Name
    system_options: dict[str, Scalar | list[int]] = Field(default_factory=dict)
    method: int = Field(ge=1)
    """The system's METHOD version."""
    interval_steps: int = Field(ge=0)
    """Steps between checkpoints; 0 for a run without any."""
    warmup_steps: int = Field(ge=0)
    measured_steps: int = Field(ge=1)
    proof: bool = True
    """Whether the run also proves its restore, untimed, after the measurement."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(ge=1)
    seed: int = Field(ge=0)
    repetition: int = Field(ge=0)
    data: str | None = None
    """Path of the data that a user gave; None for the small data that Lastgood prepares."""
    drain_each: bool = False
    """Whether training waits after every save until the checkpoint is durable, so that no two are in progress."""
    ranks: int = Field(default=1, ge=1, le=65536)
    """Processes that train together, each with `threads`."""
    nodes: int = Field(default=1, ge=1, le=4096)
    """Hosts that they run on. Which hosts, the record says."""
    parallel: Parallel = "none"
    shadows: int = Field(default=0, ge=0, le=4096)
    """Processes outside of the training that a system such as Checkmate sends gradients to."""
    kills: int = Field(default=0, ge=0, le=1000)
    """How many times, after the measurement, all ranks are killed while they train with checkpoints, and restored."""

    pairs: PairPlan | None = None
    """Measure blocks with and without checkpoints in turn, each of the former `measured_steps` long; None: one stretch
    of that length, with checkpoints."""

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_none_pairs(write(self))

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        if (self.ranks == 1) != (self.parallel == "none"):
            raise ValueError(f"{self.ranks} ranks and parallel={self.parallel!r} do not go together")
        if self.ranks < self.nodes:
            raise ValueError(f"{self.ranks} ranks are too few for {self.nodes} nodes")
        if (self.shadows > 0) != (system_traits(self.system).helper == "shadows"):
            raise ValueError(f"{self.shadows} shadows and system={self.system!r} do not go together")
        if self.pairs is not None and self.drain_each:
            raise ValueError("pairs of blocks are not for times of single checkpoints")
        if self.pairs is not None and self.interval_steps and self.measured_steps % self.interval_steps:
            raise ValueError(f"a block of {self.measured_steps} steps has no whole intervals of {self.interval_steps}")
        if "/" in self.variant:
            raise ValueError(f"options that make no name of a folder: {self.variant[:80]!r}")
        if self.kills and (self.ranks == 1 or not self.interval_steps):
            raise ValueError("kills are for runs over several ranks with checkpoints")
        return self

    @property
    def panel(self) -> str:
        """Of its workload."""
        return self.workload

    @property
    def helpers(self) -> int:
        """How many helper processes its service has: `shadows`, which keeps its name in records."""
        return self.shadows

    @property
    def over_ranks(self) -> bool:
        """Whether several processes train together."""
        return self.ranks > 1

    @property
    def variant(self) -> str:
        """Readable axes and the short hash, for instance ``n2-p2-c81f4a58`` or ``s100-c81f4a58``.

        Of several ranks it begins with their number, ``w4-ddp-...``.
        """
        ranks = [f"w{self.ranks}", self.parallel] if self.ranks > 1 else []
        ranks += [f"m{self.shadows}"] if self.shadows else []
        size = [f"s{self.workload_options['megabytes']}"] if "megabytes" in self.workload_options else []
        readable = [f"{letter}{self.system_options[key]}" for key, letter in _READABLE if key in self.system_options]
        return "-".join([*ranks, *size, *readable, f"c{self.cell_hash}"])

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        return PurePosixPath(
            self.machine,
            self.scale,
            self.workload,
            self.system,
            f"f{self.interval_steps}",
            self.variant,
            f"r{self.repetition}.json",
        )

    def title(self) -> str:
        """A short name for logs and progress bars."""
        size = f" {self.workload_options['megabytes']} MB" if "megabytes" in self.workload_options else ""
        ranks = f" {self.parallel} {self.ranks}" if self.ranks > 1 else ""
        return f"{self.workload}{size}{ranks} {self.system} f{self.interval_steps} r{self.repetition}"


_READABLE = (("max_in_flight", "n"), ("writer_threads", "p"))
