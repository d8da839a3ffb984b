"""When a training must have ended: at a time that it was given, or when its Slurm job ends."""

from __future__ import annotations

import logging
import math
import os
import time

from lastgood.errors import ConfigError
from lastgood.units import format_seconds

__all__ = ["DEADLINE", "SLURM", "check_deadline", "monotonic_end"]

_log = logging.getLogger("lastgood")

DEADLINE = "deadline"
"""What an end for this reason is called in events."""
SLURM = "slurm"
_VARIABLE = "SLURM_JOB_END_TIME"
_A_DATE_S = 1e9
"""What is less is a number of seconds, no time in this century."""


def check_deadline(system: str, deadline: float | str | None, interval_steps: int | None) -> None:
    """Raise ConfigError for what is no deadline."""
    if deadline is None or deadline == SLURM:
        return
    if not isinstance(deadline, (int, float)) or not math.isfinite(deadline):
        raise ConfigError(
            f"{system}: deadline is a time in seconds since 1970, or {SLURM!r} (the end of the Slurm job, if there is "
            f"one), or None, not {deadline!r}"
        )
    if deadline < _A_DATE_S:
        raise ConfigError(
            f"{system}: deadline={deadline:g} is a time in 1970, not one from now; for so many seconds give "
            f"deadline=time.time() + {deadline:g}"
        )
    if interval_steps == 0:
        raise ConfigError(
            f"{system}: deadline and interval_steps=0: a training that saves by hand also ends by hand; leave deadline "
            "out, or give an interval"
        )


def monotonic_end(system: str, deadline: float | str | None, *, together: bool) -> float | None:
    """The deadline by `time.monotonic()`; None if there is none.

    `together`: whether ranks can agree on a last step. Raises ConfigError if a time that was given cannot be kept.
    """
    given = not isinstance(deadline, str)
    at = deadline if not isinstance(deadline, str) else _end_of_job()
    if at is None:
        return None
    left_s = at - time.time()
    if left_s <= 0:
        if given:
            raise ConfigError(
                f"{system}: the deadline was {format_seconds(-left_s)} ago: a training that begins now cannot keep it; "
                "give a later one"
            )
        _log.warning("%s: %s was %s ago; it is no deadline", system, _VARIABLE, format_seconds(-left_s))
        return None
    if not together:
        if given:
            raise ConfigError(
                f"{system}: a deadline over several ranks needs torch.distributed, by which they agree on a last step; "
                "call torch.distributed.init_process_group() before, or leave deadline out"
            )
        return None
    return time.monotonic() + left_s


def _end_of_job() -> float | None:
    text = os.environ.get(_VARIABLE, "")
    try:
        at = float(text) if text else math.nan
    except ValueError:
        at = math.nan
    return at if math.isfinite(at) and at >= _A_DATE_S else None
