"""A board in shared memory on which a training process writes how far it is: a kill takes nothing of it back."""

from __future__ import annotations

import math
import mmap
import time
from pathlib import Path

import numpy as np

__all__ = ["MAX_STEPS", "Board", "losses_equal"]

MAX_STEPS = 1_000_000
"""Steps of all incarnations together; losses are kept by step."""

_COUNTERS = (
    "issued_step",
    "step",
    "durable_step",
    "named_step",
    "restored_step",
    "first_loss_equal",
    "failed_saves",
    "state_bytes",
    "parameters",
)
_TIMES = ("restoring_s", "restored_s", "training_s")
_FIELD_BYTES = 8
_LOSSES_AT = (len(_COUNTERS) + len(_TIMES)) * _FIELD_BYTES
_BOARD_BYTES = _LOSSES_AT + MAX_STEPS * _FIELD_BYTES
_UNSET = -1
_CUDA_LOSS_TOLERANCE = 0.01


class Board:
    """Made by the parent before it forks; one trainer at a time writes, the parent reads.

    Every field is one aligned word, so that a kill leaves the old value or the new one. Times are `time.monotonic()`
    seconds, which all processes of a machine share; 0 is "not yet". Counters are -1 before their first value.
    """

    def __init__(self, path: Path | None = None) -> None:
        """In memory for children; or in a file, with what it holds if it is there, for processes that are no kin."""
        there = path is not None and path.exists()
        # Pages that nobody touches cost nothing.
        memory = mmap.mmap(-1, _BOARD_BYTES) if path is None else _in_file(path)
        self._counters = np.frombuffer(memory, np.int64, len(_COUNTERS))
        self._times = np.frombuffer(memory, np.float64, len(_TIMES), len(_COUNTERS) * _FIELD_BYTES)
        self._losses = np.frombuffer(memory, np.uint64, MAX_STEPS, _LOSSES_AT)
        if not there:
            self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Forget what an incarnation said about itself; losses and the state's size stay."""
        kept = {"state_bytes", "parameters"}
        for place, name in enumerate(_COUNTERS):
            if name not in kept:
                self._counters[place] = 0 if name == "failed_saves" else _UNSET
        self._times[:] = 0.0

    def put(self, **counters: int) -> None:
        """Write counters."""
        for name, value in counters.items():
            self._counters[_COUNTERS.index(name)] = value

    def get(self, counter: str) -> int | None:
        """Read a counter; None before its first value."""
        value = int(self._counters[_COUNTERS.index(counter)])
        return None if value == _UNSET else value

    def stamp(self, name: str) -> None:
        """Write the time of a stage."""
        self._times[_TIMES.index(name)] = time.monotonic()

    def time_of(self, name: str) -> float:
        """The time of a stage; 0 before it."""
        return float(self._times[_TIMES.index(name)])

    def put_loss(self, step: int, loss: float) -> None:
        """Keep the loss of a step. Its bits are stored inverted, so that untouched memory is no loss."""
        self._losses[step] = ~np.float64(loss).view(np.uint64)

    def loss_of(self, step: int) -> float | None:
        """The loss that some incarnation had at `step`; None if none was there. Untouched memory reads as a NaN."""
        word = self._losses[step]
        return float((~word).view(np.float64)) if word else None

    def uptime_s(self, now_s: float) -> float:
        """Seconds in which the incarnation restored or trained until `now_s`."""
        restoring, restored, training = (self.time_of(name) for name in _TIMES)
        loading_s = (restored or now_s) - restoring if restoring else 0.0
        return max(0.0, loading_s) + (max(0.0, now_s - training) if training else 0.0)

    @property
    def begun(self) -> bool:
        """Whether the clock of uptime has run yet."""
        return self.time_of("restoring_s") > 0 or self.time_of("training_s") > 0

    @property
    def running(self) -> bool:
        """Whether the clock of uptime runs now."""
        restoring, restored, training = (self.time_of(name) for name in _TIMES)
        return bool(training) or (bool(restoring) and not restored)

    @property
    def load_s(self) -> float | None:
        """Seconds of the restore, once it is done."""
        restored = self.time_of("restored_s")
        return restored - self.time_of("restoring_s") if restored else None


def _in_file(path: Path) -> mmap.mmap:
    with path.open("a+b") as file:
        file.truncate(_BOARD_BYTES)
        return mmap.mmap(file.fileno(), _BOARD_BYTES)


def losses_equal(one: float, two: float, device: str) -> bool:
    """Whether losses of two processes agree: to the bit on the CPU, in the first digits on CUDA's fast kernels."""
    return one == two or (device == "cuda" and math.isclose(one, two, rel_tol=_CUDA_LOSS_TOLERANCE))
