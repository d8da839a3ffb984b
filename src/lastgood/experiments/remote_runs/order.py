"""What a rank of a run of remote checkpoints is told, and what comes of it. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lastgood.experiments.dcp.places import S3Access
from lastgood.experiments.records.remote import ComingBack, RemoteSpec, SentCheckpoint, TrainingBlock, Way
from lastgood.models import FrozenModel

__all__ = ["RemoteOrder", "RemoteResult", "Task"]

Task = Literal["training", "bytes", "leave", "return"]


class RemoteOrder(FrozenModel):
    """What a rank is told. It stands on a command line, which every user of its host can read."""

    spec: RemoteSpec
    task: Task
    way: Way | None = None
    """Of a return."""
    url: str
    """Of the checkpoints in S3; below it, for a training and for bytes."""
    access: S3Access
    folder: str
    """Of the checkpoints on the disk."""
    digest: str = ""
    """Of what is to come back."""
    result: str
    """The file to which rank 0 writes its result."""
    parent: int
    """Process to end with."""


class RemoteResult(FrozenModel):
    """What rank 0 knows in the end."""

    state_bytes: int = 0
    digest: str = ""
    raw: list[tuple[float, float]] = Field(default_factory=list)
    """Bytes per second of plain puts and gets."""
    training: list[TrainingBlock] = Field(default_factory=list)
    returns: list[ComingBack] = Field(default_factory=list)
    checkpoints: list[SentCheckpoint] = Field(default_factory=list)
