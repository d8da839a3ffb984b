"""How long tests wait. `LASTGOOD_PATIENCE=5` makes all of these waits five times as long, for a very busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = float(os.environ.get("LASTGOOD_PATIENCE", "1"))
"""A factor on limits that only end a test which would otherwise wait for ever; no test takes longer because of it."""

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T], what: str | Callable[[], object], timeout_s: float, every_s: float = 0.01
) -> T:
    """What `predicate` gives once it is true.

    Args:
        predicate: asked every `every_s` seconds.
        what: names what is waited for; a function of it is called only when the wait fails.
        timeout_s: seconds to wait at most, times `PATIENCE`.
        every_s: seconds between two calls of `predicate`.

    Raises:
        AssertionError: it was not true in time.
    """
    limit_s = timeout_s * PATIENCE
    deadline = time.monotonic() + limit_s
    while not (found := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(every_s)
    return found
