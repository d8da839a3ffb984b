"""pcap and pcapng files: of every machine, cut, damaged, hostile."""

from __future__ import annotations

import io
import struct
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lastgood.errors import DataError, StorageError
from lastgood.mirror.capture.files import CaptureFile
from lastgood.mirror.capture.frames import MOST_FRAME_BYTES, OWN, TRUNCATED
from tests.mirror.capture.support.captures import (
    Shot,
    block,
    enhanced,
    interface,
    option,
    pcap,
    read_all,
    section,
    shots,
)

ORDERS = pytest.mark.parametrize("order", ["<", ">"])


def written(folder: Path, content: bytes) -> Path:
    path = folder / "capture"
    path.write_bytes(content)
    return path


def rows(path: Path, **options: int) -> tuple[list[tuple[bytes, int, int, int, int]], dict[str, int]]:
    with closing(CaptureFile(path, **options)) as source:
        return read_all(source, 5), source.counters()


@ORDERS
@pytest.mark.parametrize("nano", [False, True])
@pytest.mark.parametrize("link", [1, 113, 276])
def test_pcap_of_every_machine(tmp_path: Path, order: str, nano: bool, link: int) -> None:
    frames = shots(40, link=link)
    if nano:
        frames = [Shot(one.data, one.time_ns + 77, link=link) for one in frames]
    path = written(tmp_path, pcap(frames, order, nano, link))
    for chunk_bytes in (1, 50, 1 << 20):
        found, counters = rows(path, chunk_bytes=chunk_bytes)
        assert found == [one.row for one in frames]
        assert counters["frames"] == 40 and counters["cut_bytes"] == counters["damaged"] == 0
    with closing(CaptureFile(path)) as source:
        assert source.link_type == link


