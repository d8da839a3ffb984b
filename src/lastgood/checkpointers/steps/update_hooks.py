"""The hooks that a checkpointer has in optimizers, and how long their updates waited for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["UpdateHooks", "remove_all"]


@dataclass
class UpdateHooks:
    """Handles of one life's hooks, and when updates waited for checkpoints."""

    handles: list[Any] = field(default_factory=list)
    updates: int = 0
    """Steps of optimizers that began."""
    optimizers: list[Any] = field(default_factory=list)
    stall_s: float = 0.0
    kept: list[tuple[float, float]] | None = None
    """Begin and end of the process's waits, if `keep_update_waits` was called."""
    kept_on_device: list[tuple[float, float]] = field(default_factory=list)
    kept_from: tuple[float, Any] = (0.0, None)
    """One moment on the process's clock, and the same on a CUDA device's."""
    device_waits: list[tuple[Any, Any]] = field(default_factory=list)
    """CUDA events before and after each wait that a stream did in an optimizer's place."""

    def fold(self) -> None:
        """Add up the device's waits that are over, so that they do not gather."""
        while self.device_waits and self.device_waits[0][1].query():
            before, after = self.device_waits.pop(0)
            waited_s = float(before.elapsed_time(after)) / 1e3
            self.stall_s += waited_s
            zero_s, zero = self.kept_from
            if zero is not None and zero.device == before.device:
                begin_s = zero_s + float(zero.elapsed_time(before)) / 1e3
                self.kept_on_device.append((begin_s, begin_s + waited_s))

    def remove(self) -> None:
        """Take all hooks away again."""
        remove_all(self.handles)

    def stalled_s(self) -> float:
        """Seconds for which updates have waited so far, as far as devices have come past their waits."""
        self.fold()
        return self.stall_s

    def waited(self, before: float, after: float) -> None:
        """The process has waited in `before_update`."""
        self.stall_s += after - before
        if self.kept is not None:
            self.kept.append((before, after))

    def keep(self) -> None:
        """From here on keep when updates waited; on CUDA this waits for the device once."""
        zero = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self.fold()  # waits of before are not among those that are kept
            zero = torch.cuda.Event(enable_timing=True)
            zero.record()
        self.kept, self.kept_from = [], (time.perf_counter(), zero)

    def waits(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Begin and end of what `keep` kept: the process's waits of 50 microseconds and more, and the device's."""
        self.fold()
        process = [(begin, end) for begin, end in self.kept or () if end - begin >= 5e-5]
        return process, list(self.kept_on_device)


def remove_all(handles: list[Any]) -> None:
    """Remove hooks; the list is empty then."""
    while handles:
        handles.pop().remove()
