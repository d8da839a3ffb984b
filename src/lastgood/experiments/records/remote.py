"""Checkpoints that leave the machine for S3: what is measured of them, and its record. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from lastgood.experiments.records.base import MachineLabel, Record, Scale, SpecWithoutWorkload
from lastgood.models import FrozenModel
from lastgood.units import MIB, format_seconds

__all__ = [
    "REMOTE_METHOD",
    "WAYS",
    "ComingBack",
    "RemotePart",
    "RemoteRecord",
    "RemoteSpec",
    "SentCheckpoint",
    "TrainingBlock",
    "Way",
]

REMOTE_METHOD = 1
"""Version of how it is measured, part of every run's identity."""
RemotePart = Literal["training", "return", "bytes"]
"""What a run measures: the throughput of a training and how far its remote checkpoints are behind it, the time to the
first step after coming back, or the bytes that are sent."""
Way = Literal[
    "alone", "async-save", "tier-off", "tier", "disk", "s3", "lost-node", "other-ranks", "all", "frozen", "lora"
]
WAYS: Final[Mapping[RemotePart, tuple[Way, ...]]] = {
    "training": ("alone", "async-save", "tier-off", "tier"),
    "return": ("disk", "lost-node", "s3", "other-ranks"),
    "bytes": ("all", "frozen", "lora"),
}
"""What is compared in each part, in the order of the picture. ``alone``: a training that nothing saves; ``async-save``:
DCP to S3; ``tier-off`` and ``tier``: PCcheck without and with its tier in S3."""
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=100_000)]


class RemoteSpec(SpecWithoutWorkload):
    """One run: one part, all its ways in turn, with an S3 server of the run's own."""

    NOT_IN_CELL: ClassVar[Mapping[str, Any]] = {"repetition": True}

    spec_version: Literal[1] = 1
    method: int = Field(default=REMOTE_METHOD, ge=1)
    machine: MachineLabel
    scale: Scale
    part: RemotePart
    width: _Count
    """Of each layer: a square of so many float32 weights."""
    layers: Annotated[int, Field(ge=2, le=1000)]
    batch: _Count
    threads: _Count
    """That the training computes with."""
    rounds: _Count
    """How often each way is measured; of bytes, how many checkpoints are sent after those that tell what changes."""
    steps: _Count = 1
    """Of one block of the training."""
    interval_steps: _Count = 1
    """From checkpoint to checkpoint on the disk."""
    remote_every: _Count = 1
    """Every so many-th of them goes to S3."""
    dcp_storage: str | None = Field(default=None, pattern=r"^[a-z0-9]{1,40}$")
    """What writes for DCP's async_save; None: it is left out."""
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    other_ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """That come back from what `ranks` have sent."""
    seed: int = Field(default=0, ge=0)
    repetition: int = Field(default=0, ge=0)

    @property
    def panel(self) -> str:
        """A panel for each part."""
        return self.part

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        cell = f"x{self.width}-l{self.layers}-c{self.cell_hash}"
        return PurePosixPath(self.machine, self.scale, "remote", self.part, cell, f"r{self.repetition}.json")

    def title(self) -> str:
        """A short name for logs."""
        return f"remote {self.part} r{self.repetition}"


class TrainingBlock(FrozenModel):
    """One block of a training that checkpoints in one way."""

    way: Way
    steps_per_s: _Rate
    drain_s: _Seconds
    """From the last step until its checkpoints are where they go."""
    durable_steps_per_s: _Rate
    """With that time counted."""
    lag_steps: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """After each step: steps from the newest checkpoint in S3 to it."""
    lag_s: list[_Seconds] = Field(default_factory=list)
    """After each step: the age of the state in that checkpoint."""
    sent: int = Field(default=0, ge=0)
    """Checkpoints that came to S3 in the block."""
    failed: int = Field(default=0, ge=0)


class ComingBack(FrozenModel):
    """One return of a job in fresh processes; of all its ranks the slowest."""

    way: Way
    ranks: int = Field(ge=1)
    attach_s: _Seconds
    step_s: _Seconds
    """The first step after it."""
    restored_step: int = Field(ge=0)
    equal: bool
    """Whether every rank holds what was saved, to the bit."""


class SentCheckpoint(FrozenModel):
    """One checkpoint of a state that changes in part."""

    way: Way
    number: int = Field(ge=1)
    """From 1; what did not change is known from the third on."""
    state_bytes: int = Field(ge=1)
    changed_bytes: int = Field(ge=0)
    """Of parameters that are trained, and their moments: nobody can send fewer."""
    sent_bytes: int = Field(ge=0)


class RemoteRecord(Record[RemoteSpec]):
    """One run, complete. Of the three lists the one of its part is filled."""

    NAME: ClassVar[str] = "a record of remote checkpoints"

    server: str
    """The S3 server of the run's own."""
    state_bytes: int = Field(ge=1)
    """Of one rank's state."""
    raw_write_bytes_per_s: list[_Rate] = Field(default_factory=list)
    """Plain puts of as many bytes, before each round."""
    raw_read_bytes_per_s: list[_Rate] = Field(default_factory=list)
    """Plain gets of them."""
    training: list[TrainingBlock] = Field(default_factory=list)
    returns: list[ComingBack] = Field(default_factory=list)
    checkpoints: list[SentCheckpoint] = Field(default_factory=list)

    def summary(self) -> str:
        """One number for each way."""
        found = []
        for way in WAYS[self.spec.part]:
            rates = [one.steps_per_s for one in self.training if one.way == way]
            back = [one.attach_s + one.step_s for one in self.returns if one.way == way]
            sent = [one.sent_bytes for one in self.checkpoints if one.way == way and one.number > 2]
            if rates:
                found.append(f"{way} {statistics.median(rates):.3g} steps/s")
            if back:
                found.append(f"{way} {format_seconds(statistics.median(back))}")
            if sent:
                found.append(f"{way} {statistics.median(sent) / MIB:.0f} MiB")
        return ", ".join(found)

    def marks(self) -> list[str]:
        """What came back and was different, and checkpoints that failed."""
        wrong = sorted({one.way for one in self.returns if not one.equal})
        failed = sorted({one.way for one in self.training if one.failed})
        return [
            *(f"{way}: what came back was not what was saved" for way in wrong),
            *(f"{way}: checkpoints failed" for way in failed),
        ]
