"""NCCL's messages over its socket transport, from 2.19 on.

For each channel and neighbour the sender opens a set of connections to one port: some data sockets, then a control
socket. The control socket carries the size of each message (int32), followed by its payload if that is short (from 2.27
on) or if there are no data sockets. Otherwise the payload is cut into tasks that go over the data sockets in turns.
Payloads of protocol LL carry a flag after every 4 bytes; they are handed on without.

Sizes cannot be found again in the middle of a stream, so a set must be captured from its beginning on, and ends for
this parser if a size is lost.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Final, Literal, NamedTuple

import numpy as np

from lastgood.mirror.streams.messages import DATA
from lastgood.mirror.streams.sockets import NOBODY, Beginning, Gather, SocketParser, Verdict
from lastgood.mirror.streams.tcp import Bytes, Connection, Reader, TcpSettings
from lastgood.units import KIB, MIB

__all__ = ["DEFAULT_MAGIC", "NcclFraming", "NcclSocketParser", "NcclSockets", "task_bytes"]

DEFAULT_MAGIC: Final = 0x564AB9F2FC4B9D6C
"""NCCL_SOCKET_MAGIC changes it."""
_OPENING = struct.Struct("<QiB")
_NET_SOCKET: Final = 3
"""The type of connection, among those with the magic number."""
_SIZE = struct.Struct("<i")
_INLINE_SINCE: Final = (2, 27)
_LEAST_TASK_BYTES: Final = 64 * KIB
_MOST_SOCKETS: Final = 64
_LINE_BYTES: Final = 16
"""Of LL: data, flag, data, flag, of 4 bytes each."""
_PROBE_BYTES: Final = 4 * _LINE_BYTES
_MOST_LL_BYTES: Final = 256 * KIB
_MOST_MESSAGE_BYTES: Final = 16 * MIB
"""A slice has a quarter of NCCL_BUFFSIZE (4 MiB): what says more is no size."""
_MOST_STEPS: Final = 8
"""Of NCCL's count, that one message moves on."""
_MOST_KEPT_BYTES: Final = 64 * MIB
"""Of one set: bytes of messages whose protocol, or size, is not known yet."""
_MOST_OPEN: Final = 1024

Protocol = Literal["simple", "ll", "auto"]


class NcclSockets(NamedTuple):
    """What is known of NCCL's settings."""

    version: str = "2.28"
    protocol: Protocol = "auto"
    """By the flags of each message, unless it is given."""
    inline_bytes: int = 128
    """NCCL_SOCKET_INLINE; 0 before NCCL 2.27, whatever is given."""
    magic: int = DEFAULT_MAGIC

    @property
    def inline(self) -> int:
        """A payload of up to so many bytes follows its size."""
        major, minor = (int(part) for part in self.version.split(".")[:2])
        return self.inline_bytes if (major, minor) >= _INLINE_SINCE else 0


