"""Frames as bytes, written without the code under test, and batches of them; messages with their content."""

from __future__ import annotations

import ctypes
import ipaddress
import lzma
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lastgood.mirror.capture.frames import COOKED, COOKED_V2, ETHERNET, FRAME, FrameBatch
from lastgood.mirror.streams.messages import DATA, Flow, Parsed, Parser

MOST_BYTES = 1 << 24
"""Of a message that is kept here: a damaged header may say more."""
FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Captured:
    """A frame, or its beginning."""

    content: bytes
    time_ns: int = 0
    link: int = ETHERNET
    length: int | None = None
    """Of the whole frame, if more than the content."""
    flags: int = 0


def batch(frames: Iterable[Captured], gap: int = 3) -> FrameBatch:
    """A batch with a few strange bytes between the frames."""
    data = bytearray()
    rows = []
    for one in frames:
        data += b"\xa5" * gap
        length = len(one.content) if one.length is None else one.length
        flags = one.flags | 2 * (length > len(one.content))
        rows.append((len(data), len(one.content), length, one.time_ns, flags, one.link))
        data += one.content
    return FrameBatch(memoryview(bytes(data)), np.array(rows, FRAME))


def tcp_frame(
    source: tuple[str, int],
    destination: tuple[str, int],
    sequence: int,
    payload: bytes = b"",
    *,
    acknowledgement: int | None = None,
    flags: int = 0,
    options: bytes = b"",
    tags: tuple[int, ...] = (),
    ip_options: bytes = b"",
    extensions: tuple[tuple[int, bytes], ...] = (),
    link: int = ETHERNET,
    padding: int = 0,
    fragment: int = 0,
    checksum: int | None = None,
) -> bytes:
    """One frame, with TCP's checksum, or another one; IPv4's is left at zero."""
    if acknowledgement is not None:
        flags |= ACK
    size = (20 + len(options)) // 4
    tcp = struct.pack(
        ">HHIIBBHHH",
        source[1],
        destination[1],
        sequence & 0xFFFFFFFF,
        (acknowledgement or 0) & 0xFFFFFFFF,
        size << 4,
        flags,
        65535,
        0,
        0,
    )
    tcp += options + payload
    first, second = ipaddress.ip_address(source[0]), ipaddress.ip_address(destination[0])
    if checksum is None:
        summed = first.packed + second.packed + struct.pack(">HI", 6, len(tcp)) + tcp
        checksum = 0xFFFF ^ ones_sum(summed)
    tcp = tcp[:16] + struct.pack(">H", checksum) + tcp[18:]
    if first.version == 4:
        kind = 0x0800
        words = 5 + len(ip_options) // 4
        total = words * 4 + len(tcp)
        packet = struct.pack(
            ">BBHHHBBH4s4s",
            0x40 | words,
            0,
            total if total < 65536 else 0,
            1,
            fragment,
            64,
            6,
            0,
            first.packed,
            second.packed,
        )
        packet += ip_options + tcp
    else:
        kind = 0x86DD
        kinds = [number for number, _ in extensions] + [6]
        headers = b"".join(bytes((kinds[at + 1],)) + content for at, (_, content) in enumerate(extensions))
        packet = struct.pack(">IHBB", 6 << 28, len(headers) + len(tcp), kinds[0], 64) + first.packed + second.packed
        packet += headers + tcp
    tagged = b"".join(struct.pack(">HH", tag >> 16, tag & 0xFFFF) for tag in tags)
    # A tag is its type and its number; each type stands where the type of what follows would.
    types = [tag >> 16 for tag in tags] + [kind]
    rest = b"".join(struct.pack(">HH", tag & 0xFFFF, types[at + 1]) for at, tag in enumerate(tags))
    assert len(rest) == len(tagged)
    if link == ETHERNET:
        head = b"\x02\0\0\0\0\x02" + b"\x02\0\0\0\0\x01" + struct.pack(">H", types[0])
    elif link == COOKED:
        head = struct.pack(">HHH8sH", 0, 1, 6, b"\x02\0\0\0\0\x01\0\0", types[0])
    else:
        assert link == COOKED_V2
        head = struct.pack(">HHIHBB8s", types[0], 0, 3, 1, 0, 6, b"\x02\0\0\0\0\x01\0\0")
    return head + rest + packet + bytes(padding)


