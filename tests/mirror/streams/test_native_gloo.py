"""The native parser gives what its plain twin gives, whatever passes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from lastgood.mirror.streams.native import NativeGlooParser
from lastgood.mirror.streams.tcp import TcpSettings
from tests.mirror.support.frames import Captured, read_pcap
from tests.mirror.support.gloo_wire import Line, random_script
from tests.mirror.support.plain.gloo import GlooParser
from tests.mirror.support.twins import compare

SAMPLES = Path(__file__).parents[1] / "samples"
SMALL = TcpSettings(keep_bytes=3000, keep_all_bytes=5000, blind_bytes=1000, max_connections=3)


def disturbed(frames: list[Captured], draw: random.Random, rate: float) -> list[Captured]:
    """Loss, repetition (changed now and then), disorder, cut frames and flipped bits."""
    found: list[tuple[float, Captured]] = []
    for at, frame in enumerate(frames):
        kind = draw.randrange(6) if draw.random() < rate else -1
        content = bytearray(frame.content)
        if kind == 0:
            continue
        if kind == 1:
            found.append((at + draw.randrange(40), frame))
        if kind == 2:
            place = draw.randrange(len(content))
            content[place] ^= 1 << draw.randrange(8)
        if kind == 3:
            del content[draw.randrange(len(content)) :]
        late = draw.randrange(20) if kind == 4 else 0
        found.append((at + late, Captured(bytes(content), frame.time_ns, frame.link, len(frame.content))))
        if kind == 5:
            place = draw.randrange(len(content))
            content[place] ^= 0xFF
            found.append((at + 0.5, Captured(bytes(content), frame.time_ns)))
    found.sort(key=lambda one: one[0])
    return [frame for _, frame in found]


@examples(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 90),
    rate=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    settings=st.sampled_from([None, SMALL]),
    begin=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_the_same_under_loss_disorder_and_damage(seed, size, rate, settings, begin):
    draw = random.Random(seed)
    frames = Line(random_script(seed, 25), seed).frames(close=draw.random() < 0.5)
    other = Line(
        random_script(seed + 1, 10), seed + 1, ends=(("fd00::1", 5), ("fd00::2", 6)), starts=(3, 0xFFFFFFF0)
    ).frames()
    mixed = [*frames[: len(frames) // 2], *other, *frames[len(frames) // 2 :]]
    if draw.random() < 0.3:
        mixed += Line(random_script(seed + 2, 5), seed, starts=(draw.randrange(1 << 32), 9)).frames()
    frames = disturbed(mixed[int(begin * len(mixed)) :], draw, rate)
    compare(GlooParser(settings), NativeGlooParser(settings), frames, size)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_on_kept_captures(ranks):
    frames = read_pcap(SAMPLES / f"gloo-{ranks}.pcap.xz")
    compare(GlooParser(), NativeGlooParser(), frames, 100)
    draw = random.Random(ranks)
    for rate in (0.01, 0.1):
        compare(GlooParser(), NativeGlooParser(), [one for one in frames if draw.random() >= rate], 100)


@examples(max_examples=25)
@given(content=st.lists(st.binary(max_size=120), max_size=5))
def test_any_frames_have_an_answer(content):
    compare(GlooParser(), NativeGlooParser(), [Captured(one) for one in content], 2)
