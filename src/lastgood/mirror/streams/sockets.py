"""Mirrored TCP connections to messages: each connection is read by the framing that recognises it, or left aside.

A connection is judged by its first bytes; one whose beginning was not captured, by what a framing finds in the middle.
TLS and connections that no framing knows are named once, and their bytes are not looked at any more.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from lastgood.mirror.capture.frames import NO_CHECKSUM
from lastgood.mirror.streams.ip import TCP, Left, ip_packet
from lastgood.mirror.streams.messages import HEAD, LOST, PIECE, Flow, Parsed, Transport
from lastgood.mirror.streams.tcp import (
    Bytes,
    Connection,
    Half,
    Reader,
    Streams,
    TcpSettings,
    in_memory,
    is_changed,
    tcp_segment,
)
from lastgood.units import MIB

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameBatch

__all__ = ["NOBODY", "Beginning", "Framing", "Gather", "SocketParser", "Verdict", "refusal"]

_KEPT_BYTES: Final = 4096
"""Of a connection's beginning, until a framing recognises it."""
_KEPT_MIDDLE_BYTES: Final = 2 * MIB
"""Of a connection that is read from its middle on."""
_SEARCHED_BYTES: Final = 1024 * MIB
"""A connection in whose middle nothing was found for so long is a stranger."""


class Verdict(enum.Enum):
    """What a framing says of a connection."""

    MINE = 1
    NOT_MINE = 2
    MORE = 3
    """It needs more bytes to tell."""


def refusal(source: bytes, source_port: int, destination: bytes, destination_port: int, *, tls: bool) -> str:
    """What is said of a connection that is not read."""
    ends = f"{ipaddress.ip_address(source)} port {source_port}"
    ends += f" and {ipaddress.ip_address(destination)} port {destination_port}"
    why = "is encrypted (TLS): nothing of it can be read" if tls else "speaks nothing that is known here"
    return f"the connection between {ends} {why}"


class Beginning:
    """What is known of one direction so far."""

    def __init__(self, half: Half, opener: bool | None) -> None:
        self._half = half
        self.opener = opener
        """Whether this side opened the connection; None if that was not seen."""
        self.broken = False
        """Whether a hole came."""
        self.content = bytearray()
        self.time_ns = 0
        """Of the newest bytes."""
        self.searched = 0
        """How much of `content` a framing has looked through without success."""
        self.dropped = 0
        """Bytes that came and are not kept any more."""

    @property
    def first(self) -> bool:
        """Whether `content` begins with the direction's first byte."""
        return self._half.first is not None and not self.broken

    @property
    def most(self) -> int:
        """Bytes to keep."""
        return _KEPT_BYTES if self.first else _KEPT_MIDDLE_BYTES


class Gather:
    """Collects what a batch gives."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._flows = 0
        self._kept: list[Bytes] = []
        self._start()

    def _start(self) -> None:
        self._parsed = Parsed()
        self._heads: list[tuple[int, int, int, int, int, int]] = []
        self._pieces: list[tuple[int, int, int, int, int, int]] = []
        self._lost: list[tuple[int, int, int, int, int]] = []

    def open(self, transport: Transport, connection: Connection, side: int, detail: Mapping[str, Any]) -> int:
        """A new flow, from `side` to the other one; returns its index."""
        source, source_port, destination, destination_port = connection.key
        ends = [(str(ipaddress.ip_address(source)), source_port)]
        ends.append((str(ipaddress.ip_address(destination)), destination_port))
        flow = Flow(self._flows, transport, *ends[side], *ends[1 - side], detail)
        self._flows += 1
        self._parsed.opened.append(flow)
        self.counts["flows"] += 1
        return flow.index

    def close(self, flow: int) -> None:
        """Nothing more comes of a flow."""
        self._parsed.closed.append(flow)

    def keep(self, content: bytes) -> Bytes:
        """Bytes with their address, until the next batch."""
        kept = in_memory(content)
        self._kept.append(kept)
        return kept

    def new_batch(self) -> None:
        """What was kept for the batch before is not needed any more."""
        self._kept.clear()

    def head(self, flow: int, opcode: int, message: int, slot: int, nbytes: int, time_ns: int) -> None:
        """A message begins."""
        self._heads.append((flow, opcode, message, slot, nbytes, time_ns))

    def piece(self, flow: int, message: int, offset: int, address: int, nbytes: int) -> None:
        """Bytes of a message's payload."""
        self.counts["payload_bytes"] += nbytes
        self._pieces.append((flow, 0, message, offset, address, nbytes))

    def lost(self, flow: int, message: int, offset: int, nbytes: int) -> None:
        """Bytes of a message's payload that will never come."""
        self.counts["lost_payload_bytes"] += nbytes
        self._lost.append((flow, 0, message, offset, nbytes))

    def resynced(self, flow: int, why: str) -> None:
        """Messages of a flow are missing."""
        self.counts["resynced"] += 1
        self._parsed.resynced.append((flow, why))

    def refuse(self, text: str) -> None:
        """Something that is not read."""
        self._parsed.refused.append(text)

    def take(self) -> Parsed:
        """What came since the last call."""
        parsed = self._parsed
        parsed.heads = np.array(self._heads, HEAD)
        parsed.pieces = np.array(self._pieces, PIECE)
        parsed.lost = np.array(self._lost, LOST)
        self._start()
        return parsed


class Framing(Protocol):
    """One way to put messages into TCP connections."""

    def judge(self, beginnings: tuple[Beginning, Beginning]) -> Verdict:
        """Whether a connection has this framing."""

    def readers(
        self, connection: Connection, beginnings: tuple[Beginning, Beginning], gather: Gather
    ) -> tuple[Reader, Reader]:
        """The readers of both directions; they get all that was kept, from the beginning."""


