"""Stages that are processes of their own: parse, extract, and what the updates see of them.

Each ends when the one before it has ended, after everything that it gave. If the one before it died, it ends as well,
and reports that: what was in its memory is lost, so all stages are started again. The updates alone go on, and serve
what they hold.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

from lastgood.errors import HostError
from lastgood.mirror.capture.frames import FrameSource
from lastgood.mirror.extract.extractor import Extractor
from lastgood.mirror.extract.slots import Filled
from lastgood.mirror.handover.clock import StageClock
from lastgood.mirror.handover.extracted import pack_extracted, unpack_extracted
from lastgood.mirror.handover.parsed import pack_parsed, unpack_parsed
from lastgood.mirror.handover.pipe import PipeReader, PipeWriter
from lastgood.mirror.handover.turn import Counters, Turn
from lastgood.mirror.streams.messages import Parser

__all__ = ["StagesBefore", "run_extract", "run_parse"]

_log = logging.getLogger("lastgood.mirror")
_FRAMES = 512
"""Read at once: their bytes are one message."""
_TICK_S = 0.1


def run_parse(source: FrameSource, parser: Parser, out: PipeWriter, stop: threading.Event) -> Counters:
    """Parse until the source ends, or `stop` is set; what was counted. Raises as the source, and WaitTimeout."""
    clock = StageClock()

    def counters() -> Counters:
        return {"capture": source.counters(), "parse": {**parser.counters(), "seconds": clock.seconds}}

    while not stop.is_set():
        batch = source.read(_FRAMES, _TICK_S)
        if batch is None:
            with clock:
                parsed = parser.finish()
            out.send(pack_parsed(parsed, counters()), stop)
            break
        if len(batch):
            with clock:
                parsed = parser.feed(batch)
            out.send(pack_parsed(parsed, counters()), stop)
    out.end(stop)
    return counters()


def run_extract(pipe: PipeReader, extractor: Extractor, out: PipeWriter, stop: threading.Event) -> Counters:
    """Extract until the parser's stage ends, or `stop` is set; what was counted. Raises HostError if that one died."""
    before: Counters = {}
    clock = StageClock()

    def counters() -> Counters:
        counted = {**extractor.counters, **extractor.slots.counters, "seconds": clock.seconds}
        return {**before, "extract": counted}

    while not stop.is_set():
        message = pipe.read(_TICK_S)
        if message == b"":
            continue
        if message is None:
            if pipe.writer_died:
                raise HostError(f"{pipe.path}: its parser has died; start all stages again")
            with clock:
                events = extractor.finish()
            out.send(pack_extracted(events, counters(), last=True), stop)
            break
        parsed, before = unpack_parsed(message, str(pipe.path))
        with clock:
            events = extractor.feed(parsed)
        if events:
            out.send(pack_extracted(events, counters()), stop)
            for one in events:
                if isinstance(one, Filled):
                    extractor.slots.free(one.memory)
    out.end(stop)
    return counters()


class StagesBefore:
    """`Stages` in other processes."""

    def __init__(self, pipe: PipeReader) -> None:
        self._pipe = pipe
        self._counters: Counters = {}

    def read(self, timeout_s: float) -> Turn:
        """See `Stages`. Stages that died are an end: what is held is served on."""
        message = self._pipe.read(timeout_s)
        if message is None:
            died = self._pipe.writer_died
            why = "has died" if died else "was ended"
            _log.log(logging.ERROR if died else logging.INFO, "%s: `lastgood mirror extract` %s", self._pipe.path, why)
            return Turn(last=True)
        if not message:
            return Turn()
        turn, self._counters = unpack_extracted(message, str(self._pipe.path))
        return turn

    def free(self, memory: npt.NDArray[np.uint8]) -> None:
        """It is this process's own."""

    def counters(self) -> Counters:
        """See `Stages`."""
        return self._counters

    def close(self) -> None:
        """See `Stages`."""
        self._pipe.close()
