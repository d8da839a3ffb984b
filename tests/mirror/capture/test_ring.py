"""The ring between two processes: order, room, drops, deaths, and what must never be believed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lastgood import _native
from lastgood.errors import ConfigError, CorruptCheckpoint, HostError, LockHeld, StorageError, WaitTimeout
from lastgood.mirror.capture.frames import FrameBatch
from lastgood.mirror.capture.ring import LEAST_RING_BYTES, RingReader, RingWriter, read_report
from tests.mirror.capture.support.captures import Shot, batch_of, rows_of, shots


@pytest.fixture
def path() -> Iterator[Path]:
    place = Path(f"/dev/shm/lastgood-test-{os.getpid()}-{time.monotonic_ns()}")
    yield place
    place.unlink(missing_ok=True)


def big(count: int, size: int = 65_536) -> list[Shot]:
    rng = np.random.default_rng(3)
    return [Shot(rng.bytes(size - int(rng.integers(0, 64))), i, length=70_000) for i in range(count)]


def test_frames_of_all_sizes_come_in_order_and_as_they_were(path: Path) -> None:
    frames = [*shots(3000, most=1600), *big(100), *shots(3000, seed=8, most=80)]
    with closing(RingWriter(path, LEAST_RING_BYTES, 113)) as writer, closing(RingReader(path)) as reader:
        assert reader.link_type == 113

        def fill() -> None:
            for start in range(0, len(frames), 250):
                writer.write(batch_of(frames[start : start + 250]), drop=False, patience_s=30)
            writer.end()

        filling = threading.Thread(target=fill)
        filling.start()
        found = []
        while (batch := reader.read(97, 5)) is not None:
            found += rows_of(batch)
        filling.join(30)
        assert found == [one.row for one in frames]
        assert reader.counters()["frames"] == len(frames)
        assert reader.counters()["ring_missing_frames"] == reader.counters()["ring_dropped_frames"] == 0
        assert not reader.writer_died
        assert writer.counters()["taken_frames"] == len(frames) and writer.counters()["held_bytes"] == 0


def test_what_does_not_fit_is_dropped_counted_and_its_place_is_known(path: Path) -> None:
    frames = big(40)
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer, closing(RingReader(path)) as reader:
        assert writer.write(batch_of(frames), drop=True) == 40
        dropped = writer.counters()["dropped_frames"]
        assert 20 < dropped < 40
        first = rows_of(reader.read(100, 1) or pytest.fail("nothing"))
        assert first == [one.row for one in frames[: 40 - dropped]]
        assert len(reader.read(100, 0) or ()) == 0  # gives the batch back
        writer.write(batch_of(frames[:2]), drop=True)
        assert [row[0] for row in rows_of(reader.read(100, 1) or pytest.fail("nothing"))] == [
            one.data for one in frames[:2]
        ]
        assert reader.counters()["ring_missing_frames"] == dropped == reader.counters()["ring_dropped_frames"]
        assert reader.counters()["ring_dropped_bytes"] == sum(len(one.data) for one in frames[40 - dropped :])


def test_frames_that_are_held_are_never_written_over(path: Path) -> None:
    frames = big(60)
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer, closing(RingReader(path)) as reader:
        writer.write(batch_of(frames), drop=True)
        held = reader.read(3, 1)
        assert held is not None
        for start in range(0, 60, 10):
            writer.write(batch_of(frames[start : start + 10]), drop=True)
        assert rows_of(held) == [one.row for one in frames[:3]]


def test_a_writer_that_waits_is_woken_and_gives_up_in_time(path: Path) -> None:
    frames = big(40)
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer:
        with pytest.raises(WaitTimeout, match="no reader"):
            writer.write(batch_of(frames), drop=False, patience_s=0.2)
        with closing(RingReader(path)) as reader:
            with pytest.raises(WaitTimeout, match="takes nothing"):
                writer.write(batch_of(frames), drop=False, patience_s=0.2)
            stop = threading.Event()
            stop.set()
            assert writer.write(batch_of(frames), drop=False, patience_s=60, stop=stop) == 0
            assert reader.read(1, 1) is not None


def test_an_empty_ring_is_waited_for_and_a_frame_wakes_its_reader(path: Path) -> None:
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer, closing(RingReader(path)) as reader:
        start = time.monotonic()
        assert len(reader.read(10, 0.25) or ()) == 0
        assert 0.2 < time.monotonic() - start < 5
        later = threading.Timer(0.2, lambda: writer.write(batch_of(shots(1)), drop=True))
        later.start()
        assert len(reader.read(10, 20) or ()) == 1
        later.join()


def test_there_is_one_writer_and_one_reader(path: Path) -> None:
    with pytest.raises(HostError, match="mirror dump"):
        RingReader(path)
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer:
        with pytest.raises(LockHeld, match="fills"):
            RingWriter(path, LEAST_RING_BYTES, 1)
        assert not writer.other_lives()
        with closing(RingReader(path)):
            assert writer.other_lives()
            with pytest.raises(LockHeld, match="reads"):
                RingReader(path)
        assert not writer.other_lives()
        with closing(RingReader(path)):
            pass
    assert not path.exists()


def test_a_reader_goes_on_after_a_reader_that_went(path: Path) -> None:
    frames = shots(20)
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer:
        writer.write(batch_of(frames), drop=True)
        with closing(RingReader(path)) as reader:
            reader.read(5, 1)
            reader.read(5, 1)  # gives the first five back
        with closing(RingReader(path)) as reader:
            assert rows_of(reader.read(100, 1) or pytest.fail("nothing")) == [one.row for one in frames[5:]]


WRITER = """
import sys, time
from pathlib import Path
from lastgood.mirror.capture.ring import RingWriter, LEAST_RING_BYTES
from tests.mirror.capture.support.captures import batch_of, shots
writer = RingWriter(Path(sys.argv[1]), LEAST_RING_BYTES, 1)
writer.write(batch_of(shots(30)), drop=True)
writer.report({"source": {"kernel_dropped": 4, "name": "no number"}})
print("ready", flush=True)
time.sleep(60)
"""

READER = """
import sys, time
from pathlib import Path
from lastgood.mirror.capture.ring import RingReader
reader = RingReader(Path(sys.argv[1]), wait_s=20)
reader.read(5, 5)
print("ready", flush=True)
time.sleep(60)
"""


def child(code: str, path: Path) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def test_a_writer_that_is_killed_is_noticed_after_all_that_it_wrote(path: Path) -> None:
    process = child(WRITER, path)
    try:
        assert read_report(path)["source"]["kernel_dropped"] == 4
        with closing(RingReader(path)) as reader:
            assert rows_of(reader.read(100, 5) or pytest.fail("nothing")) == [one.row for one in shots(30)]
            threading.Timer(0.3, kill, [process]).start()
            start = time.monotonic()
            assert reader.read(100, 30) is None
            assert time.monotonic() - start < 10
            assert reader.writer_died and reader.counters()["writer_died"] == 1
            assert reader.counters()["source_kernel_dropped"] == 4
    finally:
        kill(process)
    # A new writer takes the place of the dead one.
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)):
        pass


def test_a_reader_that_is_killed_is_noticed_and_another_takes_its_place(path: Path) -> None:
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer:
        writer.write(batch_of(shots(30)), drop=True)
        process = child(READER, path)
        try:
            assert writer.counters()["has_reader"] == 1
        finally:
            kill(process)
        assert writer.counters()["has_reader"] == 0
        with closing(RingReader(path)) as reader:  # what was not given back comes again
            assert len(reader.read(100, 1) or ()) == 30


def test_sizes_and_files_that_cannot_be(path: Path) -> None:
    with pytest.raises(ConfigError, match="at least"):
        RingWriter(path, 4096, 1)
    path.write_bytes(b"not mine")
    with pytest.raises(StorageError, match="no ring"):
        RingWriter(path, LEAST_RING_BYTES, 1)
    with pytest.raises(StorageError, match="no ring"):
        RingReader(path)
    with pytest.raises(StorageError, match="no ring"):
        read_report(path)
    path.write_bytes(bytes(LEAST_RING_BYTES))
    with pytest.raises(StorageError, match="no ring"):
        RingReader(path)


def test_frames_outside_their_batch_are_dropped(path: Path) -> None:
    batch = batch_of(shots(3))
    table = batch.table.copy()
    table["offset"][0] = 1 << 60
    table["captured"][1] = 1 << 30
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer, closing(RingReader(path)) as reader:
        writer.write(FrameBatch(batch.data, table), drop=False, patience_s=1)
        assert rows_of(reader.read(9, 1) or pytest.fail("nothing")) == [shots(3)[2].row]
        assert writer.counters()["dropped_frames"] == 2


HEAD, TAIL, DATA = 64, 128, _native.FRAME_RING_HEADER_BYTES


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (HEAD, 1 << 60),
        (HEAD, 33),
        (TAIL, 1 << 60),  # a reader sees its own end moved
        (DATA, 1 << 40),  # the next frame's sequence goes back
        (DATA + 16, 0xFFFFFFFE),
        (DATA + 16, (1 << 18) + 1),
        (DATA + 32 + 320 + 16, 0xFFFFFFFF),  # padding that leads beyond the head
    ],
)
def test_what_a_writer_cannot_have_written_is_refused(path: Path, place: int, value: int) -> None:
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer, closing(RingReader(path)) as reader:
        writer.write(batch_of([Shot(bytes(300), 0), Shot(bytes(300), 1)]), drop=True)
        memory = np.frombuffer(writer._memory, np.uint8)
        size = 8 if place < DATA or value >= 1 << 32 else 4
        memory[place : place + size] = list(value.to_bytes(size, "little"))
        with pytest.raises(CorruptCheckpoint, match="start dump"):
            reader.read(9, 0)
        del memory


def test_any_header_is_survived(path: Path) -> None:
    rng = np.random.default_rng(5)
    with closing(RingWriter(path, LEAST_RING_BYTES, 1)) as writer:
        writer.write(batch_of(shots(20)), drop=True)
        good = path.read_bytes()
    for _ in range(300):
        raw = bytearray(good)
        for _ in range(int(rng.integers(1, 6))):
            place = int(rng.integers(0, 512)) if rng.random() < 0.5 else DATA + int(rng.integers(0, 4096))
            raw[place] = int(rng.integers(256))
        path.write_bytes(raw)
        try:
            with closing(RingReader(path)) as reader:
                while (batch := reader.read(7, 0)) is not None and len(batch):
                    rows_of(batch)
                reader.counters()
        except (StorageError, CorruptCheckpoint):
            continue