class _Nobody:
    """Reads what nobody knows."""

    def data(self, content: Bytes, time_ns: int) -> None:
        pass

    def hole(self, nbytes: int) -> None:
        pass

    def end(self) -> None:
        pass


NOBODY: Final = _Nobody()


class _Sniffer:
    """Keeps the beginning of a connection until it is known what it is."""

    def __init__(self, connection: Connection, framings: Sequence[Framing], gather: Gather) -> None:
        self._connection = connection
        self._framings = list(framings)
        self._gather = gather
        self._decided = False
        opened_by = connection.opened_by
        self.beginnings = (
            Beginning(connection.halves[0], None if opened_by is None else opened_by == 0),
            Beginning(connection.halves[1], None if opened_by is None else opened_by == 1),
        )
        connection.halves[0].reader = _Side(self, 0)
        connection.halves[1].reader = _Side(self, 1)

    def data(self, side: int, content: Bytes, time_ns: int) -> None:
        mine = self.beginnings[side]
        mine.content += content.view
        mine.time_ns = time_ns
        self._judge()
        if not self._decided and len(mine.content) > 2 * mine.most:
            if mine.first:
                self._leave(tls=False)
                return
            drop = len(mine.content) - mine.most
            del mine.content[:drop]
            mine.searched = max(0, mine.searched - drop)
            mine.dropped += drop
            if mine.dropped > _SEARCHED_BYTES:
                self._leave(tls=False)

    def hole(self, side: int, nbytes: int) -> None:
        mine = self.beginnings[side]
        mine.broken = True
        mine.dropped += len(mine.content) + nbytes
        mine.content.clear()
        mine.searched = 0

    def _judge(self) -> None:
        for framing in list(self._framings):
            verdict = framing.judge(self.beginnings)
            if verdict is Verdict.MINE:
                self._begin(framing)
                return
            if verdict is Verdict.NOT_MINE:
                self._framings.remove(framing)
        if any(one.first and one.opener and one.content[:2] == b"\x16\x03" for one in self.beginnings):
            self._leave(tls=True)
        elif not self._framings:
            self._leave(tls=False)

    def _begin(self, framing: Framing) -> None:
        self._decided = True
        connection = self._connection
        readers = framing.readers(connection, self.beginnings, self._gather)
        for half, reader, kept in zip(connection.halves, readers, self.beginnings, strict=True):
            half.reader = reader
            if kept.content:
                reader.data(self._gather.keep(bytes(kept.content)), kept.time_ns)

    def _leave(self, *, tls: bool) -> None:
        self._decided = True
        for half in self._connection.halves:
            half.reader = NOBODY
        self._gather.counts["strangers"] += 1
        self._gather.refuse(refusal(*self._connection.key, tls=tls))


class _Side:
    """One direction, while a connection is not known yet."""

    def __init__(self, sniffer: _Sniffer, side: int) -> None:
        self._sniffer, self._side = sniffer, side

    def data(self, content: Bytes, time_ns: int) -> None:
        self._sniffer.data(self._side, content, time_ns)

    def hole(self, nbytes: int) -> None:
        self._sniffer.hole(self._side, nbytes)

    def end(self) -> None:
        pass


class SocketParser:
    """A `Parser` of TCP connections."""

    def __init__(self, framings: Sequence[Framing], settings: TcpSettings | None = None) -> None:
        self._framings = framings
        self._gather = Gather()
        self._batch: FrameBatch | None = None
        self._streams = Streams(self, settings)
        self._left: Counter[str] = Counter()

    # -- Parser --------------------------------------------------------------------------------------------------------

    def feed(self, batch: FrameBatch) -> Parsed:
        """Read frames. Addresses of pieces hold until the next call."""
        self._batch = batch  # pieces lie in it
        self._streams.new_batch()
        self._gather.new_batch()
        data = batch.data
        base = int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0
        for offset, captured, length, time_ns, flags, link in batch.table.tolist():
            self._left["frames"] += 1
            if offset + captured > len(data):
                self._left[Left.DAMAGED.value] += 1
                continue
            frame = data[offset : offset + captured]
            packet = ip_packet(frame, max(length, captured), link)
            if isinstance(packet, Left):
                self._left[packet.value] += 1
                continue
            if packet.protocol != TCP:
                self._left["not_tcp"] += 1
                continue
            segment = tcp_segment(frame, packet)
            if isinstance(segment, Left):
                self._left[segment.value] += 1
                continue
            if not flags & NO_CHECKSUM and is_changed(frame, packet):
                self._left[Left.WRONG.value] += 1
                continue
            if segment.captured < segment.end:
                self._left["cut_segments"] += 1
            payload = Bytes(frame[segment.begin : segment.captured], base + offset + segment.begin)
            self._streams.segment(packet, segment, payload, time_ns)
        return self._gather.take()

    def finish(self) -> Parsed:
        """The source has ended: what is still open is lost."""
        self._streams.new_batch()
        self._gather.new_batch()
        self._streams.finish()
        return self._gather.take()

    def counters(self) -> dict[str, int]:
        """Frames left aside by reason, connections, repeated and lost bytes, flows, payload."""
        return dict(self._left + self._streams.counts + self._gather.counts)

    # -- Opener --------------------------------------------------------------------------------------------------------

    def open(self, connection: Connection) -> None:
        """A connection appears."""
        _Sniffer(connection, self._framings, self._gather)
