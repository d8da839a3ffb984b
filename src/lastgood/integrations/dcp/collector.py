"""Python's garbage collector, held while many objects that all stay are made at once.

A load of many tensors makes metadata and plans of some hundred thousand objects within a moment. They look to the
collector like a heap that grows, so it looks through all objects of the process: 0.25 CPU seconds for the 470,000 that
torch and transformers leave, and nothing is found. None of these objects refers to itself.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["no_collection"]

_lock = threading.Lock()
_held = 0
_was_on = False


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No automatic collection inside it, in any thread; a collector that was off stays off. Keep it short."""
    global _held, _was_on
    with _lock:
        if _held == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _held += 1
    try:
        yield
    finally:
        with _lock:
            _held -= 1
            if _held == 0 and _was_on:
                gc.enable()