def ones_sum(content: bytes) -> int:
    """Of words of 16 bits, in ones' complement (RFC 1071)."""
    total = sum(int.from_bytes(content[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(content), 2))
    return total and (total - 1) % 0xFFFF + 1


def read_pcap(path: Path) -> list[Captured]:
    """The frames of a little-endian pcap file with nanoseconds, compressed with xz or not."""
    content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    magic, _, _, _, _, _, link = struct.unpack_from("<IHHiIII", content)
    assert magic == 0xA1B23C4D
    frames = []
    at = 24
    while at < len(content):
        seconds, nanoseconds, captured, length = struct.unpack_from("<IIII", content, at)
        at += 16
        frames.append(Captured(content[at : at + captured], seconds * 10**9 + nanoseconds, link, length))
        at += captured
    return frames


@dataclass
class Message:
    """A message, as its pieces made it."""

    flow: int
    number: int
    opcode: int
    slot: int
    nbytes: int
    time_ns: int
    content: bytearray = field(default_factory=bytearray)
    known: bytearray = field(default_factory=bytearray)
    """1 for each byte that came, 2 for each that is lost."""

    @property
    def complete(self) -> bool:
        return self.known.count(1) == len(self.known)


class Messages:
    """Collects what a parser gives, as `(flow, message)`; every promise of the border is checked on the way."""

    def __init__(self) -> None:
        self.flows: dict[int, Flow] = {}
        self.closed: list[int] = []
        self.all: dict[tuple[int, int], Message] = {}
        self.resynced: list[tuple[int, str]] = []
        self.refused: list[str] = []

    def add(self, parsed: Parsed) -> None:
        for flow in parsed.opened:
            assert flow.index not in self.flows
            self.flows[flow.index] = flow
        newest: dict[int, int] = {}
        for flow, opcode, number, slot, nbytes, time_ns in parsed.heads.tolist():
            assert flow in self.flows and flow not in self.closed
            assert number > newest.get(flow, -1), "numbers grow"
            newest[flow] = number
            assert (flow, number) not in self.all
            message = self.all[flow, number] = Message(flow, number, opcode, slot, nbytes, time_ns)
            if opcode <= DATA:
                room = min(nbytes, MOST_BYTES)
                message.content, message.known = bytearray(room), bytearray(room)
        for flow, _, number, offset, address, nbytes in parsed.pieces.tolist():
            message = self.all[flow, number]
            assert nbytes and offset + nbytes <= message.nbytes
            if offset + nbytes > MOST_BYTES:
                continue
            assert not any(message.known[offset : offset + nbytes]), "once"
            message.content[offset : offset + nbytes] = ctypes.string_at(address, nbytes)
            message.known[offset : offset + nbytes] = b"\1" * nbytes
        for flow, _, number, offset, nbytes in parsed.lost.tolist():
            message = self.all[flow, number]
            nbytes = nbytes or message.nbytes
            assert offset + nbytes <= message.nbytes
            end = min(offset + nbytes, MOST_BYTES)
            assert not any(message.known[offset:end]), "lost, and did not come"
            message.known[offset:end] = b"\2" * (end - offset)
        self.closed += parsed.closed
        self.resynced += parsed.resynced
        self.refused += parsed.refused

    def of(self, flow: int) -> list[Message]:
        """The messages of a flow, in order."""
        return [message for (owner, _), message in sorted(self.all.items()) if owner == flow]


def batches(frames: list[Captured], size: int = 64) -> Iterator[FrameBatch]:
    for begin in range(0, len(frames), size):
        yield batch(frames[begin : begin + size])


def read(parser: Parser, frames: list[Captured], size: int = 64) -> Messages:
    """All that a parser makes of frames."""
    found = Messages()
    for one in batches(frames, size):
        found.add(parser.feed(one))
    found.add(parser.finish())
    return found
