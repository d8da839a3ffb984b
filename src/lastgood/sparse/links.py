"""A rank's two links of the exchange: what is most urgent goes out first, and what comes is read as it comes.

How far an early layer overtakes a late one depends on what cannot be taken back any more: one record, and what the
kernel holds. Of bytes that it has not even sent the kernel takes `WINDOW_BYTES` at most (TCP_NOTSENT_LOWAT), whatever
the link's rate and delay are; what is on its way is TCP's own affair, so that long links are filled.
"""

from __future__ import annotations

import heapq
import itertools
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lastgood import _native
from lastgood.errors import CheckpointError, CorruptCheckpoint, WaitTimeout
from lastgood.sparse.chunks import HEADER_BYTES, Chunk, parse_header
from lastgood.units import KIB
from lastgood.wire.frames import is_ready, keep_alive, shut_down
from lastgood.wire.ring_link import Link

__all__ = ["LAST", "LINGER_S", "WINDOW_BYTES", "LinkReader", "LinkSender", "Urgency"]

WINDOW_BYTES = 64 * KIB
LINGER_S = 2.0
"""For the last words of an exchange: to go out, and to be heard."""
_LOOK_S = 0.2
_STEP_BYTES = 1 << 20
"""That one connection may bring before the other one is looked at."""
_STAGE_BYTES = 256 * KIB
"""That one call of the kernel may bring. Each gives the interpreter's lock away, which a busy thread returns late."""

Urgency = tuple[float, int]
"""Iteration and layer; lower ones first."""
LAST: Urgency = (math.inf, 0)
"""After everything else."""


@dataclass(order=True)
class _Entry:
    urgency: Urgency
    number: int
    header: bytes = field(compare=False)
    payload: memoryview | bytes = field(compare=False)


class LinkSender:
    """Sends records to the next rank in a thread of its own, the most urgent one first, equal ones in order.

    `failed` is told once, in that thread, if the other side does not take them.
    """

    def __init__(self, link: Link, timeout_s: float, failed: Callable[[CheckpointError], None]) -> None:
        self._link, self._timeout_s, self._failed = link, timeout_s, failed
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WINDOW_BYTES)
        keep_alive(link.socket)
        self._changed = threading.Condition()
        self._heap: list[_Entry] = []
        self._numbers = itertools.count()
        self._last_words: tuple[bytes, ...] | None = None
        self._deadline = math.inf
        """Nothing is sent after it."""
        self._discards = False
        self.sent_bytes = 0
        self.busy_s = 0.0
        """Seconds in which the link had more to send than it took."""
        self.progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lastgood-sparse-send", daemon=True)
        self._thread.start()

    def put(self, urgency: Urgency, records: list[tuple[bytes, memoryview | bytes]]) -> None:
        """Send records (header, payload) when nothing more urgent is left to send."""
        with self._changed:
            if self._discards or self._last_words is not None:
                return
            for header, payload in records:
                heapq.heappush(self._heap, _Entry(urgency, next(self._numbers), header, payload))
            self._changed.notify()

    def discard(self) -> None:
        """Nobody is there any more who takes records: forget those that wait, and all to come."""
        with self._changed:
            self._discards = True
            self._heap.clear()

    def finish(self, *last_words: bytes, flush_s: float) -> None:
        """Send what waits, for at most `flush_s` (0: the record that has begun only), then `last_words`, and end."""
        with self._changed:
            if self._last_words is None:
                self._last_words = last_words
            if not flush_s:
                self._heap.clear()
            self._deadline = min(self._deadline, time.monotonic() + max(flush_s, LINGER_S))
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Whether its thread has ended, within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- in its thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._heap and self._last_words is None:
                        self._changed.wait()
                    entries = self._most_urgent()
                if not entries:
                    break
                self._write(*(buffer for entry in entries for buffer in (entry.header, entry.payload)))
            self._write(*(self._last_words or ()))
        except CheckpointError as error:
            if not self._discards and self._last_words is None:
                self._failed(error)
        finally:
            shut_down(self._link.socket, socket.SHUT_WR)

    def _most_urgent(self) -> list[_Entry]:
        """One record, or as many small ones as are no longer than a long one."""
        entries: list[_Entry] = []
        left = WINDOW_BYTES
        while self._heap and (not entries or len(self._heap[0].payload) + HEADER_BYTES <= left):
            entries.append(heapq.heappop(self._heap))
            left -= len(entries[-1].payload) + HEADER_BYTES
        return entries

    def _write(self, *buffers: bytes | memoryview) -> None:
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        since = time.monotonic()
        while views:
            try:
                count = self._link.socket.sendmsg(views)
            except BlockingIOError:
                self._wait(since)
                continue
            except OSError as error:
                raise CheckpointError(f"{self._link.name}: the connection broke as blocks went out: {error}") from error
            self.progress_at = since = time.monotonic()
            self.sent_bytes += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _wait(self, since: float) -> None:
        begin = time.monotonic()
        ready = is_ready(self._link.socket, select.POLLOUT, _LOOK_S)
        now = time.monotonic()
        self.busy_s += now - begin
        if now >= self._deadline or (not ready and now >= since + self._timeout_s):
            raise WaitTimeout(f"waited {now - since:.3g} s for {self._link.name} to take blocks")


class LinkReader:
    """Reads records of one connection, as far as they have come.

    `place` gives the memory for a record's payload, `take` gets the complete record, checksum included; either may
    raise what is wrong with it.
    """

    def __init__(
        self, link: Link, place: Callable[[Chunk], memoryview], take: Callable[[Chunk, bytes, memoryview], None]
    ) -> None:
        self.link = link
        self._place, self._take = place, take
        self._header = bytearray(HEADER_BYTES)
        self._chunk: Chunk | None = None
        self._target = memoryview(self._header)
        self._filled = 0
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self.received_bytes = 0

    def step(self) -> bool:
        """Read what is there, or a part of it; False if the other side has ended this direction.

        Raises CheckpointError if the connection breaks or ends within a record, CorruptCheckpoint for a damaged one.
        """
        budget = _STEP_BYTES
        while budget > 0:
            try:
                count = self.link.socket.recv_into(self._stage)
            except BlockingIOError:
                return True
            except OSError as error:
                raise CheckpointError(f"{self.link.name}: the connection broke as blocks came: {error}") from error
            if count == 0:
                if self._filled or self._chunk is not None:
                    raise CheckpointError(f"{self.link.name} closed the connection in the middle of a block")
                return False
            self.received_bytes += count
            budget -= count
            self._use(self._stage[:count])
            if count < len(self._stage):  # there was no more
                return True
        return True

    def _use(self, content: memoryview) -> None:
        while content:
            count = min(len(self._target) - self._filled, len(content))
            self._target[self._filled : self._filled + count] = content[:count]
            self._filled += count
            content = content[count:]
            if self._filled == len(self._target):
                self._complete()

    def _complete(self) -> None:
        chunk = self._chunk
        if chunk is None:
            chunk = parse_header(self._header, self.link.name)
            self._target = self._place(chunk)
            if len(self._target) != chunk.length:
                raise AssertionError(f"{len(self._target)} bytes of memory for a record of {chunk.length}")
            self._chunk, self._filled = chunk, 0
            if chunk.length:
                return
        if _native.crc32c(self._target) != chunk.checksum:
            raise CorruptCheckpoint(f"{self.link.name}: a damaged record: its checksum does not hold")
        payload, self._target = self._target, memoryview(self._header)
        self._chunk, self._filled = None, 0
        self._take(chunk, bytes(self._header), payload)
