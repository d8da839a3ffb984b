"""Generated frames over a veth pair: what is sent at a rate is captured at the other end."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from lastgood.errors import HostError
from lastgood.mirror.capture.interface import InterfaceSource
from lastgood.mirror.generate.life import seeded_life
from lastgood.mirror.generate.output import send_frames
from lastgood.mirror.generate.traffic import RingTraffic, Wire

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and iproute2"),
]


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    ends = (f"lgs{os.getpid() % 100000}", f"lgr{os.getpid() % 100000}")
    made = subprocess.run(
        ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], capture_output=True, timeout=20
    )
    if made.returncode:
        pytest.skip(f"no veth pair: {made.stderr.decode()}")
    try:
        for end in ends:
            subprocess.run(["ip", "link", "set", end, "mtu", "9000", "up"], check=True, timeout=20)
        yield ends
    finally:
        subprocess.run(["ip", "link", "del", ends[0]], timeout=20)


def test_frames_arrive_as_they_were_made_and_no_faster_than_asked(pair: tuple[str, str]) -> None:
    life = seeded_life(1, ranks=2, steps=1, shapes=[(200, 100)])
    frames = list(RingTraffic(2, Wire(mtu=1024), [0]).frames(life.collectives()))
    wanted = [frame.data for frame in frames]
    source = InterfaceSource(pair[1], ring_bytes=8 << 20, block_bytes=1 << 20)
    try:
        begin = time.monotonic()
        assert send_frames(pair[0], frames, bits_per_s=20e6) == len(frames)
        took = time.monotonic() - begin
        found: list[bytes] = []
        until = time.monotonic() + 20
        while len(found) < len(wanted) and time.monotonic() < until:
            batch = source.read(500, 0.2)
            assert batch is not None
            for number in range(len(batch)):
                frame = bytes(batch.frame(number))
                if frame[:3] == b"\x02\0\0":  # not the kernel's own
                    found.append(frame)
    finally:
        source.close()
    assert found == wanted
    assert took > 0.5 * sum(map(len, wanted)) * 8 / 20e6


def test_an_interface_that_is_not_there_is_said() -> None:
    with pytest.raises(HostError, match="interface lgnothere takes no frames"):
        send_frames("lgnothere", [], bits_per_s=1e6)
