"""From a source of frames to the ring of another process, and to a file: the dump stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lastgood.mirror.capture.frames import FrameSource
from lastgood.mirror.capture.keep import FrameKeeper
from lastgood.mirror.capture.ring import RingWriter

__all__ = ["Dump"]

_BATCH_FRAMES = 4096
_TURN_S = 0.1
_REPORT_S = 0.5


class Dump:
    """Moves frames until its source ends, or it is told to stop."""

    def __init__(
        self,
        source: FrameSource,
        *,
        ring: RingWriter | None = None,
        keep: FrameKeeper | None = None,
        drop: bool = True,
        patience_s: float = 60.0,
    ) -> None:
        """With `drop` a full ring loses frames, which are counted: what an interface brings does not wait.

        Without, the ring is waited for, up to `patience_s` without progress.
        """
        self._source = source
        self._ring = ring
        self._keep = keep
        self._drop = drop
        self._patience_s = patience_s

    def run(self, stop: threading.Event, report: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Until the end; then waits for the reader to take all, if the source was a file.

        `report` gets the counters about twice a second. Raises WaitTimeout if the ring stays full.
        """
        self._tell(report)
        due = time.monotonic() + _REPORT_S
        ended = False
        while not stop.is_set() and not ended:
            batch = self._source.read(_BATCH_FRAMES, _TURN_S)
            ended = batch is None
            if batch is not None and len(batch):
                if self._keep is not None:
                    self._keep.write(batch)
                if self._ring is not None:
                    self._ring.write(batch, drop=self._drop, patience_s=self._patience_s, stop=stop)
            if time.monotonic() >= due:
                due = time.monotonic() + _REPORT_S
                self._tell(report)
        if self._ring is not None:
            self._tell(None)  # what the reader finds at its end
            self._ring.end()
            if ended and not self._drop and not stop.is_set():
                self._ring.wait_drained(self._patience_s)
        self._tell(report)

    def counters(self) -> dict[str, dict[str, int]]:
        """Each place where a frame can be lost, from the first to the last."""
        found = {"source": self._source.counters()}
        if self._keep is not None:
            found["keep"] = self._keep.counters()
        if self._ring is not None:
            found["ring"] = self._ring.counters()
        return found

    def _tell(self, report: Callable[[dict[str, Any]], None] | None) -> None:
        found = self.counters()
        if self._ring is not None:
            self._ring.report({place: found[place] for place in found if place != "ring"})
        if report is not None:
            report(found)
