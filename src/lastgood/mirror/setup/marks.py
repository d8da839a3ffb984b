"""Marked frames: datagrams that tell, wherever they are seen, which way they went and which of them are missing."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lastgood.errors import HostError
from lastgood.mirror.capture.frames import FrameSource

__all__ = ["KEY_BYTES", "WAYS", "MarkCount", "Way", "new_key", "read_marks", "send_marks"]

Way = Literal["sent", "received"]
WAYS: Final[tuple[Way, ...]] = ("sent", "received")
"""As seen from the watched host."""
KEY_BYTES: Final = 16
_MARK = struct.Struct("<16s16sBI")
_MAGIC = b"lastgood-mirror\x01"
_PORT = 9
"""Discard: nobody answers more than that nobody is there."""
_SIZES = (0, 1200)
"""Bytes after the mark, in turns: small frames, and nearly full ones."""
_BURST = 16
_PAUSE_S = 0.002
_MOST_SCANNED_BYTES = 2048
_IPV4, _VLAN, _UDP = 0x0800, (0x8100, 0x88A8), 17


def new_key() -> bytes:
    """The key of one check: marks of others are not counted."""
    return secrets.token_bytes(KEY_BYTES)


@dataclass
class MarkCount:
    """Marks of one way that were seen: their numbers, and how often any came again or was cut."""

    numbers: Counter[int] = field(default_factory=Counter)
    cut: int = 0

    @property
    def seen(self) -> int:
        """Different ones."""
        return len(self.numbers)

    @property
    def repeated(self) -> int:
        """More than one of each."""
        return sum(self.numbers.values()) - len(self.numbers)


def send_marks(address: str, key: bytes, way: Way, count: int, sender: socket.socket | None = None) -> None:
    """Send `count` marks to an IPv4 address, in small bursts. Raises HostError."""
    with sender or socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for number in range(count):
            mark = _MARK.pack(_MAGIC, key, WAYS.index(way), number) + bytes(_SIZES[number % len(_SIZES)])
            try:
                datagrams.sendto(mark, (address, _PORT))
            except ConnectionRefusedError:  # of the one before: nobody is there, as it should be
                datagrams.sendto(mark, (address, _PORT))
            except OSError as error:
                raise HostError(f"cannot send marked frames to {address}: {error.strerror}") from error
            if number % _BURST == _BURST - 1:
                time.sleep(_PAUSE_S)


def read_marks(sources: Sequence[FrameSource], key: bytes, wanted: int, timeout_s: float) -> list[dict[Way, MarkCount]]:
    """Count marks on each source until all have `wanted` together, or the time is up."""
    found: list[dict[Way, MarkCount]] = [{way: MarkCount() for way in WAYS} for _ in sources]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and sum(one.seen for counts in found for one in counts.values()) < wanted:
        for source, counts in zip(sources, found, strict=True):
            batch = source.read(1024, 0.05)
            for number in range(len(batch) if batch is not None else 0):
                assert batch is not None
                if int(batch.table[number]["length"]) <= _MOST_SCANNED_BYTES:
                    _note(bytes(batch.frame(number)), int(batch.table[number]["length"]), key, counts)
    return found


def _note(frame: bytes, length: int, key: bytes, counts: dict[Way, MarkCount]) -> None:
    payload = _payload_of_udp(frame)
    if payload is None or len(payload) < _MARK.size:
        return
    magic, its_key, way, number = _MARK.unpack_from(payload)
    if magic == _MAGIC and its_key == key and way < len(WAYS):
        counts[WAYS[way]].numbers[number] += 1
        counts[WAYS[way]].cut += len(frame) < length


def _payload_of_udp(frame: bytes) -> bytes | None:
    """Of IPv4 in Ethernet, with or without VLAN tags."""
    place = 12
    for _ in range(3):
        if len(frame) < place + 2:
            return None
        (kind,) = struct.unpack_from(">H", frame, place)
        if kind not in _VLAN:
            break
        place += 4
    start = place + 2
    if kind != _IPV4 or len(frame) < start + 20 or frame[start] >> 4 != 4 or frame[start + 9] != _UDP:
        return None
    return frame[start + (frame[start] & 15) * 4 + 8 :]
