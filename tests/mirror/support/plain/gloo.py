"""Gloo's messages in a TCP connection: 48-byte headers, and payloads without a length limit.

A header that lies in a hole is predicted from what both sides have announced, and taken only if all that is known of
the bytes up to the next header agrees with exactly one prediction. Otherwise the flow goes on at that next header, and
says so.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from lastgood.mirror.streams.messages import DATA, READY_TO_RECEIVE, READY_TO_SEND, SEND_BUFFER
from lastgood.mirror.streams.sockets import Beginning, Gather, SocketParser, Verdict
from lastgood.mirror.streams.tcp import Bytes, Connection, Reader, TcpSettings
from lastgood.units import MIB

__all__ = ["HEADER_BYTES", "GlooFraming", "GlooHeader", "GlooParser", "slot_parts"]

_HEADER = struct.Struct("<6Q")
HEADER_BYTES: Final = _HEADER.size
HANDSHAKE_BYTES: Final = 8
"""What the side that opened the connection writes before its first message."""
_ENOUGH: Final = 24
"""Bytes of a header that say what the message is."""
_MOST_NBYTES: Final = 1 << 48
_PREFIXES: Final = range(1, 9)
_NEAR_TAGS: Final = 1 << 16
_GAP_BYTES: Final = 64 * MIB
"""Kept between a lost header and the next one."""
_MOST_SLOTS: Final = 1024
"""Whose announcements are remembered."""
_MOST_ANNOUNCED: Final = 4096
"""Of one slot."""
_MOST_GUESSES: Final = 2000
_LIKE_HEADER = re.compile(rb"(?=[\x01-\x03]\x00{7}.{7}[\x01-\x08]\x00{8}.{6}\x00{10})", re.DOTALL)
"""A header from its second field on."""


class GlooHeader(NamedTuple):
    """The header of a message: six little-endian numbers of 64 bits."""

    nbytes: int
    """Of header and payload."""
    opcode: int
    slot: int
    offset: int
    length: int
    """Of the payload; in announcements, of the payload that is meant."""
    roffset: int

    @property
    def payload(self) -> int:
        """Bytes that follow."""
        return self.nbytes - HEADER_BYTES

    def possible(self) -> bool:
        """Whether Gloo writes such a header."""
        if self.length >= _MOST_NBYTES:
            return False
        if self.opcode == SEND_BUFFER:
            return self.nbytes == HEADER_BYTES + self.length
        if self.opcode == DATA:
            return self.nbytes == HEADER_BYTES + self.length and not self.offset | self.roffset
        announcement = self.opcode in (READY_TO_SEND, READY_TO_RECEIVE)
        return announcement and self.nbytes == HEADER_BYTES and not self.offset | self.roffset


def parse(content: bytes | bytearray | memoryview, at: int = 0) -> GlooHeader:
    """Read 48 bytes."""
    return GlooHeader(*_HEADER.unpack_from(content, at))


def slot_parts(slot: int) -> tuple[int, int, int]:
    """Prefix (which kind of collective), tag (the collective's number in its process group) and delta of a slot."""
    return slot >> 56, slot >> 24 & 0xFFFFFFFF, slot & 0xFFFFFF


def find_header(content: bytes | bytearray, begin: int, tag: int | None) -> int | None:
    """Where, from `begin` on, the first header lies that fits in all its fields; near `tag`, if one is known."""
    for match in _LIKE_HEADER.finditer(content, begin + 8):
        at = match.start() - 8
        if at + HEADER_BYTES > len(content):
            return None
        header = parse(content, at)
        prefix, near, _ = slot_parts(header.slot)
        if header.possible() and prefix in _PREFIXES and (tag is None or abs(near - tag) <= _NEAR_TAGS):
            return at
    return None


# -- what both sides have announced ------------------------------------------------------------------------------------


class _Slot:
    def __init__(self) -> None:
        self.to_send: deque[int] = deque(maxlen=_MOST_ANNOUNCED)
        """Payloads that the sender announced and did not send yet, in order."""
        self.to_receive: deque[int] = deque(maxlen=_MOST_ANNOUNCED)
        """Those that the receiver is ready for."""


class _Announced:
    """What one side is about to send, slot by slot."""

    def __init__(self) -> None:
        self._slots: OrderedDict[int, _Slot] = OrderedDict()

    def slot(self, number: int) -> _Slot:
        known = self._slots.get(number)
        if known is None:
            if len(self._slots) >= _MOST_SLOTS:
                self._slots.popitem(last=False)
            known = self._slots[number] = _Slot()
        return known

    def sent(self, number: int) -> None:
        """A message with data was seen."""
        slot = self.slot(number)
        for announced in (slot.to_send, slot.to_receive):
            if announced:  # Else its announcement was lost.
                announced.popleft()

    def next(self, number: int, ahead: int) -> int | None:
        """The payload of the message that follows `ahead` others of the slot; None if it was not announced."""
        slot = self._slots.get(number)
        for announced in (slot.to_send, slot.to_receive) if slot else ():
            if ahead < len(announced):
                return announced[ahead]
        return None

    def open_slots(self) -> list[int]:
        """Slots of which a message with data is still to come, in order."""
        return sorted(number for number in self._slots if self.next(number, 0) is not None)


# -- bytes between a lost header and the next one ----------------------------------------------------------------------


class _Message(NamedTuple):
    begin: int
    slot: int
    payload: int


class _Gap:
    """Bytes of unknown meaning. Positions count from the begin of a header that is not known."""

    def __init__(self, why: str, explainable: bool, silent: bool = False) -> None:
        self.why = why
        self.explainable = explainable
        self.silent = silent
        """Nothing is missing that this capture ever had: it began here."""
        self.chunks: list[tuple[int, bytes]] = []
        self.end = 0
        self._kept = 0
        self._run = bytearray()
        """The end of the newest stretch without holes, in which a header may begin."""

    def hole(self, nbytes: int) -> None:
        self.end += nbytes
        self._run.clear()

    def add(self, content: bytes, tag: int | None) -> int | None:
        """Take bytes; returns where the next header begins, if it is there."""
        self.chunks.append((self.end, content))
        self.end += len(content)
        self._kept += len(content)
        self._run += content
        begin = self.end - len(self._run)
        found = find_header(self._run, 0, tag)
        if found is not None:
            return begin + found
        del self._run[: max(0, len(self._run) - HEADER_BYTES + 1)]
        if self._kept > _GAP_BYTES:
            self.explainable = False
        if not self.explainable:
            self.chunks = [(self.end - len(self._run), bytes(self._run))]
            self._kept = len(self._run)
        return None

    def known(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The bytes that are known between two positions."""
        for at, content in self.chunks:
            low, high = max(begin, at), min(end, at + len(content))
            if low < high:
                yield low, content[low - at : high - at]

    def _agrees(self, begin: int, header: bytes) -> bool:
        return all(
            header[at - begin : at - begin + len(content)] == content
            for at, content in self.known(begin, begin + HEADER_BYTES)
        )

    def _may_announce(self, begin: int) -> bool:
        """Whether what is known of 48 bytes may be an announcement."""
        fixed = {0: HEADER_BYTES, **dict.fromkeys((*range(1, 8), *range(9, 16), *range(24, 32), *range(40, 48)), 0)}
        for at, content in self.known(begin, begin + HEADER_BYTES):
            for place, value in enumerate(content, at - begin):
                if fixed.get(place, value) != value or (place == 8 and value not in (2, 3)):
                    return False
        return True

    def explain(self, end: int, announced: _Announced) -> list[_Message] | None:
        """The messages with data between the lost header and `end`, if one explanation fits and no other."""
        slots = announced.open_slots()
        found: dict[tuple[tuple[int, int, int], ...], list[_Message]] = {}
        guesses = 0
        open_guesses: list[tuple[int, list[_Message]]] = [(0, [])]
        while open_guesses:
            at, messages = open_guesses.pop()
            guesses += 1
            if guesses > _MOST_GUESSES:
                return None
            if at == end:
                places = ((one.slot, one.payload, one.begin if self._has(one) else -1) for one in messages)
                found.setdefault(tuple(places), messages)
                if len(found) > 1:
                    return None
                continue
            if at + HEADER_BYTES > end:
                continue
            if self._may_announce(at):
                open_guesses.append((at + HEADER_BYTES, messages))
            for slot in slots:
                payload = announced.next(slot, sum(one.slot == slot for one in messages))
                if payload is None or at + HEADER_BYTES + payload > end:
                    continue
                if self._agrees(at, _HEADER.pack(HEADER_BYTES + payload, DATA, slot, 0, payload, 0)):
                    message = _Message(at, slot, payload)
                    open_guesses.append((at + HEADER_BYTES + payload, [*messages, message]))
        return next(iter(found.values())) if found else None

    def _has(self, message: _Message) -> bool:
        """Whether a byte of its payload is known."""
        begin = message.begin + HEADER_BYTES
        return next(self.known(begin, begin + message.payload), None) is not None


# -- readers -----------------------------------------------------------------------------------------------------------


class _Shared:
    """What the two readers of a connection know together."""

    def __init__(self) -> None:
        self.announced = (_Announced(), _Announced())
        """By the side that sends."""
        self.tag: int | None = None


class _GlooReader:
    """One direction."""

    def __init__(self, gather: Gather, flow: int, side: int, shared: _Shared, begin: int | None) -> None:
        self._gather, self._flow, self._side, self._shared = gather, flow, side, shared
        self._skip = begin or 0
        """Bytes that carry no message: the handshake, the rest of a header that is known enough."""
        self._head = bytearray()
        self._message = -1
        self._offset = self._payload = 0
        self._gap = None if begin is not None else _Gap("the capture began here", explainable=False, silent=True)
        self._time_ns = 0
        """When the newest bytes of a header came."""
        self._ended = False

    # -- Reader --------------------------------------------------------------------------------------------------------

    def data(self, content: Bytes, time_ns: int) -> None:
        """The next bytes."""
        view, address = content
        while len(view):
            if self._gap is not None:
                self._fill_gap(self._gap, bytes(view), time_ns)
                return
            if self._skip:
                take = min(len(view), self._skip)
                self._skip -= take
            elif self._offset < self._payload:
                take = min(len(view), self._payload - self._offset)
                self._gather.piece(self._flow, self._message, self._offset, address, take)
                self._offset += take
            else:
                self._time_ns = time_ns
                take = min(len(view), HEADER_BYTES - len(self._head))
                self._head += view[:take]
                if len(self._head) == HEADER_BYTES:
                    self._begin(parse(self._head))
            view, address = view[take:], address + take

    def hole(self, nbytes: int) -> None:
        """The next bytes will never come."""
        if self._gap is not None:
            self._gap.hole(nbytes)
            return
        if len(self._head) >= _ENOUGH:
            self._begin_early()
        take = min(nbytes, self._skip)
        self._skip -= take
        nbytes -= take
        if self._offset < self._payload and nbytes:
            take = min(nbytes, self._payload - self._offset)
            self._gather.lost(self._flow, self._message, self._offset, take)
            self._offset += take
            nbytes -= take
        if not nbytes:
            return
        self._gap = _Gap("a header was lost", explainable=True)
        if self._head:
            self._gap.add(bytes(self._head), self._shared.tag)
            self._head.clear()
        self._gap.hole(nbytes)

    def end(self) -> None:
        """Nothing more comes."""
        if self._ended:
            return
        self._ended = True
        if self._offset < self._payload:
            self._gather.lost(self._flow, self._message, self._offset, self._payload - self._offset)
        elif self._gap is not None and self._gap.end > 1 and not self._gap.silent:
            # (The end itself takes one number of TCP's sequence.)
            self._gather.resynced(self._flow, f"{self._gap.why}, and no other one followed")
        self._gather.close(self._flow)

    # -- headers -------------------------------------------------------------------------------------------------------

    def _begin(self, header: GlooHeader) -> None:
        if not header.possible():
            self._gap = _Gap("bytes that are no header", explainable=False)
            self._gap.add(bytes(self._head), self._shared.tag)
            self._head.clear()
            return
        self._head.clear()
        self._message += 1
        self._payload, self._offset = header.payload, 0
        self._note(header)
        self._gather.head(self._flow, header.opcode, self._message, header.slot, header.length, self._time_ns)

    def _note(self, header: GlooHeader) -> None:
        """Remember what is announced, and the newest tag."""
        prefix, tag, _ = slot_parts(header.slot)
        if prefix in _PREFIXES:
            self._shared.tag = tag
        mine, theirs = self._shared.announced[self._side], self._shared.announced[1 - self._side]
        if header.opcode == READY_TO_SEND:
            mine.slot(header.slot).to_send.append(header.length)
        elif header.opcode == READY_TO_RECEIVE:
            theirs.slot(header.slot).to_receive.append(header.length)
        else:
            mine.sent(header.slot)

    def _begin_early(self) -> None:
        """Begin a message whose header is there up to its first three fields, if it is data that was announced so."""
        nbytes, opcode, slot = struct.unpack_from("<3Q", self._head)
        header = GlooHeader(nbytes, opcode, slot, 0, nbytes - HEADER_BYTES, 0)
        announced = self._shared.announced[self._side].next(slot, 0)
        if opcode == DATA and announced == header.length and header.possible():
            self._skip = HEADER_BYTES - len(self._head)
            self._begin(header)

    # -- gaps ----------------------------------------------------------------------------------------------------------

    def _fill_gap(self, gap: _Gap, content: bytes, time_ns: int) -> None:
        found = gap.add(content, self._shared.tag)
        if found is None:
            return
        messages = gap.explain(found, self._shared.announced[self._side]) if gap.explainable else None
        if messages is not None:
            self._gather.counts["predicted_headers"] += 1
            for one in messages:
                self._predicted(gap, one, time_ns)
        elif not gap.silent:
            self._gather.resynced(self._flow, f"{gap.why}, and {found} bytes before the next one are not explained")
        self._message += 1  # Announcements that are lost have a number as well, together.
        self._gap = None
        self._payload = self._offset = 0
        for _, known in gap.known(found, gap.end):
            self.data(self._gather.keep(known), time_ns)

    def _predicted(self, gap: _Gap, message: _Message, time_ns: int) -> None:
        self._message += 1
        self._shared.announced[self._side].sent(message.slot)
        self._gather.head(self._flow, DATA, self._message, message.slot, message.payload, time_ns)
        begin = message.begin + HEADER_BYTES
        at = begin
        for place, known in gap.known(begin, begin + message.payload):
            if at < place:
                self._gather.lost(self._flow, self._message, at - begin, place - at)
            self._gather.piece(self._flow, self._message, place - begin, self._gather.keep(known).address, len(known))
            at = place + len(known)
        if at < begin + message.payload:
            self._gather.lost(self._flow, self._message, at - begin, begin + message.payload - at)


class GlooFraming:
    """Recognises Gloo's connections."""

    def judge(self, beginnings: tuple[Beginning, Beginning]) -> Verdict:
        """By the first header of either side, or by one in the middle if the beginning is missing."""
        more = False
        for one in beginnings:
            if one.first:
                at = HANDSHAKE_BYTES if one.opener else 0
                if len(one.content) >= at + HEADER_BYTES:
                    return Verdict.MINE if parse(one.content, at).possible() else Verdict.NOT_MINE
                more = True
            else:
                if find_header(one.content, one.searched, None) is not None:
                    return Verdict.MINE
                one.searched = max(0, len(one.content) - HEADER_BYTES + 1)
                more = True
        return Verdict.MORE if more else Verdict.NOT_MINE

    def readers(
        self, connection: Connection, beginnings: tuple[Beginning, Beginning], gather: Gather
    ) -> tuple[Reader, Reader]:
        """The readers of both directions."""
        shared = _Shared()

        def reader(side: int) -> Reader:
            one = beginnings[side]
            begin = (HANDSHAKE_BYTES if one.opener else 0) if one.first else None
            flow = gather.open("gloo", connection, side, {"connector": one.opener, "from_the_beginning": one.first})
            return _GlooReader(gather, flow, side, shared, begin)

        return reader(0), reader(1)


class GlooParser(SocketParser):
    """A `Parser` of Gloo's traffic."""

    def __init__(self, settings: TcpSettings | None = None) -> None:
        super().__init__([GlooFraming()], settings)
