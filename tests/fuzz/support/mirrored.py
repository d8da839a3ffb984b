"""Parsers of mirrored traffic: frames that anybody may send. The native parser must give what its plain twin gives."""

from __future__ import annotations

import random
from ctypes import string_at
from pathlib import Path
from typing import Any

import numpy as np

from lastgood.mirror.conversation.places import Buckets, Expect, Incarnation, Learned, LostStep, StepOpen
from lastgood.mirror.extract.extractor import Extracted
from lastgood.mirror.extract.slots import Filled, Gone
from lastgood.mirror.handover.extracted import pack_extracted, unpack_extracted
from lastgood.mirror.handover.parsed import pack_parsed, unpack_parsed
from lastgood.mirror.streams.native import NativeGlooParser
from lastgood.mirror.streams.nccl_sockets import NcclSocketParser
from tests.fuzz.support.hostile import changed_bytes
from tests.fuzz.support.registry import Prepared, decoder
from tests.mirror.support.frames import Captured, batches, read
from tests.mirror.support.gloo_wire import Line, Script, Turn, random_script
from tests.mirror.support.plain.gloo import GlooParser
from tests.mirror.support.twins import compare


def samples() -> list[list[bytes]]:
    return [[frame.content for frame in Line(random_script(seed, 8), seed).frames()] for seed in range(8)]


def changed_frames(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Frames changed, left out, repeated or in another order."""
    frames = list(frames)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(frames))
        kind = rng.randrange(8)
        if kind == 0 and len(frames) > 6:
            del frames[at : at + rng.choice([1, 1, 5])]
        elif kind == 1:
            frames.insert(rng.randrange(len(frames)), frames[at])
        elif kind == 2:
            other = rng.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        elif kind == 3:
            frames[at] = changed_bytes(rng, frames[at])
        else:  # Behind the TCP header, where Gloo's headers are.
            frames[at] = frames[at][:54] + changed_bytes(rng, frames[at][54:])
    return frames


@decoder("mirrored Gloo", samples, change=changed_frames, share=0.5, native=True)
def mirrored_gloo(frames: list[bytes], folder: Path) -> Prepared:
    captured = [Captured(frame, at) for at, frame in enumerate(frames)]

    def read() -> Any:
        compare(GlooParser(), NativeGlooParser(), captured, 16)

    return sum(map(len, frames)), read


def socket_samples() -> list[list[bytes]]:
    """Connections of NCCL's, each a set of one control socket: sizes, and payloads of both protocols."""
    found = []
    for seed in range(6):
        rng = random.Random(seed)
        content = bytearray((0x564AB9F2FC4B9D6C).to_bytes(8, "little") + (3).to_bytes(4, "little") + b"\0")
        for step in range(1, 9):
            count = rng.choice([0, 1, 8, 90])
            payload = rng.randbytes(4 * count)
            if seed % 2:  # LL: a flag after every 4 bytes
                flag = step.to_bytes(4, "little")
                payload = b"".join(payload[at : at + 4] + flag for at in range(0, len(payload), 4))
            content += len(payload).to_bytes(4, "little") + payload
        script = Script([Turn(0, bytes(content[:13])), Turn(0, bytes(content[13:]))])
        found.append([frame.content for frame in Line(script, seed).frames()])
    return found


@decoder("mirrored NCCL sockets", socket_samples, change=changed_frames, share=0.3, native=True)
def mirrored_sockets(frames: list[bytes], folder: Path) -> Prepared:
    captured = [Captured(frame, at) for at, frame in enumerate(frames)]

    def parse() -> int:
        return len(read(NcclSocketParser(), captured, 16).all)

    return sum(map(len, frames)), parse


def parsed_messages() -> list[bytes]:
    """What a parser's stage hands on: the parts of each message, joined."""
    found = []
    for seed in range(3):
        frames = [Captured(frame.content, at) for at, frame in enumerate(Line(random_script(seed, 6), seed).frames())]
        parser = NativeGlooParser()
        for batch in batches(frames, 16):
            found.append(b"".join(pack_parsed(parser.feed(batch), {"parse": parser.counters()})))
    return found


@decoder("parsed messages", parsed_messages, change=changed_bytes, share=0.5, native=True)
def handed_messages(message: bytes, folder: Path) -> Prepared:
    def unpack() -> Any:
        parsed, _ = unpack_parsed(message, "a ring")
        for piece in parsed.pieces:
            string_at(int(piece["address"]), int(piece["nbytes"]))
        return parsed

    return len(message), unpack


def extracted_messages() -> list[bytes]:
    """What an extractor's stage hands on."""
    expected = Expect(3, "gradient", 40, "float32", 2, 0)
    events: list[Extracted] = [
        Incarnation(0, True),
        Learned(2, (("10.0.0.1", 0),)),
        Buckets(1, ((1, 0), (2,)), True),
        StepOpen(2),
        expected,
        Filled(expected, np.arange(40, dtype=np.uint8)),
        Gone(expected, "lost"),
        LostStep(2, "lost"),
    ]
    return [b"".join(pack_extracted(events[:count], {"extract": {"placed": 40}})) for count in (0, 4, 8)]


@decoder("extracted messages", extracted_messages, change=changed_bytes, share=0.5)
def handed_events(message: bytes, folder: Path) -> Prepared:
    return len(message), lambda: unpack_extracted(message, "a ring")
