from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_reader import job_id, read_directory
from slot_helpers import (
    CHUNK,
    TIMEOUT_S,
    address_of,
    commit,
    content_of,
    give,
    load,
    open_store,
    rewrite_record,
    save,
    steps,
)

from lastgood.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    LockHeld,
    MismatchError,
    NoCheckpoint,
    StorageError,
    WaitTimeout,
)
from lastgood.files import temporary_beside
from lastgood.storage import ChunkPool, SlotState, SlotStore, files
from lastgood.storage import format as fmt

STATE = 5 * CHUNK + 1234


@settings(max_examples=15)
@given(
    chunk=st.integers(1, 5).map(lambda blocks: blocks * fmt.BLOCK),
    buffers=st.integers(1, 6),
    sizes=st.lists(st.integers(0, 120_000), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 120_000), max_size=4),
    writers=st.integers(1, 3),
    slots=st.integers(2, 5),
)
def test_roundtrip(
    tmp_path_factory: pytest.TempPathFactory,
    chunk: int,
    buffers: int,
    sizes: list[int],
    cuts: list[int],
    writers: int,
    slots: int,
) -> None:
    directory = tmp_path_factory.mktemp("roundtrip")
    keep = slots - 1
    with open_store(
        directory, slots=slots, keep=keep, chunk_bytes=chunk, pool_bytes=buffers * chunk, writer_threads=writers
    ) as store:
        for step, size in enumerate(sizes):
            write = store.begin(step, size, TIMEOUT_S)
            memory = bytearray(content_of(step, size)) or bytearray(1)
            at = [0, *sorted(min(cut, size) for cut in cuts), size]
            address = address_of(memory)
            write.copy_host([(address + b, e - b) for b, e in itertools.pairwise(at)], TIMEOUT_S)
            assert commit(write) == "durable"
        kept = list(reversed(range(len(sizes))))[:keep]
        assert steps(store)[: len(kept)] == kept
        for info in store.committed():
            content = content_of(info.step, sizes[info.step])
            assert load(store, info) == content
            assert store.read_meta(info) == content[max(0, len(content) - 10) :]
            store.verify(info)
    for seen in read_directory(directory):
        assert seen.stream == content_of(seen.step, sizes[seen.step])
        assert seen.layout_digest == bytes(range(32))
    shutil.rmtree(directory)


def test_reading_from_the_middle(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, 1, STATE)
        (info,) = store.committed()
        content = content_of(1, STATE)
        for offset, length in ((0, 10), (CHUNK - 3, 6), (3 * CHUNK, CHUNK), (STATE - 1, 1)):
            memory = bytearray(length)
            store.read_into(info, [(address_of(memory), length)], offset=offset, timeout_s=TIMEOUT_S)
            assert memory == content[offset : offset + length]


def test_device_path(tmp_path: Path) -> None:
    import ctypes

    content = content_of(4, STATE)
    with open_store(tmp_path) as store:
        write = store.begin(4, STATE, TIMEOUT_S)
        while write.position < STATE:
            address, index, length = write.acquire(TIMEOUT_S)
            ctypes.memmove(address, content[index * CHUNK : index * CHUNK + length], length)
            write.put(index)
        assert commit(write) == "durable"
        assert load(store, store.committed()[0]) == content


