"""What a user should see without having set up logging: one line now and then."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["tell", "told_if_slow"]

_log = logging.getLogger("lastgood")

SLOW_S = 2.0
"""What takes longer is told."""
_AGAIN_S = 10.0


def tell(message: str) -> None:
    """Log at INFO; if no logging is set up at all, write to stderr, unless the logger was made quieter than that.

    Python shows what nobody handles from WARNING on only, and this is none.
    """
    if _log.hasHandlers():
        _log.info("%s", message)
    elif _log.level <= logging.INFO and not _log.disabled:
        sys.stderr.write(f"lastgood: {message}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def told_if_slow(what: str, progress: Callable[[], str]) -> Iterator[None]:
    """Tell what is being done, and how far it is, if it lasts longer than `SLOW_S`; then every ten seconds."""
    done = threading.Event()
    begin = time.monotonic()

    def watch() -> None:
        wait_s = SLOW_S
        while not done.wait(wait_s):
            wait_s = _AGAIN_S
            tell(f"{what}: {progress()}, {time.monotonic() - begin:.0f} s so far")

    thread = threading.Thread(target=watch, name="lastgood-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