def task_bytes(nbytes: int, sockets: int) -> int:
    """Into tasks of how many bytes NCCL cuts what it sends over data sockets."""
    return max(_LEAST_TASK_BYTES, -(-nbytes // sockets))


def ll_flags(content: bytes | bytearray) -> int | None:
    """The flag that all lines carry twice; None if they do not, or it is 0."""
    flags = np.frombuffer(content, "<u4").reshape(-1, 2)[:, 1]
    first = int(flags[0])
    return first if first and bool((flags == first).all()) else None


class _Message:
    """One message, until all of it is there or lost."""

    def __init__(self, number: int, size: int, time_ns: int) -> None:
        self.number, self.size, self.time_ns = number, size, time_ns
        self.protocol: Literal["simple", "ll"] | None = None
        self.released = False
        """Whether its head was given."""
        self.given = False
        """Whether all of it was given, if it is LL."""
        self.parts: list[tuple[int, bytes]] = []
        """What came before its turn, or before the protocol was known; of LL everything."""
        self.lost: list[tuple[int, int]] = []
        self.spans: list[tuple[int, int]] = []
        """Offsets and lengths of what came or is lost."""

    @property
    def complete(self) -> bool:
        return sum(nbytes for _, nbytes in self.spans) == self.size

    def note(self, offset: int, nbytes: int) -> None:
        """These bytes came or are lost."""
        if self.spans and sum(self.spans[-1]) == offset:
            self.spans[-1] = (self.spans[-1][0], self.spans[-1][1] + nbytes)
        else:
            self.spans.append((offset, nbytes))

    def missing(self) -> list[tuple[int, int]]:
        """Offsets and lengths of all other bytes."""
        found = []
        at = 0
        for offset, nbytes in [*sorted(self.spans), (self.size, 0)]:
            if at < offset:
                found.append((at, offset - at))
            at = offset + nbytes
        return found

    def beginning(self) -> bytes | None:
        """The bytes that show the protocol, once they are there."""
        need = min(self.size, _PROBE_BYTES)
        found = bytearray(need)
        known = 0
        for offset, content in self.parts:
            if offset < need:
                part = content[: need - offset]
                found[offset : offset + len(part)] = part
                known += len(part)
        return bytes(found) if known == need else None


class _Set:
    """The connections from one sender to one port of a receiver."""

    def __init__(self, settings: NcclSockets, gather: Gather, connection: Connection, side: int, order: int) -> None:
        self._settings, self._gather = settings, gather
        self.sockets: dict[int, _SocketReader] = {}
        self._control: int | None = None
        """The index of the control socket: that of the last one, known when the first message begins."""
        self.broken = False
        self._flow = gather.open("nccl-socket", connection, side, {"set": order})
        self._messages = 0
        self._waiting: deque[_Message] = deque()
        """Messages that are not complete, in order."""
        self._kept_bytes = 0
        self._next_socket = 0
        self._steps = (0, 0)
        """Between which NCCL's count of steps of this connection is; LL's flag is one more."""
        self._closed = False
        self.keep = gather.keep

    # -- sockets -------------------------------------------------------------------------------------------------------

    def join(self, index: int, reader: _SocketReader) -> None:
        """One more connection."""
        if self._control is not None or index in self.sockets:
            self.give_up("a connection joins a set that is complete")
        self.sockets[index] = reader

    def is_control(self, index: int) -> bool:
        """Whether this socket carries sizes; asked when its first bytes come."""
        if self._control is None:
            self._control = max(self.sockets)
            if set(self.sockets) != set(range(self._control + 1)):
                self.give_up("connections of its set were not captured")
        return index == self._control

    def leave(self) -> None:
        """A connection of the set has ended: so has the set."""
        if not self._closed:
            self._closed = True
            self._lose_all()
            self._gather.close(self._flow)
            self.broken = True

    def give_up(self, why: str) -> None:
        """Nothing after this is known."""
        if not self.broken:
            self.broken = True
            self._gather.resynced(self._flow, f"{why}: nothing more of this connection can be read")
            self._lose_all()

    def _lose_all(self) -> None:
        for message in list(self._waiting):
            for offset, nbytes in message.missing():
                self.lose(message, offset, nbytes)

    # -- messages ------------------------------------------------------------------------------------------------------

    def begin(self, size: int, time_ns: int) -> tuple[_Message, int]:
        """A size came. Returns its message, and how many bytes of it follow on the control socket."""
        message = _Message(self._messages, size, time_ns)
        self._messages += 1
        self._waiting.append(message)
        if self._settings.protocol != "auto":
            message.protocol = self._settings.protocol
        elif size % _LINE_BYTES or not 0 < size <= _MOST_LL_BYTES:
            message.protocol = "simple"
        sockets = len(self.sockets) - 1
        here = size if not sockets or size <= self._settings.inline else 0
        offset = here
        while offset < size:
            nbytes = min(task_bytes(size, sockets), size - offset)
            self.sockets[self._next_socket].expect(message, offset, nbytes)
            self._next_socket = (self._next_socket + 1) % sockets
            offset += nbytes
        if len(self._waiting) > _MOST_OPEN:
            self.give_up("more messages are open than NCCL has")
        self._release()
        return message, here

    def add(self, message: _Message, offset: int, content: Bytes) -> None:
        """Bytes of a message."""
        nbytes = len(content.view)
        message.note(offset, nbytes)
        if message.released and message.protocol == "simple":
            self._gather.piece(self._flow, message.number, offset, content.address, nbytes)
        else:
            message.parts.append((offset, bytes(content.view)))
            self._kept_bytes += nbytes
            if self._kept_bytes > _MOST_KEPT_BYTES:
                self.give_up("too much came before what says where it belongs")
        self._release()

    def lose(self, message: _Message, offset: int, nbytes: int) -> None:
        """Bytes of a message will never come."""
        message.note(offset, nbytes)
        if message.protocol is None and offset < _PROBE_BYTES:
            message.protocol = "simple"  # Its head says the size as it is on the wire.
        if message.released and message.protocol == "simple":
            self._gather.lost(self._flow, message.number, offset, nbytes)
        else:
            message.lost.append((offset, nbytes))
        self._release()

    def _release(self) -> None:
        """Give what can be given, in the order of the messages."""
        for message in self._waiting:
            if not message.released and not self._decide(message):
                break
            if message.protocol == "ll" and message.complete and not message.given:
                message.given = True
                self._give_ll(message)
        while self._waiting and self._waiting[0].released and self._waiting[0].complete:
            self._waiting.popleft()

    def _decide(self, message: _Message) -> bool:
        """Give the head if the protocol is known."""
        low, high = self._steps
        if message.protocol is None:
            beginning = message.beginning()
            if beginning is None:
                return False
            flag = ll_flags(beginning)
            ll = flag is not None and low < flag <= high + _MOST_STEPS + 1
            message.protocol = "ll" if ll else "simple"
            if ll and flag is not None:
                low = high = flag - 1
        self._steps = (low + 1, high + _MOST_STEPS)
        message.released = True
        ll = message.protocol == "ll"
        nbytes = message.size // 2 if ll else message.size
        self._gather.head(self._flow, DATA, message.number, 0, nbytes, message.time_ns)
        if not ll:
            for offset, content in message.parts:
                self._kept_bytes -= len(content)
                kept = self._gather.keep(content)
                self._gather.piece(self._flow, message.number, offset, kept.address, len(content))
            message.parts.clear()
            for offset, nbytes in message.lost:
                self._gather.lost(self._flow, message.number, offset, nbytes)
        return True

    def _give_ll(self, message: _Message) -> None:
        """The data between the flags; all of it or nothing: a wrong flag says that a line is not there."""
        content = b"".join(part for _, part in sorted(message.parts))
        message.parts.clear()
        self._kept_bytes -= len(content)
        if message.lost or message.size % _LINE_BYTES or ll_flags(content) is None:
            self._gather.counts["bad_flags"] += not message.lost
            self._gather.lost(self._flow, message.number, 0, message.size // 2)
        else:
            data = np.frombuffer(content, "<u4").reshape(-1, 2)[:, 0].tobytes()
            self._gather.piece(self._flow, message.number, 0, self._gather.keep(data).address, len(data))


class _SocketReader:
    """One connection of a set, from the sender."""

    def __init__(self, of: _Set, index: int) -> None:
        self._set, self._index = of, index
        self._opening = _OPENING.size
        """Bytes to leave aside: they are known already."""
        self._control: bool | None = None
        self._size = bytearray()
        self._tasks: deque[tuple[_Message, int, int]] = deque()
        """What the next bytes are: of which message, from which offset on, how many."""
        self._early: list[tuple[bytes | int, int]] = []
        """Bytes (or the length of a hole) that came before the size which says what they are, and their time."""
        self._early_bytes = 0

    def expect(self, message: _Message, offset: int, nbytes: int) -> None:
        """The next bytes of a data socket."""
        self._tasks.append((message, offset, nbytes))
        early, self._early, self._early_bytes = self._early, [], 0
        for one, time_ns in early:
            if isinstance(one, int):
                self.hole(one)
            else:
                self.data(self._set.keep(one), time_ns)

    # -- Reader --------------------------------------------------------------------------------------------------------

    def data(self, content: Bytes, time_ns: int) -> None:
        """The next bytes."""
        view, address = content
        take = min(len(view), self._opening)
        self._opening -= take
        view, address = view[take:], address + take
        if not len(view):
            return
        if self._control is None:
            self._control = self._set.is_control(self._index)
        while len(view) and not self._set.broken:
            if self._tasks:
                message, offset, nbytes = self._tasks[0]
                take = min(len(view), nbytes)
                self._advance(message, offset, nbytes, take)
                self._set.add(message, offset, Bytes(view[:take], address))
            elif self._control:
                take = min(len(view), _SIZE.size - len(self._size))
                self._size += view[:take]
                if len(self._size) == _SIZE.size:
                    self._begin(time_ns)
            else:
                self._early.append((bytes(view), time_ns))
                self._early_bytes += len(view)
                if self._early_bytes > _MOST_KEPT_BYTES:
                    self._set.give_up("too much came before what says where it belongs")
                return
            view, address = view[take:], address + take

    def hole(self, nbytes: int) -> None:
        """The next bytes will never come."""
        if self._control is None:
            self._control = self._set.is_control(self._index)
        while nbytes and self._tasks and not self._set.broken:
            message, offset, length = self._tasks[0]
            take = min(nbytes, length)
            self._advance(message, offset, length, take)
            self._set.lose(message, offset, take)
            nbytes -= take
        if nbytes and not self._set.broken:
            if self._control:
                self._set.give_up("the size of a message was lost")
            else:
                self._early.append((nbytes, 0))

    def end(self) -> None:
        """Nothing more comes."""
        self._set.leave()

    def _advance(self, message: _Message, offset: int, nbytes: int, taken: int) -> None:
        if taken == nbytes:
            self._tasks.popleft()
        else:
            self._tasks[0] = (message, offset + taken, nbytes - taken)

    def _begin(self, time_ns: int) -> None:
        (size,) = _SIZE.unpack(self._size)
        self._size.clear()
        if not 0 <= size <= _MOST_MESSAGE_BYTES:
            self._set.give_up(f"a message of {size} bytes")
            return
        message, here = self._set.begin(size, time_ns)
        if here:
            self._tasks.append((message, 0, here))


class NcclFraming:
    """Recognises the connections of NCCL's socket transport, and puts them into sets. For one parser only."""

    def __init__(self, settings: NcclSockets | None = None) -> None:
        self._settings = settings or NcclSockets()
        self._sets: dict[tuple[bytes, bytes, int], _Set] = {}
        self._made = 0

    def judge(self, beginnings: tuple[Beginning, Beginning]) -> Verdict:
        """By what the side that opened the connection writes first."""
        opener = next((one for one in beginnings if one.opener), None)
        if opener is None or not opener.first:
            return Verdict.NOT_MINE
        if len(opener.content) < _OPENING.size:
            magic = self._settings.magic.to_bytes(8, "little")
            return Verdict.MORE if opener.content[:8] == magic[: len(opener.content)] else Verdict.NOT_MINE
        magic_number, kind, index = _OPENING.unpack_from(opener.content)
        mine = magic_number == self._settings.magic and kind == _NET_SOCKET and index <= _MOST_SOCKETS
        return Verdict.MINE if mine else Verdict.NOT_MINE

    def readers(
        self, connection: Connection, beginnings: tuple[Beginning, Beginning], gather: Gather
    ) -> tuple[Reader, Reader]:
        """The reader of the sender's side joins its set."""
        side = 0 if beginnings[0].opener else 1
        _, _, index = _OPENING.unpack_from(beginnings[side].content)
        source, source_port, destination, destination_port = connection.key
        ends = ((source, source_port), (destination, destination_port))
        key = (ends[side][0], *ends[1 - side])
        known = self._sets.get(key)
        if known is None or known.broken:
            known = self._sets[key] = _Set(self._settings, gather, connection, side, self._made)
            self._made += 1
        reader = _SocketReader(known, index)
        known.join(index, reader)
        return (reader, NOBODY) if side == 0 else (NOBODY, reader)  # The receiver writes nothing.


class NcclSocketParser(SocketParser):
    """A `Parser` of NCCL's traffic over sockets."""

    def __init__(self, settings: TcpSettings | None = None, nccl: NcclSockets | None = None) -> None:
        super().__init__([NcclFraming(nccl)], settings)
