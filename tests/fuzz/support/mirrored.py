"""Parsers of mirrored traffic: frames that anybody may send. The native parser must give what its plain twin gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lastgood.mirror.streams.gloo import GlooParser
from lastgood.mirror.streams.native import NativeGlooParser
from tests.fuzz.support.hostile import changed_bytes
from tests.fuzz.support.registry import Prepared, decoder
from tests.mirror.support.frames import Captured
from tests.mirror.support.gloo_wire import Line, random_script
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