def test_going_on_after_reopening(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert (store.incarnation, store.committed()) == (1, [])
        save(store, 10, STATE)
        save(store, 20, STATE)
        owner = store.job.job_id
    assert job_id(tmp_path) == owner
    with open_store(tmp_path, job_id=owner) as store:
        assert store.incarnation == 2 and steps(store) == [20, 10]
        write = store.begin(15, STATE, TIMEOUT_S)
        assert write.sequence == 3
        give(write, content_of(15, STATE))
        commit(write)
        assert steps(store) == [15, 20, 10]  # a later life may have an earlier step
        abandoned = store.begin(16, STATE, TIMEOUT_S)
        assert abandoned.sequence == 4
    with open_store(tmp_path) as store:
        # Numbers of a write that never finished are not given again either.
        assert store.begin(17, STATE, TIMEOUT_S).sequence == 5
        assert store.incarnation == 3


def test_several_in_flight_and_the_newest_wins(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=5) as store:
        writes = [store.begin(step, STATE, TIMEOUT_S) for step in range(5)]
        assert store.try_begin(5, STATE) is None
        with pytest.raises(WaitTimeout, match=r"free slot in .*5 slots, 5 being written \(step 0, step 1"):
            store.begin(5, STATE, 0.01)
        for step in (3, 1, 4, 0, 2):
            give(writes[step], content_of(step, STATE))
        assert [commit(writes[step]) for step in (1, 3, 0, 2, 4)] == [
            "durable", "durable", "superseded", "superseded", "durable",
        ]  # fmt: skip
        assert steps(store) == [4, 3, 1]
        for info in store.committed():
            assert load(store, info) == content_of(info.step, STATE)
    assert [seen.step for seen in read_directory(tmp_path)] == [4, 3, 1]


def test_begin_waits_for_a_place(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=2, keep=1) as store:
        save(store, 1, STATE)
        first = store.begin(2, STATE, TIMEOUT_S)
        done: list[str] = []
        thread = threading.Thread(target=lambda: done.append(save(store, 3, STATE)))
        thread.start()
        give(first, content_of(2, STATE))
        assert commit(first) == "durable"
        thread.join(TIMEOUT_S)
        assert done == ["durable"]
        assert steps(store)[0] == 3


def test_many_threads(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=5, writer_threads=1) as store:
        store.reserve(STATE)
        lock, next_step = threading.Lock(), iter(range(1, 31))
        durable: list[int] = []
        trouble: list[BaseException] = []

        def work() -> None:
            try:
                while True:
                    with lock:
                        step = next(next_step, None)
                        if step is None:
                            return
                        write = store.begin(step, STATE, TIMEOUT_S)
                    give(write, content_of(step, STATE))
                    if commit(write) == "durable":
                        durable.append(step)
            except BaseException as error:
                trouble.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not trouble
        assert steps(store)[0] == max(durable) == 30
        for info in store.committed()[:2]:
            assert load(store, info) == content_of(info.step, STATE)
        assert store.pool.free == store.pool.count


def test_growing_keeps_the_old_checkpoints(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=3) as store:
        store.reserve(STATE)
        sizes = dict.fromkeys((1, 2), STATE)
        save(store, 1, STATE)
        save(store, 2, STATE)
        store.reserve(3 * STATE)
        assert steps(store) == [2, 1]
        wanted = store.slot_file_bytes(3 * STATE)
        assert sorted(path.stat().st_size >= wanted for path in tmp_path.glob("slot-*")) == [False, False, True]
        for step in (3, 4):
            sizes[step] = 3 * STATE
            write = store.try_begin(step, 3 * STATE)
            assert write is not None
            assert [info.step for info in store.committed()][:2] == [step - 1, step - 2]
            give(write, content_of(step, 3 * STATE))
            commit(write)
            for info in store.committed():
                assert load(store, info) == content_of(info.step, sizes[info.step])
        assert all(path.stat().st_size >= wanted for path in tmp_path.glob("slot-*"))
    assert [seen.step for seen in read_directory(tmp_path)] == [4, 3]


def test_growing_without_reserve(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=3) as store:
        for step in range(1, 6):
            save(store, step, step * STATE)
            assert all(load(store, info) == content_of(info.step, info.step * STATE) for info in store.committed())


def test_fewer_slots_than_before(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=5) as store:
        writes = [store.begin(step, STATE, TIMEOUT_S) for step in range(5)]
        for step, write in enumerate(writes):
            give(write, content_of(step, STATE))
            commit(write)
    with open_store(tmp_path, slots=3) as store:
        assert steps(store)[:2] == [4, 3]  # in slots 4 and 3, which are too many now
        for step in (5, 6, 7):
            save(store, step, STATE)
            assert len(steps(store)) >= 2
        assert sorted(path.name for path in tmp_path.glob("slot-*")) == [fmt.slot_name(n) for n in range(3)]


def test_another_chunk_size(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, 1, STATE)
    with open_store(tmp_path, chunk_bytes=fmt.BLOCK, pool_bytes=2 * fmt.BLOCK) as store:
        save(store, 2, STATE)
        for info in store.committed():
            assert load(store, info) == content_of(info.step, STATE)


def test_pool_may_be_given_and_replaced(tmp_path: Path) -> None:
    pool = ChunkPool(0, 2 * CHUNK, CHUNK)
    with open_store(tmp_path, pool=pool) as store:
        assert store.pool is pool
        save(store, 1, STATE)
        store.pool = ChunkPool(0, 3 * CHUNK, CHUNK)
        save(store, 2, STATE)
        assert steps(store) == [2, 1]
        with pytest.raises(ConfigError, match="pool"):
            store.pool = ChunkPool(0, fmt.BLOCK, fmt.BLOCK)


def test_arguments(tmp_path: Path) -> None:
    for knobs in (
        {"keep": 0},
        {"slots": 2},
        {"chunk_bytes": 1000},
        {"writer_threads": 0},
        {"pool_bytes": 5},
        {"job_id": b"x"},
    ):
        with pytest.raises(ConfigError):
            open_store(tmp_path / "none", **knobs)
    assert not (tmp_path / "none").exists()
    with open_store(tmp_path) as store, pytest.raises(ConfigError):
        store.begin(-1, 10)


def test_abort(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=3) as store:
        save(store, 1, STATE)
        for _ in range(5):
            write = store.begin(2, STATE, TIMEOUT_S)
            give(write, content_of(2, STATE)[: CHUNK + 5])
            write.abort()
            write.abort()
            with pytest.raises(CheckpointError, match="is over"):
                commit(write)
        save(store, 3, STATE)
        assert steps(store) == [3, 1]
        assert store.pool.free == store.pool.count


def test_abort_from_another_thread(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.pool = ChunkPool(0, CHUNK, CHUNK)
        holder = store.begin(1, STATE, TIMEOUT_S)
        holder.acquire(TIMEOUT_S)
        write = store.begin(2, STATE, TIMEOUT_S)
        entered, outcome = threading.Event(), []

        def copy() -> None:
            memory = bytearray(STATE)
            entered.set()
            try:
                write.copy_host([(address_of(memory), STATE)], TIMEOUT_S)
            except CheckpointError as error:
                outcome.append(str(error))

        thread = threading.Thread(target=copy)
        thread.start()
        assert entered.wait(TIMEOUT_S)
        write.abort()
        thread.join(TIMEOUT_S)
        assert len(outcome) == 1 and "step 2" in outcome[0]
        holder.abort()
        holder.release()
        save(store, 3, STATE)


def test_waits_for_buffers_are_bounded(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.pool = ChunkPool(0, CHUNK, CHUNK)
        holder = store.begin(1, STATE, TIMEOUT_S)
        holder.acquire(TIMEOUT_S)
        with pytest.raises(WaitTimeout, match=r"step 1.*free buffer"):
            holder.acquire(0.01)
        other = store.begin(2, STATE, TIMEOUT_S)
        with pytest.raises(WaitTimeout, match=r"step 2.*free buffer"):
            other.copy_host([(address_of(bytearray(STATE)), STATE)], 0.01)
        holder.put(0)  # a wait of acquire() that ended may be tried again
        assert holder.acquire(TIMEOUT_S)[1] == 1


def test_closing_gives_up_what_is_unfinished(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, 1, STATE)
    write = store.begin(2, STATE, TIMEOUT_S)
    store.close()
    store.close()
    with pytest.raises(CheckpointError, match="is over"):
        commit(write)
    with pytest.raises(CheckpointError, match="closed"):
        store.begin(3, STATE)
    assert steps(SlotStore.peek(tmp_path)) == [1]


def test_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent / "support")!r})
from slot_helpers import open_store
from lastgood.errors import LockHeld
try:
    open_store(__import__("pathlib").Path({str(tmp_path)!r}))
