"""Kept frames: what the native writer writes, its limit, and disks that are full."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from lastgood.errors import ConfigError
from lastgood.mirror.capture.files import CaptureFile
from lastgood.mirror.capture.frames import OWN
from lastgood.mirror.capture.keep import FrameKeeper
from lastgood.mirror.capture.pcapng import interface_block, packet_block, section_block
from tests.mirror.capture.support.captures import Shot, batch_of, read_all, shots


def mixed() -> list[Shot]:
    frames = shots(200, most=3000)
    return [
        Shot(one.data, one.time_ns, length=len(one.data) + 9 * (i % 3 == 0), flags=OWN * (i % 4 == 0), link=link)
        for i, one in enumerate(frames)
        for link in [(1, 113, 276)[i // 50 % 3]]
    ]


def test_it_is_what_the_plain_writer_writes_and_is_read_back(tmp_path: Path) -> None:
    frames = mixed()
    path = tmp_path / "kept.pcapng"
    with closing(FrameKeeper(path, 1 << 30)) as keeper:
        keeper.write(batch_of(frames[:120]))
        keeper.write(batch_of(frames[120:]))
        counters = keeper.counters()
    expected, numbers = section_block(), {}
    for one in frames:
        if one.link not in numbers:
            numbers[one.link] = len(numbers)
            expected += interface_block(one.link)
        expected += packet_block(
            one.data, one.time_ns, length=one.on_wire, interface=numbers[one.link], own=bool(one.flags & OWN)
        )
    assert path.read_bytes() == expected
    assert counters == {"kept_frames": 200, "kept_bytes": len(expected), "not_kept_frames": 0}
    with closing(CaptureFile(path)) as source:
        assert read_all(source) == [one.row for one in frames]


def test_at_its_limit_it_ends_with_a_complete_frame_and_counts_the_rest(tmp_path: Path) -> None:
    frames = shots(300, most=500)
    path = tmp_path / "kept.pcapng"
    with closing(FrameKeeper(path, 20_000)) as keeper:
        for start in range(0, 300, 30):
            keeper.write(batch_of(frames[start : start + 30]))
        counters = keeper.counters()
        assert keeper.stopped and "20000" in keeper.stopped
    assert path.stat().st_size == counters["kept_bytes"] <= 20_000
    assert counters["kept_frames"] + counters["not_kept_frames"] == 300
    with closing(CaptureFile(path)) as source:
        assert read_all(source) == [one.row for one in frames[: counters["kept_frames"]]]
        assert source.counters()["cut_bytes"] == 0


def test_on_a_full_disk_it_stops_and_leaves_a_file_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = shots(100)
    path = tmp_path / "kept.pcapng"
    real, room = os.write, [7_001]

    def write(descriptor: int, content: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(descriptor, content[: room[0]])
        room[0] -= done
        return done

    with closing(FrameKeeper(path, 1 << 30)) as keeper:
        keeper.write(batch_of(frames[:20]))
        kept = keeper.counters()["kept_frames"]
        monkeypatch.setattr(os, "write", write)
        keeper.write(batch_of(frames[20:]))
        assert keeper.stopped and os.strerror(errno.ENOSPC) in keeper.stopped
        assert keeper.counters()["kept_frames"] == kept == 20 and keeper.counters()["not_kept_frames"] == 80
    monkeypatch.undo()
    with closing(CaptureFile(path)) as source:
        assert read_all(source) == [one.row for one in frames[:20]]
        assert source.counters()["cut_bytes"] == 0


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="already"):
        FrameKeeper(path, 1 << 20)
    assert path.read_bytes() == b"mine"
