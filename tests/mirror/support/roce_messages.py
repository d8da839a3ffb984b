"""What a RoCE parser gives, as messages with content; the promises of the border are checked on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lastgood.mirror.capture.files import CaptureFile
from lastgood.mirror.capture.frames import ETHERNET, FRAME, FrameBatch
from lastgood.mirror.streams.messages import DATA, Flow, Parsed, Parser

CAME, LOST = 1, 2


@dataclass
class Message:
    """A message, as its pieces made it."""

    nbytes: int
    time_ns: int = 0
    content: bytearray = field(default_factory=bytearray)
    known: bytearray = field(default_factory=bytearray)

    @property
    def complete(self) -> bool:
        return self.known.count(CAME) == self.nbytes


@dataclass
class Found:
    """All that a parser gave. A message that is lost as a whole is None."""

    flows: dict[int, Flow] = field(default_factory=dict)
    messages: dict[int, dict[int, Message | None]] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)
    resynced: list[tuple[int, str]] = field(default_factory=list)
    events: list[tuple[object, ...]] = field(default_factory=list)
    """Everything, without addresses: two parsers that do the same give the same."""
    most_bytes: int = 1 << 24
    """Content of larger messages is not kept: their length is what a packet says."""

    def add(self, parsed: Parsed) -> None:
        for flow in parsed.opened:
            assert flow.index == len(self.flows)
            self.flows[flow.index] = flow
            self.messages[flow.index] = {}
        for number, opcode, message, slot, nbytes, time_ns in parsed.heads.tolist():
            assert opcode == DATA and slot == 0 and number not in self.closed
            assert message not in self.messages[number], "numbers do not recur"
            assert message > max(self.messages[number], default=-1), "numbers grow"
            room = nbytes if nbytes <= self.most_bytes else 0
            self.messages[number][message] = Message(nbytes, time_ns, bytearray(room), bytearray(room))
            self.events.append(("head", number, message, nbytes, time_ns))
        for number, pad, message, offset, address, nbytes in parsed.pieces.tolist():
            one = self.messages[number][message]
            assert one is not None and pad == 0 and nbytes > 0 and offset + nbytes <= one.nbytes
            content = ctypes.string_at(address, nbytes)
            assert not any(one.known[offset : offset + nbytes]), "given once"
            if one.known:
                one.content[offset : offset + nbytes] = content
                one.known[offset : offset + nbytes] = bytes([CAME]) * nbytes
            self.events.append(("piece", number, message, offset, content))
        for number, _, message, offset, nbytes in parsed.lost.tolist():
            if nbytes:
                one = self.messages[number][message]
                assert one is not None and offset + nbytes <= one.nbytes
                assert not any(one.known[offset : offset + nbytes]), "lost, and did not come"
                if one.known:
                    one.known[offset : offset + nbytes] = bytes([LOST]) * nbytes
            else:
                assert message not in self.messages[number]
                self.messages[number][message] = None
            self.events.append(("lost", number, message, offset, nbytes))
        self.closed += parsed.closed
        self.resynced += parsed.resynced
        self.events += [("closed", number) for number in parsed.closed]
        self.events += [("resynced", *one) for one in parsed.resynced]

    def of(self, number: int) -> list[Message]:
        """The messages of a flow of which none is lost as a whole."""
        ordered = [message for _, message in sorted(self.messages[number].items())]
        assert all(message is not None for message in ordered)
        return [message for message in ordered if message is not None]


def read_batches(parser: Parser, batches: Iterable[FrameBatch]) -> Found:
    found = Found()
    for batch in batches:
        found.add(parser.feed(batch))
    found.add(parser.finish())
    return found


def batch_of(frames: Iterable[bytes], *, link: int = ETHERNET, padding: bytes = b"\xa5\xa5\xa5") -> FrameBatch:
    """One batch; what lies between its frames is nobody's."""
    data = bytearray()
    rows = []
    for number, frame in enumerate(frames):
        data += padding
        rows.append((len(data), len(frame), len(frame), number, 0, link))
        data += frame
    return FrameBatch(memoryview(bytes(data)), np.array(rows, FRAME))


def file_batches(path: Path) -> Iterator[FrameBatch]:
    source = CaptureFile(path)
    try:
        while (batch := source.read(256, 0.0)) is not None:
            yield batch
    finally:
        source.close()