except LockHeld as error:
    print(error)
"""
    with open_store(tmp_path):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True)
        assert f"process {os.getpid()}" in done.stdout and str(tmp_path) in done.stdout
        with pytest.raises(LockHeld, match=rf"held by this very process \({os.getpid()}\)"):
            open_store(tmp_path)
    with open_store(tmp_path):
        pass


def test_peek_beside_a_writer_and_on_a_copy(tmp_path: Path) -> None:
    with open_store(tmp_path / "job", slots=3) as store:
        save(store, 1, STATE)
        save(store, 2, STATE)
        write = store.begin(3, STATE, TIMEOUT_S)
        with SlotStore.peek(tmp_path / "job") as view:
            assert view.held
            assert [status.state for status in view.statuses()].count(SlotState.WRITING) == 1
            assert steps(view) == [2, 1]
            oldest = view.committed()[1]
            assert load(view, view.newest()) == content_of(2, STATE)
            shutil.copytree(tmp_path / "job", tmp_path / "copy")
            give(write, content_of(3, STATE))
            commit(write)
            store.begin(4, STATE, TIMEOUT_S)
            with pytest.raises(
                CorruptCheckpoint, match=r"step 1 was overwritten; the slot now holds step 4 \(writing\)"
            ):
                view.verify(oldest)
    copy = SlotStore.peek(tmp_path / "copy")
    assert not copy.held
    assert [status.state for status in copy.statuses()].count(SlotState.TORN) == 1
    assert load(copy, copy.newest()) == content_of(2, STATE)
    with open_store(tmp_path / "copy", slots=3) as store:
        save(store, 5, STATE)
        assert steps(store) == [5, 2, 1][: len(steps(store))]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        SlotStore.peek(tmp_path / "missing").committed()
    with pytest.raises(NoCheckpoint, match="no slot files"):
        SlotStore.peek(tmp_path).newest()
    with open_store(tmp_path, slots=3) as store:
        store.reserve(STATE)
        with pytest.raises(NoCheckpoint, match="3 void"):
            store.newest()


def test_job_and_version_mismatches_name_both_sides(tmp_path: Path) -> None:
    mine, other = bytes(16), b"\x01" * 16
    for name, owner in (("mine", mine), ("other", other)):
        with open_store(tmp_path / name, job_id=owner) as store:
            save(store, 1, STATE)
    with pytest.raises(MismatchError, match=f"{mine.hex()}.*{other.hex()}"):
        open_store(tmp_path / "mine", job_id=other)
    shutil.copy(tmp_path / "other" / fmt.slot_name(0), tmp_path / "mine" / fmt.slot_name(1))
    for opening in (lambda: open_store(tmp_path / "mine"), lambda: SlotStore.peek(tmp_path / "mine").committed()):
        with pytest.raises(MismatchError, match=f"slot-0001.*{other.hex()}.*{mine.hex()}"):
            opening()
    states = [status.state for status in SlotStore.peek(tmp_path / "mine").statuses()]
    assert states == [SlotState.WHOLE, SlotState.FOREIGN]
    (tmp_path / "mine" / fmt.slot_name(1)).unlink()
    with open_store(tmp_path / "mine") as store:
        assert steps(store) == [1]
    for offset in (fmt.HEADER_OFFSET, fmt.COMMIT_OFFSET):
        shutil.copytree(tmp_path / "mine", tmp_path / f"version{offset}")
        rewrite_record(tmp_path / f"version{offset}" / fmt.slot_name(0), offset, 8, (9).to_bytes(4, "little"))
        with pytest.raises(MismatchError, match="version 9, and this program knows version 1"):
            open_store(tmp_path / f"version{offset}")
    described = (tmp_path / "mine" / fmt.JOB_FILE).read_text()
    assert '"version": 1' in described


def test_temporary_files_of_a_killed_process_go(tmp_path: Path) -> None:
    (tmp_path / "slot-0002.lgs.tmp").write_bytes(b"half")
    (tmp_path / "job.json.tmp").write_bytes(b"half")
    temporary_beside(tmp_path / "slot-0000.lgs").write_bytes(b"half")
    others = [tmp_path / name for name in ("notes.tmp", "slot-0002.lgs.tmp.old", ".x.lastgood-tmp", "x.lastgood-tmp")]
    for path in others:
        path.write_bytes(b"a user's own")
    with open_store(tmp_path) as store:
        left = {path.name for path in tmp_path.iterdir()} - {fmt.JOB_FILE, fmt.LOCK_FILE}
        assert left == {path.name for path in others}
        save(store, 1, STATE)


def test_file_systems_without_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(files.os, "open", refuse)
    with open_store(tmp_path) as store:
        assert store.direct_io is False
        assert len([record for record in caplog.records if "no direct I/O" in record.message]) == 1
        save(store, 1, STATE)
        save(store, 2, STATE)
        assert load(store, store.committed()[0]) == content_of(2, STATE)
    monkeypatch.undo()
    assert [seen.stream == content_of(seen.step, STATE) for seen in read_directory(tmp_path)] == [True, True]