@ORDERS
def test_pcapng_with_all_its_blocks(tmp_path: Path, order: str) -> None:
    base = 1_700_000_000
    one, two = Shot(b"a" * 61, base * 10**9 + 5000), Shot(b"b" * 64, base * 10**9 + 1, flags=OWN, link=113)
    cut, far = Shot(b"c" * 20, base * 10**9, length=90), Shot(b"d" * 15, 512 * 10**9 // 1024 + 3600 * 10**9)
    flags = option(order, 2, struct.pack(order + "I", 2)) + option(order, 0, b"")
    content = [
        section(order),
        interface(order),
        enhanced(order, one, one.time_ns // 1000),
        block(order, 0x0BAD, b"somebody's own"),
        interface(order, 113, options=option(order, 9, b"\x09")),
        enhanced(order, two, two.time_ns, 1, flags),
        interface(order, 147),  # one that is not read
        enhanced(order, one, 0, 2),
        interface(order, 1, options=option(order, 9, b"\x8a") + option(order, 14, struct.pack(order + "q", 3600))),
        enhanced(order, far, 512, 3),
        block(order, 5, struct.pack(order + "III", 0, 0, 0) + option(order, 5, struct.pack(order + "Q", 11))),
        # The old packet block, which counts two drops; then a second section in the other byte order.
        block(order, 2, struct.pack(order + "HHIIII", 0, 2, 0, 0, 20, 90) + cut.data),
        section("<" if order == ">" else ">"),
        interface("<" if order == ">" else ">", snap=20),
        block("<" if order == ">" else ">", 3, struct.pack("<I" if order == ">" else ">I", 90) + cut.data),
    ]
    found, counters = rows(written(tmp_path, b"".join(content)))
    without_time = Shot(cut.data, 0, length=90).row
    assert found == [one.row, two.row, far.row, without_time, without_time]
    assert counters["file_dropped_frames"] == 13
    assert counters["other_link_frames"] == 1 and counters["other_blocks"] == 1
    assert counters["truncated"] == 2 and counters["damaged"] == 0


@pytest.mark.parametrize("kind", ["pcap", "pcapng"])
def test_cut_anywhere_it_ends_with_the_frame_before(tmp_path: Path, kind: str) -> None:
    frames = shots(4, most=40)
    blocks = [section("<"), interface("<")] + [enhanced("<", one, one.time_ns // 1000) for one in frames]
    content = pcap(frames) if kind == "pcap" else b"".join(blocks)
    head = 24 if kind == "pcap" else len(blocks[0])
    for size in range(head, len(content)):
        found, counters = rows(written(tmp_path, content[:size]), chunk_bytes=13)
        assert found == [one.row for one in frames][: len(found)] and len(found) < 4
        assert counters["damaged"] == 0
    with pytest.raises(DataError, match=r"header|neither"):
        CaptureFile(written(tmp_path, content[:20] if kind == "pcap" else content[:3]))


@pytest.mark.parametrize("captured", [MOST_FRAME_BYTES + 1, 1 << 31, 0xFFFFFFFF])
def test_a_hostile_length_takes_no_memory(tmp_path: Path, captured: int) -> None:
    good = shots(3)
    bad = struct.pack("<IIII", 0, 0, captured, captured)
    path = written(tmp_path, pcap(good) + bad + bytes(1000))
    tracemalloc.start()
    found, counters = rows(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [one.row for one in good]
    assert counters["damaged"] == 1 and counters["unread_bytes"] == 1016
    assert peak < 8 << 20


@pytest.mark.parametrize(
    "tail",
    [
        struct.pack("<III", 6, 13, 0),  # not a multiple of four
        struct.pack("<III", 6, 8, 0),  # shorter than itself
        struct.pack("<III", 6, 1 << 30, 0),
        block("<", 6, struct.pack("<IIIII", 9, 0, 0, 4, 4) + b"abcd"),  # of no interface
        block("<", 6, struct.pack("<IIIII", 0, 0, 0, 5, 5) + b"abcd"),  # longer than its block
        block("<", 6, b"abcd"),
        block("<", 6, b"abcd")[:-4] + b"\0\0\0\0",
        block("<", 1, b"abcd"),
        block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 9, 0, -1)),
        block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x11223344, 1, 0, -1)),
        interface("<", options=option("<", 9, b"\x7f")),
    ],
)
def test_a_hostile_block_ends_the_file_and_says_so(tmp_path: Path, tail: bytes) -> None:
    good = shots(2)
    content = section("<") + interface("<") + b"".join(enhanced("<", one, one.time_ns // 1000) for one in good)
    path = written(tmp_path, content + tail + bytes(40))
    with closing(CaptureFile(path)) as source:
        assert read_all(source) == [one.row for one in good]
        assert source.damage
        assert source.counters()["unread_bytes"] == len(tail) + 40


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither"),
        (b"GIF89a" + bytes(40), "neither"),
        (pcap([], link=147), "link type 147"),
        (struct.pack("<IHHiIII", 0xA1B2C3D4, 3, 0, 0, 0, 1, 1), "version 3"),
        (section("<") + interface("<", 147) + enhanced("<", Shot(b"x" * 20, 0), 0), "none of its interfaces"),
    ],
)
def test_what_is_no_capture_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        CaptureFile(written(tmp_path, content))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing-here"):
        CaptureFile(tmp_path / "nothing-here")
    with pytest.raises(StorageError, match="directory"):
        CaptureFile(tmp_path)


def test_truncated_frames_and_runts_are_given_and_counted(tmp_path: Path) -> None:
    frames = [Shot(b"x" * 60, 0, length=1500), Shot(b"", 0), Shot(b"y" * 13, 0), Shot(b"z" * 14, 0)]
    found, counters = rows(written(tmp_path, pcap(frames)))
    assert [row[0] for row in found] == [one.data for one in frames]
    assert found[0][3] == TRUNCATED and counters["truncated"] == 1 and counters["runts"] == 2


def test_a_batch_holds_while_the_next_is_not_asked_for(tmp_path: Path) -> None:
    frames = shots(50)
    with closing(CaptureFile(written(tmp_path, pcap(frames)), chunk_bytes=100)) as source:
        first = source.read(1, 0)
        assert first is not None
        kept = bytes(first.frame(0))
        assert kept == frames[0].data


def test_damage_anywhere_never_leaves_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(18)
    frames = shots(6, most=50)
    blocks = [section("<"), interface("<")] + [enhanced("<", one, one.time_ns // 1000) for one in frames]
    for content in (pcap(frames), pcap(frames, ">"), b"".join(blocks)):
        for _ in range(150):
            raw = bytearray(content)
            for _ in range(int(rng.integers(1, 4))):
                raw[int(rng.integers(4, len(raw)))] = int(rng.choice([0, 1, 127, 128, 255, int(rng.integers(256))]))
            try:
                source = CaptureFile(written(tmp_path, bytes(raw)), chunk_bytes=64)
            except DataError:
                continue
            with closing(source):
                while (batch := source.read(3, 0)) is not None:
                    for number in range(len(batch)):
                        row = batch.table[number]
                        assert int(row["offset"]) + int(row["captured"]) <= len(batch.data)
                        assert row["captured"] <= row["length"]


def test_scapy_reads_and_writes_the_same(tmp_path: Path) -> None:
    scapy = pytest.importorskip("scapy.utils")
    from lastgood.mirror.capture.pcapng import interface_block, packet_block, section_block

    frames = [one for one in shots(30, most=200) if len(one.data) > 14]
    ng = section_block() + interface_block(1, "mir0")
    ng += b"".join(packet_block(one.data, one.time_ns, own=i % 2 == 0) for i, one in enumerate(frames))
    with scapy.RawPcapNgReader(io.BytesIO(ng)) as reader:
        assert [data for data, _ in reader] == [one.data for one in frames]
    path = tmp_path / "theirs"
    writer = scapy.RawPcapWriter(str(path), linktype=1, nano=True, sync=True)
    writer.write_header(None)
    for one in frames:
        seconds, nanoseconds = divmod(one.time_ns, 10**9)
        writer.write_packet(one.data, sec=seconds, usec=nanoseconds)
    writer.close()
    found, _ = rows(path)
    assert found == [one.row for one in frames]
