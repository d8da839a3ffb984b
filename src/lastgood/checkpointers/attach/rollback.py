"""Back to the newest good checkpoint without a new process, as after a loss that went up and did not come down."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lastgood.checkpointers.attach.counting import Counts
from lastgood.checkpointers.events import CheckpointEvent
from lastgood.errors import NoCheckpoint

if TYPE_CHECKING:
    from lastgood.checkpointers.attach.data_facts import DataChanged

__all__ = ["RollsBack"]


class RollsBack(Counts):
    """What a checkpointer has for going back in the running process."""

    directory: Path
    _rolls_back = False
    """Whether `attach` must find something to resume from."""

    @abstractmethod
    def attach(
        self,
        *,
        data: Iterable[Any] | None = None,
        resume_step: int | None = None,
        data_changed: DataChanged = "refuse",
        unattached: Literal["refuse", "allow"] = "refuse",
        **parts: Any,
    ) -> int:
        """As a checkpointer's."""

    @abstractmethod
    def latest(self) -> int | None:
        """As a checkpointer's."""

    @abstractmethod
    def on_event(self, callback: Callable[[CheckpointEvent], object]) -> None:
        """As a checkpointer's."""

    @abstractmethod
    def _who_is_told(self) -> list[Callable[[CheckpointEvent], object]]:
        """What `on_event` was given."""

    @abstractmethod
    def _optimizers(self) -> list[Any]:
        """Of the attached training."""

    def rollback(self, *, skip_batches: bool = False) -> int:
        """Go back to the newest good checkpoint, in this process, and return its step. All ranks call it, or none.

        Call it between two steps of a loop of your own. What is in progress becomes durable first, and may be what is
        taken. The attached parts are loaded in place, gradients are dropped, and a new incarnation begins. A running
        loop over `data` goes on after the checkpoint's last batch; with `skip_batches` it goes on where it is, so that
        the batches since then are not seen again. If it leads back into the epoch before, that one is finished first:
        count epochs by ``data.epoch``.

        Raises NoCheckpoint if none is good: a training of one process then goes on as it is. Whatever else `attach`
        raises, it raises too, and the training is attached no longer, as after `close`.
        """
        attachment = self._attached()
        data, parts, optimizers = attachment.data, attachment.parts(), self._optimizers()
        if self._world()[1] == 1:
            self.drain(self._close_s)
            if self.latest() is None:
                raise NoCheckpoint(
                    f"{self.name}: there is no good checkpoint in {self.directory} to go back to; the training is as "
                    "it was"
                )
        told = self._who_is_told()
        self.close()
        self._rolls_back = True
        try:
            with contextlib.nullcontext() if data is None else data.rolled_back(skips=skip_batches):
                step = self.attach(
                    data=data,
                    data_changed="refuse" if data is None else data.changed,
                    unattached="allow",  # it was looked at before
                    **parts,
                )
        finally:
            self._rolls_back = False
        for callback in told:
            self.on_event(callback)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        return step
