"""The stages before the updates in one process, and one thread, so nothing overtakes anything."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lastgood.mirror.capture.frames import FrameSource
from lastgood.mirror.extract.extractor import Extractor
from lastgood.mirror.handover.clock import StageClock
from lastgood.mirror.handover.turn import Counters, Turn
from lastgood.mirror.streams.messages import Parsed, Parser

__all__ = ["LocalStages"]

_FRAMES = 4096
"""Read at once."""


class LocalStages:
    """`Stages` from a source on. It closes the source."""

    def __init__(self, source: FrameSource, parser: Parser, extractor: Extractor) -> None:
        self._source = source
        self._parser = parser
        self._extractor = extractor
        self._ended = False
        self._parses, self._extracts = StageClock(), StageClock()

    def read(self, timeout_s: float) -> Turn:
        """See `Stages`."""
        if self._ended:
            return Turn(self._extractor.finish(), last=True)
        batch = self._source.read(_FRAMES, timeout_s)
        if batch is None:
            self._ended = True
            with self._parses:
                parsed = self._parser.finish()
            return self._extracted(parsed)
        if not len(batch):
            return Turn()
        with self._parses:
            parsed = self._parser.feed(batch)
        return self._extracted(parsed)

    def _extracted(self, parsed: Parsed) -> Turn:
        with self._extracts:
            return Turn(self._extractor.feed(parsed))

    def free(self, memory: npt.NDArray[np.uint8]) -> None:
        """See `Stages`."""
        self._extractor.slots.free(memory)

    def counters(self) -> Counters:
        """See `Stages`."""
        return {
            "capture": self._source.counters(),
            "parse": {**self._parser.counters(), "seconds": self._parses.seconds},
            "extract": {
                **self._extractor.counters,
                **self._extractor.slots.counters,
                "seconds": self._extracts.seconds,
            },
        }

    def close(self) -> None:
        """See `Stages`."""
        self._source.close()
