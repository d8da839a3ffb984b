"""One checkpoint of all ranks of a job, in directories or among objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lastgood.storage import SlotInfo, SlotView

__all__ = ["JobCheckpoint", "Parts"]

Parts = tuple[tuple[SlotView, ...], tuple[SlotInfo, ...]]
"""A view and what it shows, by rank."""


@dataclass(frozen=True)
class JobCheckpoint:
    """A checkpoint that every rank holds completely: one step of one incarnation of one job."""

    job: Path | str
    incarnation: int
    step: int
    job_id: bytes
    load: Callable[[], Parts] = field(repr=False, compare=False)
    """Finds the parts, when they are needed. Raises CheckpointError."""
    bad: str | None = None
    """Why it was judged bad, if a rank did."""

    @cached_property
    def _parts(self) -> Parts:
        return self.load()

    @property
    def views(self) -> tuple[SlotView, ...]:
        """By rank. Raises CheckpointError, as `infos`: that of objects is only looked at here."""
        return self._parts[0]

    @property
    def infos(self) -> tuple[SlotInfo, ...]:
        """By rank."""
        return self._parts[1]

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return len(self.views)

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of the job's checkpoints."""
        return self.incarnation, self.step

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.job}: step {self.step} of {self.world_size} ranks"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """As `SlotView.hold`, for the parts of all ranks."""
        with ExitStack() as held:
            for view, info in zip(self.views, self.infos, strict=True):
                held.enter_context(view.hold(info))
                if view.remote:
                    break  # that was the checkpoint of all ranks
            yield
