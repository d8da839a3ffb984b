"""Two mapped areas that alternate: what they hold after every crash, refusal and damage."""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_reader import read_directory
from slot_helpers import CHUNK, address_of, content_of, flip, load, steps

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, LockHeld, MismatchError, StorageError
from lastgood.storage import SlotInfo, SlotStore, SlotView
from lastgood.storage import format as fmt
from lastgood.storage.mapped_areas import AreaStore, AreaWrite, MappedArea

STATE = 2 * CHUNK + 99
SECTOR = 512


def put(write: AreaWrite, content: bytes, *, chunks: range | None = None) -> list[int]:
    """Store the chunks of a stream, and give the checksums of all."""
    padded = content.ljust(write.padded_bytes, b"\0")
    sums = []
    for index in range(-(-len(padded) // CHUNK)):
        part = bytearray(padded[index * CHUNK : (index + 1) * CHUNK])
        seed = _native.chunk_seed(write.sequence, index)
        sums.append(_native.crc32c(part, seed))
        if chunks is None or index in chunks:
            ctypes.memmove(write.address + index * CHUNK, address_of(part), len(part))
    return sums


def save(store: AreaStore, step: int, nbytes: int = STATE) -> SlotInfo:
    store.reserve(nbytes)
    write = store.begin(step, nbytes)
    return write.commit(nbytes - 10, 10, bytes(32), put(write, content_of(step, nbytes)))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[AreaStore]:
    store = AreaStore(tmp_path, chunk_bytes=CHUNK)
    yield store
    store.close()


def test_two_alternate_and_others_can_read_them(opened: AreaStore, tmp_path: Path) -> None:
    places = [save(opened, step, STATE + 5000 * step).slot for step in range(1, 6)]
    assert places == [0, 1, 0, 1, 0]
    assert [(one.step, one.stream) for one in read_directory(tmp_path)] == [
        (step, content_of(step, STATE + 5000 * step)) for step in (5, 4)
    ]
    opened.close()
    with SlotStore(tmp_path, slots=2, keep=1, chunk_bytes=CHUNK) as store:  # they are slots like others
        assert load(store, store.committed()[0]) == content_of(5, STATE + 25_000)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(10, 5 * CHUNK)),
        st.tuples(st.just("give up"), st.integers(10, 5 * CHUNK)),
        st.tuples(st.just("open again"), st.just(0)),
        st.tuples(st.just("go back"), st.just(0)),
        st.tuples(st.just("damage"), st.integers(0, 1 << 30)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(acts=ACTS)
def test_the_one_that_stays_is_never_touched(
    acts: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against a plain model: the step that must stay, whatever happens, and its content."""
    directory = tmp_path_factory.mktemp("areas")
    store = AreaStore(directory, chunk_bytes=CHUNK)
    stays: SlotInfo | None = None
    step = 0
    try:
        for act, number in acts:
            step += 1
            if act == "save":
                stays = save(store, step, number)
            elif act == "give up":
                store.reserve(number)
                put(store.begin(step, number), content_of(step, number), chunks=range(1))
            elif act == "open again":
                store.close()
                store = AreaStore(directory, chunk_bytes=CHUNK)
            elif act == "go back":
                for info in SlotView(directory).committed()[1:2]:
                    store.protect(info)
                    stays = info
            elif act == "damage":
                # Only the newest one can be damaged with nothing lost, where an older one is whole.
                whole = SlotView(directory).committed()
                if len(whole) == 2 and stays == whole[0]:
                    store.close()
                    flip(whole[0].path, fmt.DATA_OFFSET + number % whole[0].stream_bytes)
                    store = AreaStore(directory, chunk_bytes=CHUNK)
                    stays = whole[1]
                    (kept,) = [info for info in SlotView(directory).committed() if info == stays]
                    save(store, step, CHUNK)  # over the damaged one
                    assert load(SlotView(directory), kept) == content_of(kept.step, kept.stream_bytes)
                    stays = SlotView(directory).committed()[0]
            if stays is not None:
                assert load(SlotView(directory), stays) == content_of(stays.step, stays.stream_bytes)
            if act == "open again":
                newest = SlotView(directory).committed()[:1]
                stays = newest[0] if newest else None
    finally:
        store.close()


class WorstDisk:
    """What a power cut may leave: what was flushed, and any of the sectors that were stored since, in any mixture.

    The kernel writes dirty pages of a mapping whenever it likes, and a disk may tear a page between two sectors.
    """

    def __init__(self, directory: Path, place: Path, seed: int) -> None:
        self._directory = directory
        self._place = place
        self._chance = random.Random(seed)
        self._durable = {path.name: np.fromfile(path, dtype=np.uint8) for path in directory.glob("slot-*")}
        self.last_durable = 0
        self.looks = 0
        self.failures: list[str] = []

    def flushed(self, area: MappedArea, offset: int, nbytes: int) -> None:
        begin, end = offset // 4096 * 4096, fmt.align_up(offset + nbytes)
        self._durable[area.path.name][begin:end] = np.frombuffer(area.path.read_bytes(), dtype=np.uint8)[begin:end]

    def cut(self) -> None:
        """Cut the power now, in many ways, and check what can be found afterwards."""
        now = {name: np.fromfile(self._directory / name, dtype=np.uint8) for name in self._durable}
        for way in ("nothing", "everything", "records", "all but records", "some", "some", "some"):
            for name, durable in self._durable.items():
                old, new = durable.reshape(-1, SECTOR), now[name].reshape(-1, SECTOR)
                took = (old != new).any(axis=1)
                record = np.arange(len(took)) == fmt.COMMIT_OFFSET // SECTOR
                if way == "some":
                    took &= np.array([self._chance.random() < 0.5 for _ in took]) if took.any() else took
                else:
                    took &= {"nothing": record & ~record, "everything": record | ~record, "records": record}.get(
                        way, ~record
                    )
                np.where(took[:, None], new, old).tofile(self._place / name)
            self._check(way)

    def _check(self, way: str) -> None:
        view = SlotView(self._place)
        found = view.committed()
        self.looks += 1
        for info in found:
            try:
                assert load(view, info) == content_of(info.step, info.stream_bytes)
            except CorruptCheckpoint as error:
                self.failures.append(f"{way}: a record stands before data that is not its own: {error}")
        if (found[0].step if found else 0) < self.last_durable:
            self.failures.append(f"{way}: step {self.last_durable} was durable and is gone; there are {steps(view)}")


def saves_with_power_cuts(directory: Path, place: Path) -> WorstDisk:
    """Six saves; the power is cut before and after each flush, and amid the stores."""
    place.mkdir()
    store = AreaStore(directory, chunk_bytes=CHUNK)
    store.reserve(STATE)
    disk = WorstDisk(directory, place, seed=3)
    flush = MappedArea.flush

    def flush_and_cut(area: MappedArea, offset: int, nbytes: int) -> None:
        disk.cut()
        flush(area, offset, nbytes)
        disk.flushed(area, offset, nbytes)
        disk.cut()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedArea, "flush", flush_and_cut)
        for step in range(1, 7):
            write = store.begin(step, STATE)
            content = content_of(step, STATE)
            put(write, content, chunks=range(1))
            disk.cut()
            write.commit(STATE - 10, 10, bytes(32), put(write, content))
            disk.last_durable = step
    store.close()
    return disk


def test_power_cuts_at_every_flush(tmp_path: Path) -> None:
    disk = saves_with_power_cuts(tmp_path / "job", tmp_path / "after")
    assert disk.looks == 6 * 7 * 7
    assert not disk.failures, disk.failures[:3]


@pytest.mark.parametrize("broken", ["void", "data"])
def test_the_power_cuts_find_a_wrong_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """The check above is one that can fail."""
    if broken == "void":
        monkeypatch.setattr(AreaWrite, "void", lambda write: None)
    else:
        put_record = AreaWrite._put_record

        def record_first(area: MappedArea, content: bytes, offset: int) -> None:
            store(area, content, offset)
            if offset != fmt.COMMIT_OFFSET and records:
                put_record(*records.pop())

        records: list[tuple[AreaWrite, fmt.CommitRecord]] = []
        writes: list[AreaWrite] = []
        store, commit, make = MappedArea.store, AreaWrite.commit, fmt.CommitRecord.committed

        def remember(void: fmt.CommitRecord, *fields: object) -> fmt.CommitRecord:
            record = make(void, *fields)  # type: ignore[arg-type]
            records.append((writes[-1], record))
            return record

        def of_write(write: AreaWrite, *rest: object) -> object:
            writes.append(write)
            return commit(write, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(fmt.CommitRecord, "committed", remember)
        monkeypatch.setattr(AreaWrite, "commit", of_write)
        monkeypatch.setattr(MappedArea, "store", record_first)
    disk = saves_with_power_cuts(tmp_path / "job", tmp_path / "after")
    assert any("data that is not its own" in failure for failure in disk.failures)


def test_what_a_killed_process_stored_is_flushed_before_it_is_relied_on(
    opened: AreaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(opened, 1)
    opened.close()
    order: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (order.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd))[1]
    )
    flush = MappedArea.flush
    monkeypatch.setattr(MappedArea, "flush", lambda *args: (order.append("msync"), flush(*args))[1])
    with_store = AreaStore(tmp_path, chunk_bytes=CHUNK)
    save(with_store, 2)
    with_store.close()
    for name in ("slot-0000.lgs", "slot-0001.lgs"):
        assert str(tmp_path / name) in order[: order.index("msync")]


def test_a_damaged_newest_is_what_goes_next(
    opened: AreaStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(opened, 1)
    newest = save(opened, 2)
    opened.close()
    flip(newest.path, fmt.DATA_OFFSET + CHUNK + 5)
    again = AreaStore(tmp_path, chunk_bytes=CHUNK)
    again.reserve(STATE)
    again.begin(3, STATE)
    again.close()
    assert "the checkpoint before it stays instead" in caplog.text
    assert steps(SlotView(tmp_path)) == [1]


def test_what_was_restored_stays_though_the_other_one_is_newer(opened: AreaStore, tmp_path: Path) -> None:
    older = save(opened, 1)
    save(opened, 9)
    opened.close()
    again = AreaStore(tmp_path, chunk_bytes=CHUNK, restored=older)
    again.reserve(STATE)
    again.begin(2, STATE)
    assert steps(SlotView(tmp_path)) == [1]
    again.close()


@pytest.mark.parametrize("what", ["record", "table", "data", "header", "cut", "empty"])
def test_damage_to_one_area_leaves_the_other(opened: AreaStore, tmp_path: Path, what: str) -> None:
    older = save(opened, 1)
    newest = save(opened, 2)
    opened.close()
    places = {
        "record": fmt.COMMIT_OFFSET + 40,
        "table": newest.record.table_offset,
        "data": fmt.DATA_OFFSET,
        "header": 9,
    }
    if what in places:
        flip(newest.path, places[what])
    else:
        os.truncate(newest.path, fmt.DATA_OFFSET + CHUNK if what == "cut" else 0)
    again = AreaStore(tmp_path, chunk_bytes=CHUNK)
    if what == "header":
        assert steps(SlotView(tmp_path)) == [2, 1]  # the commit record says all that a reader needs
    else:
        assert load(SlotView(tmp_path), older) == content_of(1, STATE)
    for step in (3, 4, 5):
        save(again, step)
    again.close()
    assert [one.stream for one in read_directory(tmp_path)] == [content_of(step, STATE) for step in (5, 4)]


def test_a_file_that_is_cut_before_a_store_is_an_error_and_no_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 4096))
    area = MappedArea(path)
    assert area.is_whole()
    os.truncate(path, 4096)
    assert not area.is_whole()
    area.store(b"still there", 100)
    for act in (lambda: area.store(b"gone", 8192), lambda: area.redirty(0, 64 * 4096)):
        with pytest.raises(OSError, match=r"Input/output error|Bad address"):
            act()
    with pytest.raises(ValueError, match="outside"):
        area.store(b"abc", 64 * 4096 - 2)
    area.close()
    area.close()


def dirty_kib(area: MappedArea) -> int:
    """Dirty memory of the mapping, as the kernel sees it."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (block,) = [block for block in blocks if block.startswith((f"{area.address:x}-", f"{area.address:08x}-"))]
    return sum(int(number) for number in re.findall(r"(?:Shared|Private)_Dirty: +(\d+) kB", block))


def test_touching_makes_every_page_dirty_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """msync writes what the kernel knows to be dirty; a device's stores it does not know of."""
    path = tmp_path / "file"
    content = os.urandom(300 * 4096)
    path.write_bytes(content)
    area = MappedArea(path)
    area.populate(0, area.nbytes)
    area.flush(0, area.nbytes)
    if dirty_kib(area):
        pytest.skip("pages of this file system are always dirty")
    monkeypatch.setattr(MappedArea, "populate", lambda *_: None)  # would make them dirty by itself

    def redirtied(offset: int, nbytes: int, least_kib: int) -> int:
        for _ in range(20):  # the kernel may write them, and make them clean, before we look
            area.redirty(offset, nbytes)
            found = dirty_kib(area)
            if found >= least_kib:
                break
        return found

    # A file system may count several pages as one.
    assert 100 * 4 <= redirtied(5 * 4096 + 7, 100 * 4096 - 7, 100 * 4) < 300 * 4
    assert redirtied(0, area.nbytes, 300 * 4) == 300 * 4
    area.flush(0, area.nbytes)
    assert dirty_kib(area) == 0
    area.close()
    assert path.read_bytes() == content


def test_the_devices_let_go_before_the_memory_goes(opened: AreaStore) -> None:
    told: list[bool] = []
    opened.reserve(STATE)
    mapped = opened.begin(1, STATE).mapped
    mapped.closing.append(lambda: told.append(mapped.memory.closed))
    opened.reserve(50 * CHUNK)  # another file size, so another mapping
    assert told == [False]
    assert mapped.memory.closed


def test_refused_arguments_and_orders(opened: AreaStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096: 100"):
        AreaStore(tmp_path / "other", chunk_bytes=100)
    with pytest.raises(CheckpointError, match="reserve first"):
        opened.begin(1, STATE)
    opened.reserve(STATE)
    with pytest.raises(CheckpointError, match="1 checksums instead of 3"):
        opened.begin(1, STATE).commit(0, 0, bytes(32), [1])
    opened.close()
    with pytest.raises(CheckpointError, match="closed"):
        opened.begin(1, STATE)


def test_one_process_at_a_time(opened: AreaStore, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom lastgood.storage.mapped_areas import AreaStore\nfrom lastgood.errors import LockHeld\n"
        "try: AreaStore(sys.argv[1], chunk_bytes=4096)\nexcept LockHeld as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=150)
    assert f"process {os.getpid()}" in done.stdout, done.stderr
    with pytest.raises(LockHeld):
        SlotStore(tmp_path, slots=3)


def test_files_of_others_are_refused(opened: AreaStore, tmp_path: Path) -> None:
    save(opened, 1)
    opened.close()
    with SlotStore(tmp_path / "ranks", slots=3, rank=1, world_size=2):
        pass
    with pytest.raises(MismatchError, match="rank 1 of 2"):
        AreaStore(tmp_path / "ranks", chunk_bytes=CHUNK)
    with SlotStore(tmp_path / "other", slots=3):
        pass
    (tmp_path / "slot-0000.lgs").rename(tmp_path / "other" / "slot-0000.lgs")
    with pytest.raises(MismatchError, match=r"slot-0000.lgs: belongs to job"):
        AreaStore(tmp_path / "other", chunk_bytes=CHUNK)
    (tmp_path / "job.json").unlink()  # the areas know whose they are
    (tmp_path / "other" / "slot-0000.lgs").rename(tmp_path / "slot-0000.lgs")
    again = AreaStore(tmp_path, chunk_bytes=CHUNK)
    assert save(again, 2).slot == 1
    again.close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match="Not a directory"):
        AreaStore(tmp_path / "file" / "job", chunk_bytes=CHUNK)
