"""How long a stage has worked, by the clock on the wall; what it waits between two pieces of work does not count."""

from __future__ import annotations

import time
from types import TracebackType

from typing_extensions import Self

__all__ = ["StageClock"]


class StageClock:
    """Runs while it is entered; for one thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds += time.perf_counter() - self._began
