"""Links of Lastgood's own ring, mirrored: what a switch between two ranks reads along, with no switch in the way.

What goes from a rank to the next one is followed by the switch's `LinkParser`. If bytes are missing, the record that
they lie in is lost; a header that is missing is found again, since a record's header carries its own checksum.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Final, Protocol

from lastgood.errors import CorruptCheckpoint
from lastgood.gradients.switch.parser import LinkParser
from lastgood.mirror.streams.sockets import NOBODY, Beginning, Gather, SocketParser, Verdict
from lastgood.mirror.streams.tcp import Bytes, Connection, Reader, TcpSettings
from lastgood.wire.frames import NONCE_BYTES, PROOF_BYTES
from lastgood.wire.records import HEADER_BYTES, Record, parse_header
from lastgood.wire.ring_link import RING_GREETING, Hello

__all__ = ["OwnRingFraming", "OwnRingParser", "RingLink"]

_OPENING_BYTES: Final = len(RING_GREETING) + NONCE_BYTES + PROOF_BYTES
_MAGIC: Final = b"LGR1"


class RingLink(Protocol):
    """Takes what a rank sends to the next one."""

    def hello(self, hello: Hello) -> None:
        """Who the rank is; comes first, unless it is lost: then nothing comes."""

    def record(self, record: Record, content: bytes) -> None:
        """A marked gradient or an end of iteration: header and payload."""

    def lost(self, record: Record | None) -> None:
        """A marked record of which bytes are missing; None: records whose headers are missing too."""

    def end(self) -> None:
        """Nothing more comes."""


class _LinkReader:
    def __init__(self, name: str, link: RingLink, gather: Gather) -> None:
        self._name, self._link, self._gather = name, link, gather
        self._parser: LinkParser | None = LinkParser(name, self._hello, link.record)
        self._opening = _OPENING_BYTES
        self._known = False
        """Whether the hello came."""
        self._sought: bytearray | None = None
        """Bytes after a header that is lost, until the next one is found."""

    def _hello(self, hello: Hello) -> None:
        self._known = True
        self._link.hello(hello)

    def data(self, content: Bytes, _time_ns: int, /) -> None:
        """The next bytes."""
        view = content.view[self._opening :]
        self._opening -= len(content.view) - len(view)
        if self._sought is not None:
            self._seek(self._sought, view)
        else:
            self._feed(view)

    def hole(self, nbytes: int) -> None:
        """The next bytes will never come."""
        step = min(nbytes, self._opening)
        self._opening -= step
        nbytes -= step
        if self._parser is None or not nbytes:
            return
        if self._sought is not None:
            self._sought.clear()
            return
        if not self._known:
            self._refuse("its hello was lost")
            return
        lost, unknown = self._parser.lose(nbytes)
        if lost is not None:
            self._link.lost(lost)
        if unknown:
            self._link.lost(None)
            self._sought = bytearray()

    def end(self) -> None:
        """Nothing more comes."""
        self._link.end()

    def _feed(self, view: memoryview) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed(view)
        except CorruptCheckpoint as error:
            if not self._known:
                self._refuse(str(error))
                return
            self._link.lost(None)
            self._sought = bytearray()

    def _seek(self, sought: bytearray, view: memoryview) -> None:
        """Look for a header whose checksum holds."""
        sought += view
        at = sought.find(_MAGIC)
        while at >= 0 and at + HEADER_BYTES <= len(sought):
            try:
                parse_header(sought[at : at + HEADER_BYTES], self._name)
            except CorruptCheckpoint:
                at = sought.find(_MAGIC, at + 1)
                continue
            assert self._parser is not None
            self._gather.counts["resumed_links"] += 1
            self._parser.resume()
            self._sought = None
            self._feed(memoryview(bytes(sought[at:])))
            return
        del sought[: at if at >= 0 else max(0, len(sought) - len(_MAGIC) + 1)]

    def _refuse(self, why: str) -> None:
        self._parser = None
        self._gather.refuse(f"{self._name}: {why}: nothing of this link can be read")


class OwnRingFraming:
    """Recognises the links of a ring. `open_link` makes what takes each one's records; it gets a name for messages."""

    def __init__(self, open_link: Callable[[str], RingLink]) -> None:
        self._open_link = open_link

    def judge(self, beginnings: tuple[Beginning, Beginning]) -> Verdict:
        """By the greeting."""
        opener = next((one for one in beginnings if one.opener), None)
        if opener is None or not opener.first:
            return Verdict.NOT_MINE
        if not RING_GREETING.startswith(bytes(opener.content[: len(RING_GREETING)])):
            return Verdict.NOT_MINE
        return Verdict.MINE if len(opener.content) >= len(RING_GREETING) else Verdict.MORE

    def readers(
        self, connection: Connection, beginnings: tuple[Beginning, Beginning], gather: Gather
    ) -> tuple[Reader, Reader]:
        """The rank's side is followed; what the next one answers is left aside."""
        side = 0 if beginnings[0].opener else 1
        key = connection.key
        ends = [f"{ipaddress.ip_address(address)} port {port}" for address, port in (key[:2], key[2:])]
        name = f"the ring's link from {ends[side]} to {ends[1 - side]}"
        reader = _LinkReader(name, self._open_link(name), gather)
        return (reader, NOBODY) if side == 0 else (NOBODY, reader)


class OwnRingParser(SocketParser):
    """A `Parser` of a ring's links; what it reads goes to the links that `open_link` makes, not into tables."""

    def __init__(self, open_link: Callable[[str], RingLink], settings: TcpSettings | None = None) -> None:
        super().__init__([OwnRingFraming(open_link)], settings)
