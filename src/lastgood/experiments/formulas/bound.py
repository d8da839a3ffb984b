"""The bound: the throughput that a machine's ceilings allow, whatever the checkpointing system. Pure arithmetic.

A checkpoint of S bytes every f iterations of t seconds costs two things that no system can avoid. The copy of the state
must end before the next update overwrites it: S/C seconds, of which h hide after the next forward and backward pass.
And storage must take S bytes per interval, at B bytes per second in the long run. So::

    bound = min(1 / (t + max(0, S/C - h) / f),  f * B / S)

On several nodes a checkpoint may put more than S bytes on one disk, or send it over a link instead: `stored_bytes` and
`persist_bytes_per_s` are then those. docs/timing.md explains the terms and how each is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lastgood.sinks import Sink

__all__ = ["IN_INTERVAL", "Binds", "Bound", "throughput_bound", "why_above"]

Binds = Sink | Literal["training", "copy"]


@dataclass(frozen=True)
class Bound:
    """The best possible throughput, and what sets it."""

    iterations_per_s: float
    binds: Binds
    """A sink: the rate at which it takes checkpoints (``disk``: the persist ceiling; ``link``: the network's);
    ``copy``: a copy too long to hide; ``training``: none of them, so it is 1/t."""


def throughput_bound(
    *,
    iteration_s: float,
    interval_steps: int,
    state_bytes: float,
    copy_bytes_per_s: float,
    persist_bytes_per_s: float,
    hide_s: float,
    stored_bytes: float | None = None,
    sink: Sink = Sink.DISK,
) -> Bound:
    """The bound for iterations of `iteration_s` with a checkpoint of `state_bytes` every `interval_steps`.

    `hide_s` is the time from a save to the next update, after which a copy costs nothing. `stored_bytes` of one
    checkpoint go to the `sink` that has most to do, at `persist_bytes_per_s`; None: all of its `state_bytes`. An
    interval of 0 means no checkpoints. Raises ValueError if a term is outside its range.
    """
    for name, value in (
        ("iteration_s", iteration_s),
        ("copy_bytes_per_s", copy_bytes_per_s),
        ("persist_bytes_per_s", persist_bytes_per_s),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value!r}")
    for name, value in (("interval_steps", interval_steps), ("state_bytes", state_bytes), ("hide_s", hide_s)):
        if not value >= 0:
            raise ValueError(f"{name} must not be below 0, not {value!r}")
    if interval_steps == 0:
        return Bound(1 / iteration_s, "training")
    exposed_s = max(0.0, state_bytes / copy_bytes_per_s - hide_s)
    by_copy = 1 / (iteration_s + exposed_s / interval_steps)
    stored = state_bytes if stored_bytes is None else stored_bytes
    by_sink = interval_steps * persist_bytes_per_s / stored if stored > 0 else math.inf
    if by_sink < by_copy:
        return Bound(by_sink, sink)
    return Bound(by_copy, "copy" if exposed_s > 0 else "training")


IN_INTERVAL = "the bound lies in its interval"
"""Above a bound by no more than is known."""


def why_above(value: float, low: float, bound: float, skipped: int) -> str | None:
    """Why a ratio is above its bound, in words; None if it is not. `low` is the lower end of what it may be.

    The bound of a ratio to training without checkpoints is 1, or less. `skipped` checkpoints cost nothing.
    """
    if value <= bound:
        return None
    if low <= bound:
        return IN_INTERVAL
    if skipped:
        return f"{skipped} checkpoints were skipped"
    return "training without checkpoints was slower beside it, or a ceiling is higher than measured"
