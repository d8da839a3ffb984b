"""Inputs of native/fuzz/parsers.cpp, made of sound traffic: what libFuzzer begins with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.support.mirrored import samples
from tests.fuzz.support.roce import _lives

__all__ = ["write_corpus"]

GLOO, AUTO, SIMPLE, LL, BLOCKS = 0, 1, 2, 3, 5
SEAL, NO_CHECKSUM, ENDS_BATCH = 1, 2, 4
MOST_FRAMES = 24
MOST_BYTES = 6000
"""Of an input: short ones are changed better."""


def frames_input(which: int, frames: list[bytes], marks: int, rng: random.Random) -> bytes:
    found = bytearray([which])
    for frame in frames:
        ends = ENDS_BATCH if rng.random() < 0.2 else 0
        found += bytes([marks | ends]) + len(frame).to_bytes(2, "little") + frame
    return bytes(found)


def pieces(frames: list[bytes], rng: random.Random) -> Iterator[list[bytes]]:
    """The begin of some traffic, and parts from its middle."""
    for begin in (0, 0, rng.randrange(len(frames)), rng.randrange(len(frames))):
        part: list[bytes] = []
        for frame in frames[begin : begin + MOST_FRAMES]:
            if sum(map(len, part)) + len(frame) > MOST_BYTES:
                break
            part.append(frame)
        if part:
            yield part


def block(rng: random.Random) -> bytes:
    """A block of the kernel's ring, with a few frames."""
    header = bytearray(48)
    header[0:4] = (1).to_bytes(4, "little")
    header[8:12] = (1).to_bytes(4, "little")
    count = rng.randrange(1, 6)
    header[12:16] = count.to_bytes(4, "little")
    header[16:20] = (48).to_bytes(4, "little")
    frames = bytearray()
    for _ in range(count):
        captured = rng.randrange(200)
        taken = (86 + captured + 15) // 16 * 16
        one = bytearray(taken)
        for at, value in ((0, taken), (12, captured), (16, captured), (20, rng.choice([0, 1 << 4]))):
            one[at : at + 4] = value.to_bytes(4, "little")
        one[24:26] = (86).to_bytes(2, "little")
        frames += one
    return bytes([BLOCKS]) + bytes(header) + bytes(frames)


def write_corpus(folder: Path, seed: int = 0) -> int:
    """Write it, the same for the same seed; how many inputs there are."""
    rng = random.Random(seed)
    inputs = [frames_input(GLOO, part, NO_CHECKSUM, rng) for one in samples() for part in pieces(one, rng)]
    for protocol, frames in _lives():
        which = {"auto": AUTO, "simple": SIMPLE, "ll": LL}[protocol]
        inputs += [frames_input(which, part, SEAL, rng) for part in pieces(frames, rng)]
    inputs += [block(rng) for _ in range(8)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(inputs):
        (folder / f"{number:03d}").write_bytes(one)
    return len(inputs)
