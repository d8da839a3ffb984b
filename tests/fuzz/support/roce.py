"""RoCEv2 frames: headers changed under a right ICRC, frames lost, doubled and in another order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.fuzz.support.hostile import changed_bytes
from tests.fuzz.support.registry import Prepared, decoder

_CHANGED_HEADERS = 40
"""Bytes from BTH on in which a change says something."""


def _lives() -> list[Any]:
    """Protocol to read with, and frames as (path, BTH and all behind it)."""
    from lastgood.mirror.generate.life import seeded_life
    from lastgood.mirror.generate.traffic import RingTraffic, Wire

    found = []
    for wire, protocol in (
        (Wire("ll", mtu=256), "ll"),
        (Wire("ll", "2.19", 2, 256, six=False), "auto"),
        (Wire(mtu=256, adaptive="packets"), "auto"),
        (Wire(mtu=1024, adaptive="write"), "simple"),
    ):
        life = seeded_life(1, ranks=2, steps=2, shapes=[(60, 50), (7,)])
        frames = RingTraffic(2, wire, [0], 1, nak_every=3).frames(life.collectives())
        found.append([protocol, [frame.data for frame in frames]])
    return found


def _sealed(frame: bytes) -> bytes:
    """The frame with a right ICRC, if it still has the headers."""
    from lastgood.mirror.streams.icrc import icrc

    udp = 14 + (40 if frame[12:14] == b"\x86\xdd" else 20)
    if len(frame) < udp + 24:
        return frame
    return frame[:-4] + icrc(frame[14:-4], udp - 14).to_bytes(4, "little")


def _changed(rng: random.Random, thing: Any) -> Any:
    protocol, frames = thing
    begin = rng.randrange(len(frames))
    frames = frames[begin : begin + rng.randrange(1, 60)]
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(frames))
        kind = rng.randrange(6)
        frame = frames[at]
        bth = 14 + (48 if frame[12:14] == b"\x86\xdd" else 28)
        if kind == 0:
            frames[at] = changed_bytes(rng, frame)
        elif kind <= 3 and len(frame) > bth:
            head = changed_bytes(rng, frame[bth : bth + _CHANGED_HEADERS])[:_CHANGED_HEADERS]
            rest = frame[bth + _CHANGED_HEADERS :]
            frames[at] = _sealed(frame[:bth] + head.ljust(min(_CHANGED_HEADERS, len(frame) - bth), b"\0") + rest)
        elif kind == 4:
            frames[at:at] = frames[at : at + rng.randrange(1, 9)]
        elif len(frames) > 1:
            del frames[at : at + rng.randrange(1, 9)]
            frames = frames or [frame]
    if rng.random() < 0.2:
        rng.shuffle(frames)
    return [protocol, frames]


@decoder("RoCEv2 frames", _lives, change=_changed, share=0.3, native=True)
def _read_roce(thing: Any, folder: Path) -> Prepared:
    from lastgood.mirror.streams.roce import RoceParser
    from tests.mirror.support.roce_messages import Found, batch_of

    protocol, frames = thing

    def read() -> int:
        parser, found = RoceParser(protocol=protocol, most_waiting_bytes=1 << 20), Found(most_bytes=1 << 16)
        for begin in range(0, len(frames), 20):
            found.add(parser.feed(batch_of(frames[begin : begin + 20])))
        found.add(parser.finish())
        assert parser.counters()["frames"] == len(frames)
        return len(found.events)

    return sum(map(len, frames)), read
