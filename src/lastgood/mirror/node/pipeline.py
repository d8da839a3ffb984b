"""All stages in one process: frames, messages, buffers, updates. One thread, so nothing overtakes anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from lastgood.mirror.capture.frames import FrameSource
from lastgood.mirror.extract.extractor import Extracted, Extractor
from lastgood.mirror.node.follower import Follower
from lastgood.mirror.streams.messages import Parser

__all__ = ["Pipeline"]

_FRAMES = 4096
"""Read at once."""
_TICK_S = 0.1


class Pipeline:
    """From a source to the follower.

    Args:
        each: called between two batches, and at least ten times a second.
    """

    def __init__(
        self,
        source: FrameSource,
        parser: Parser,
        extractor: Extractor,
        follower: Follower,
        each: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._parser = parser
        self._extractor = extractor
        self._follower = follower
        self._each = each

    def run(self, stop: threading.Event) -> bool:
        """Follow until the source ends or `stop` is set; whether it ended. Raises CheckpointError as the source."""
        while not stop.is_set():
            batch = self._source.read(_FRAMES, _TICK_S)
            if batch is None:
                self._hear(self._extractor.feed(self._parser.finish()))
                self._follower.ended = True
                self._hear(self._extractor.finish())
                return True
            if len(batch):
                self._hear(self._extractor.feed(self._parser.feed(batch)))
            self._each()
        return False

    def _hear(self, events: list[Extracted]) -> None:
        for memory in self._follower.hear(events):
            self._extractor.slots.free(memory)

    def counters(self) -> Mapping[str, Mapping[str, float]]:
        """What each stage counted."""
        return {
            "capture": self._source.counters(),
            "parse": self._parser.counters(),
            "extract": {**self._extractor.counters, **self._extractor.slots.counters},
            "node": dict(self._follower.counters),
        }
