"""Two sides that speak Gloo, written without the code under test: the bytes of both directions, in turns."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from tests.mirror.support.frames import ACK, FIN, SYN, Captured, tcp_frame

ENDS = (("10.0.0.1", 40001), ("10.0.0.2", 40002))


def header(opcode: int, slot: int, length: int) -> bytes:
    return struct.pack("<6Q", 48 + (length if opcode < 2 else 0), opcode, slot, 0, length, 0)


def slot(tag: int, prefix: int = 4, delta: int = 0) -> int:
    return prefix << 56 | tag << 24 | delta


@dataclass
class Turn:
    """One side writes."""

    side: int
    content: bytes


@dataclass
class Script:
    """What both sides write, one after another; side 0 opens the connection."""

    turns: list[Turn] = field(default_factory=lambda: [Turn(0, (77).to_bytes(8, "little"))])
    messages: tuple[list[tuple[int, int, bytes]], list[tuple[int, int, bytes]]] = field(
        default_factory=lambda: ([], [])
    )
    """Opcode, slot and payload (of announcements, zeros as long as what is announced), side by side."""

    def message(self, side: int, opcode: int, number: int, payload: bytes) -> None:
        self.turns.append(Turn(side, header(opcode, number, len(payload)) + (payload if opcode < 2 else b"")))
        self.messages[side].append((opcode, number, payload if opcode < 2 else bytes(len(payload))))

    def exchange(self, side: int, number: int, payload: bytes) -> None:
        """A segment as Gloo sends it: announced, awaited, sent."""
        self.message(side, 2, number, payload)
        self.message(1 - side, 3, number, payload)
        self.message(side, 1, number, payload)


def random_script(seed: int, exchanges: int, largest: int = 300) -> Script:
    """Collectives of both sides, two at once now and then."""
    draw = random.Random(seed)
    script = Script()
    tag = draw.randrange(1000)
    for _ in range(exchanges):
        side = draw.randrange(2)
        payload = draw.randbytes(draw.randrange(1, largest))
        if draw.random() < 0.3:
            other = draw.randbytes(draw.randrange(1, largest))
            script.message(side, 2, slot(tag), payload)
            script.message(side, 2, slot(tag + 1), other)
            script.message(1 - side, 3, slot(tag + 1), other)
            script.message(1 - side, 3, slot(tag), payload)
            script.message(side, 1, slot(tag + 1), other)
            script.message(side, 1, slot(tag), payload)
            tag += 1
        else:
            script.exchange(side, slot(tag), payload)
        tag += draw.randrange(2)
    return script


@dataclass
class Line:
    """Puts a script into TCP segments; `frames` is what passes on the wire, loss and disorder not yet applied."""

    script: Script
    seed: int = 0
    largest: int = 90
    starts: tuple[int, int] = (0xFFFFFF00, 7)
    """Sequence numbers of the SYNs; the first wraps soon."""
    ends: tuple[tuple[str, int], tuple[str, int]] = ENDS

    def frames(self, *, close: bool = True) -> list[Captured]:
        draw = random.Random(self.seed)
        sequence = [start + 1 for start in self.starts]
        found: list[Captured] = []

        def put(side: int, content: bytes = b"", flags: int = 0, back: int = 0) -> None:
            acknowledgement = None if flags == SYN else sequence[1 - side]
            one = tcp_frame(
                self.ends[side],
                self.ends[1 - side],
                sequence[side] - back,
                content,
                acknowledgement=acknowledgement,
                flags=flags,
            )
            found.append(Captured(one, time_ns=len(found) + 1))

        put(0, flags=SYN, back=1)
        put(1, flags=SYN | ACK, back=1)
        put(0)
        for turn in self.script.turns:
            at = 0
            while at < len(turn.content):
                size = draw.randrange(1, self.largest)
                part = turn.content[at : at + size]
                put(turn.side, part)
                sequence[turn.side] += len(part)
                at += size
            put(1 - turn.side)
        if close:
            for side in (0, 1):
                put(side, flags=FIN)
                sequence[side] += 1
            put(0)
        return found
