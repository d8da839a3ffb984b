"""Messages from one process to another: parts of them are frames of a ring (capture/ring.py), the last one is marked.

Nothing is dropped: who writes waits for room. What one stage writes is never taken for what another one does, by the
ring's link type.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from lastgood.errors import CorruptCheckpoint, HostError, StorageError
from lastgood.mirror.capture.frames import FRAME, FrameBatch
from lastgood.mirror.capture.ring import RingReader, RingWriter
from lastgood.units import KIB, format_bytes

__all__ = ["EXTRACTED", "PARSED", "PipeReader", "PipeWriter"]

PARSED: Final = 147
"""Link type of a ring that holds messages as parsers make them (USER0 of pcap's numbers)."""
EXTRACTED: Final = 148
"""Of one that holds what was extracted (USER1)."""
_STAGES: Final = {PARSED: "mirror parse", EXTRACTED: "mirror extract"}
_PART_BYTES: Final = 128 * KIB
_LAST: Final = 1
_READ_PARTS: Final = 64
_LOOK_S: Final = 0.2

Buffer = bytes | bytearray | memoryview


class PipeWriter:
    """The side that gives."""

    def __init__(self, path: Path, nbytes: int, kind: int, *, patience_s: float = 60.0) -> None:
        """Make the ring. Raises as `RingWriter`. `patience_s`: how long a reader that takes nothing is waited for."""
        self._ring = RingWriter(path, nbytes, kind)
        self._kind = kind
        self._patience_s = patience_s
        self._number = 0
        self._has_been_read = False

    def send(self, parts: Sequence[Buffer], stop: threading.Event) -> None:
        """Send a message. Given up when `stop` is set. Raises WaitTimeout if nobody takes anything."""
        content = b"".join(parts)
        begins = np.arange(0, max(1, len(content)), _PART_BYTES)
        table = np.zeros(len(begins), FRAME)
        table["offset"] = begins
        table["captured"] = table["length"] = np.minimum(_PART_BYTES, len(content) - begins)
        table["link"], table["time_ns"] = self._kind, self._number
        table["flags"][-1] = _LAST
        self._number += 1
        self._ring.write(FrameBatch(memoryview(content), table), drop=False, patience_s=self._patience_s, stop=stop)
        self._has_been_read = self._has_been_read or self._ring.other_lives()

    def end(self, stop: threading.Event) -> None:
        """Say that nothing more comes, and wait until all is taken, its reader is gone, or `stop` is set."""
        self._ring.end()
        held, deadline = -1, 0.0
        while not stop.is_set() and not self._ring.wait_drained(_LOOK_S):
            if self._has_been_read and not self._ring.other_lives():
                break
            now = self._ring.counters()["held_bytes"]
            if now != held:
                held, deadline = now, time.monotonic() + self._patience_s
            elif time.monotonic() > deadline:
                break

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()


class PipeReader:
    """The side that takes."""

    def __init__(self, path: Path, kind: int, *, most_bytes: int, wait_s: float = 0.0) -> None:
        """Wait for the ring up to `wait_s`. `most_bytes` bounds a message.

        Raises HostError if there is none, LockHeld if it has a reader, StorageError if another stage fills it.
        """
        self.path = path
        self._stage = _STAGES[kind]
        try:
            self._ring = RingReader(path, wait_s=wait_s)
        except HostError as error:
            raise HostError(f"{path}: there is no such ring; start `lastgood {self._stage} --out {path}`") from error
        if self._ring.link_type != kind:
            self._ring.close()
            raise StorageError(f"{path}: this ring is not filled by `lastgood {self._stage}`; name that one's --out")
        self._most_bytes = most_bytes
        self._part = bytearray()
        self._number = -1
        self._ready: deque[bytes] = deque()

    @property
    def writer_died(self) -> bool:
        """Whether the other side ended without saying so."""
        return self._ring.writer_died

    def read(self, timeout_s: float) -> bytes | None:
        """A message; empty if none came in time, None at the end. Raises CorruptCheckpoint if it is none."""
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            batch = self._ring.read(_READ_PARTS, max(0.0, deadline - time.monotonic()))
            if batch is None:
                return None
            if not len(batch):
                return b""
            for row in range(len(batch)):
                self._take(batch.frame(row), int(batch.table["time_ns"][row]), int(batch.table["flags"][row]))
            # It is copied. Whoever closes after the last message would keep the writer waiting otherwise.
            self._ring.give_back()
        return self._ready.popleft()

    def _take(self, part: memoryview, number: int, flags: int) -> None:
        if self._part and number != self._number:
            raise CorruptCheckpoint(f"{self.path}: message {self._number} is not complete; start all stages again")
        if len(self._part) + len(part) > self._most_bytes:
            raise CorruptCheckpoint(
                f"{self.path}: a message has more than {format_bytes(self._most_bytes)}; start all stages again"
            )
        self._number = number
        self._part += part
        if flags & _LAST:
            self._ready.append(bytes(self._part))
            self._part.clear()

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()
