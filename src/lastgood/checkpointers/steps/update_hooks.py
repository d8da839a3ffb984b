"""The hooks that a checkpointer has in optimizers, and how long their updates waited for it."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from lastgood._lazy import torch
from lastgood.checkpointers.steps.step_hooks import see_steps
from lastgood.checkpointers.steps.update_steps import UpdateSteps
from lastgood.errors import CheckpointError

if TYPE_CHECKING:
    from lastgood.checkpointers.copies.host import CopyFence

__all__ = ["UpdateHooks", "Waits", "remove_all"]


class _Owner(Protocol):
    @property
    def name(self) -> str:
        """The system's, for messages."""

    def before_update(self) -> None:
        """Return when the old weights may be overwritten."""


class UpdateHooks:
    """One checkpointer's hooks in optimizers, and when updates waited for its checkpoints.

    Each step of an optimizer that was seen calls the owner's `before_update`, in the process that called `begin` alone.

    Args:
        owner: the checkpointer; it is not kept alive.
        steps: told of each step's begin and end.
        timeout_s: how long a step may wait for a save in another thread.
    """

    def __init__(self, owner: _Owner, steps: UpdateSteps, timeout_s: float) -> None:
        self._owner = weakref.ref(owner)
        self._steps = steps
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self.handles: list[Any] = []
        self.updates = 0
        """Steps of optimizers that began in this incarnation."""
        self.optimizers: list[Any] = []
        self.began: Callable[[], None] | None = None
        """Called when a step begins, if that is set."""
        self._stall_s = 0.0
        self._kept: list[tuple[float, float]] | None = None
        """Begin and end of the process's waits, if `keep` was called."""
        self._kept_on_device: list[tuple[float, float]] = []
        self._kept_from: tuple[float, Any] = (0.0, None)
        """One moment on the process's clock, and the same on a CUDA device's."""
        self._device_waits: list[tuple[Any, Any]] = []
        """CUDA events before and after each wait that a stream did in an optimizer's place."""

    def begin(self) -> None:
        """An incarnation begins in this process: a forked child's steps are not its own."""
        self._process = os.getpid()

    def see(self, optimizers: Sequence[Any]) -> None:
        """See the steps of those that are not seen yet: a state may be given another optimizer after `start`."""
        for optimizer in optimizers:
            if not any(optimizer is known for known in self.optimizers):
                self.handles += see_steps(optimizer, self._step_begins, self._step_ends)
                self.optimizers.append(optimizer)

    def _step_begins(self, optimizer: Any, frame: FrameType) -> None:
        owner = self._owner()
        if os.getpid() != self._process or owner is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CheckpointError(
                f"{owner.name}: an optimizer step is being captured into a CUDA graph, and replays run no hooks; "
                "capture before start(), and call before_update() yourself before each replay"
            )
        self.updates += 1
        if self.began is not None:
            self.began()
        before = time.perf_counter()
        self._steps.begin(optimizer, frame, self._timeout_s)
        try:
            owner.before_update()
        except BaseException:
            self._steps.end(optimizer)  # nothing was changed
            raise
        after = time.perf_counter()
        self._stall_s += after - before
        if self._kept is not None:
            self._kept.append((before, after))

    def _step_ends(self, optimizer: Any) -> None:
        if os.getpid() == self._process:
            self._steps.end(optimizer)

    def wait_at(self, fence: CopyFence, timeout_s: float) -> None:
        """Wait at a fence in `before_update`, and keep what is needed to say how long the device waited."""
        self._fold()
        self._device_waits += fence.wait(timeout_s)

    def _fold(self) -> None:
        """Add up the device's waits that are over, so that they do not gather."""
        while self._device_waits and self._device_waits[0][1].query():
            before, after = self._device_waits.pop(0)
            waited_s = float(before.elapsed_time(after)) / 1e3
            self._stall_s += waited_s
            zero_s, zero = self._kept_from
            if zero is not None and zero.device == before.device:
                begin_s = zero_s + float(zero.elapsed_time(before)) / 1e3
                self._kept_on_device.append((begin_s, begin_s + waited_s))

    def remove(self) -> None:
        """Take all hooks away again. The seconds for which updates have waited stay."""
        remove_all(self.handles)
        self.optimizers.clear()
        self.updates = 0
        self.began = None
        self._kept, self._kept_on_device, self._kept_from = None, [], (0.0, None)

    def stalled_s(self) -> float:
        """Seconds for which updates have waited so far, as far as devices have come past their waits."""
        self._fold()
        return self._stall_s

    def keep(self) -> None:
        """From here on keep when updates waited; on CUDA this waits for the device once."""
        zero = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self._fold()  # waits of before are not among those that are kept
            zero = torch.cuda.Event(enable_timing=True)
            zero.record()
        self._kept, self._kept_from = [], (time.perf_counter(), zero)

    def waits(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Begin and end of what `keep` kept: the process's waits of 50 microseconds and more, and the device's."""
        self._fold()
        process = [(begin, end) for begin, end in self._kept or () if end - begin >= 5e-5]
        return process, list(self._kept_on_device)


class Waits:
    """What a checkpointer tells of how long updates waited for it."""

    _hooks: UpdateHooks

    @property
    def update_stall_s(self) -> float:
        """Seconds for which optimizers have waited in `before_update` so far.

        On CUDA the waiting is the stream's; it can be read once the device has come past it (after a synchronisation).
        """
        return self._hooks.stalled_s()

    def keep_update_waits(self) -> None:
        """From here to `close` keep when optimizers waited, for a timeline; on CUDA this waits for the device once."""
        self._hooks.keep()

    @property
    def update_waits(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Begin and end of waits in `before_update` since `keep_update_waits`, in `time.perf_counter()` seconds.

        First the process's, but for those shorter than 50 microseconds (that is the call itself); then those of the
        CUDA device that was the current one then, as far as it has come past them.
        """
        return self._hooks.waits()


def remove_all(handles: list[Any]) -> None:
    """Remove hooks; the list is empty then."""
    while handles:
        handles.pop().remove()
