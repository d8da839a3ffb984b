"""Refusals of the operating system: the save fails with file, operation and bytes; older checkpoints stay."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slot_helpers import CHUNK, TIMEOUT_S, commit, content_of, give, load, open_store, save, steps

from lastgood.errors import CheckpointError, StorageError, WaitTimeout
from lastgood.storage import SlotStore, files, opening, write
from lastgood.storage import format as fmt

STATE = 6 * CHUNK + 99


@pytest.fixture()
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"mount refused: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.root
def test_full_disk(small_disk: Path) -> None:
    directory = small_disk / "job"
    with open_store(directory, slots=3) as store:
        save(store, 1, STATE)
        save(store, 2, STATE)
        for operation in (lambda: store.reserve(6 << 20), lambda: store.begin(3, 6 << 20)):
            with pytest.raises(StorageError, match=rf"{directory}/slot-0002.lgs: making a slot of \d+ bytes.*No space"):
                operation()
            assert not list(directory.glob("*.lastgood-tmp"))
            assert steps(store) == [2, 1]
        store.reserve(STATE)
        save(store, 3, STATE)  # a smaller one still fits
        assert load(store, store.committed()[0]) == content_of(3, STATE)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
        save(store, 4, STATE)  # slots are written in full beforehand: a full disk does not matter to them
        with pytest.raises(StorageError, match="slot-0001"):
            store.begin(5, 2 << 20)
        assert steps(store) == [4, 3]
        filler.unlink()
        save(store, 5, 2 << 20)  # once there is room again, saving goes on
        assert steps(store)[:2] == [5, 4]


@pytest.mark.root
def test_directory_on_a_full_disk(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    with pytest.raises(StorageError, match="No space left"):
        open_store(small_disk / "job")


def test_file_size_limit(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=3) as store:
        save(store, 1, STATE)
    child = os.fork()
    if child == 0:
        code = 9
        try:
            limit = fmt.DATA_OFFSET + (2 << 20)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            with open_store(tmp_path, slots=3) as store:
                try:
                    save(store, 2, 8 << 20)
                except StorageError as error:
                    named = str(error)
                    needed = str(store.slot_file_bytes(8 << 20))
                    code = 0 if all(word in named for word in ("ulimit", "slot-000", needed)) else 1
                save(store, 3, STATE)
                if steps(store) != [3, 1] or list(tmp_path.glob("*.lastgood-tmp")):
                    code = 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert steps(SlotStore.peek(tmp_path)) == [3, 1]


def test_error_of_a_writer_thread(tmp_path: Path) -> None:
    """Where data cannot be written, copy_host or commit raises StorageError; the slot is used again later."""
    with open_store(tmp_path, slots=3) as store:
        save(store, 1, STATE)
        full = os.open("/dev/full", os.O_RDWR)

        class BrokenNative:
            def __call__(self, pool: object, descriptor: int, *rest: int) -> object:
                return native(pool, full, *rest)

        native = write._native.SlotWriter
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(write._native, "SlotWriter", BrokenNative())
            for _ in range(4):
                broken = store.begin(2, STATE, TIMEOUT_S)
                with pytest.raises(
                    StorageError, match=r"slot-000\d.lgs: write of \d+ bytes .*offset \d+ failed: No space"
                ):
                    give(broken, content_of(2, STATE))
                    commit(broken)
                with pytest.raises(CheckpointError, match="is over"):
                    commit(broken)
        os.close(full)
        assert steps(store) == [1]
        save(store, 3, STATE)
        assert steps(store) == [3, 1]
        assert store.pool.free == store.pool.count


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_failed_flush_voids_the_slot_and_is_not_retried(tmp_path: Path, failing: int) -> None:
    """The three flushes of a checkpoint: of the voided record, of the data, of the new record."""
    with open_store(tmp_path, slots=3) as store:
        store.reserve(STATE)
        save(store, 1, STATE)
        save(store, 2, STATE)
        calls = []

        def fail(descriptor: int) -> None:
            calls.append(descriptor)
            if len(calls) == failing:
                raise OSError(errno.EIO, "Input/output error")
            os.fdatasync(descriptor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "flush", fail)
            with pytest.raises(StorageError, match=r"slot-0002.lgs: .*bytes.* failed: Input/output error"):
                save(store, 3, STATE)
            assert len(calls) == failing
        assert steps(store) == [2, 1]
        for step in (4, 5, 6):
            save(store, step, STATE)
        assert steps(store) == [6, 5, 4]
        assert load(store, store.committed()[0]) == content_of(6, STATE)


def test_slot_file_that_was_removed(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=3) as store:
        save(store, 1, STATE)
        save(store, 2, STATE)
        held = store.begin(3, STATE, TIMEOUT_S)
        held.path.unlink()
        give(held, content_of(3, STATE))
        with pytest.raises(StorageError, match="was it removed or unmounted"):
            commit(held)
        save(store, 4, STATE)  # the slot is made anew
        assert steps(store) == [4, 2, 1]
        store.committed()[-1].path.unlink()
        with pytest.raises(StorageError, match="was it removed or unmounted"):
            save(store, 5, STATE)
        save(store, 6, STATE)
        assert steps(store)[:2] == [6, 4]


def test_a_write_that_the_disk_does_not_let_go_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its slot is not given to another checkpoint before its threads have ended: they might still write."""
    let_go: list[bool] = []

    class Stuck:
        def __init__(self, *arguments: object) -> None:
            self.real = native(*arguments)

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

        def join(self, timeout_s: float) -> bool:
            return bool(let_go) and self.real.join(timeout_s)

    native = write._native.SlotWriter
    store = open_store(tmp_path, slots=3)
    save(store, 1, STATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write._native, "SlotWriter", Stuck)
        stuck = store.begin(2, STATE, TIMEOUT_S)
    stuck.abort()
    assert "does not let go of the write of step 2" in caplog.text
    save(store, 3, STATE)
    assert store.try_begin(4, STATE) is None
    with pytest.raises(WaitTimeout, match=rf"{stuck.path.name} \(step 2\)"):
        store.close(timeout_s=0.01)
    let_go.append(True)
    store.close()
    with open_store(tmp_path, slots=3) as again:
        assert steps(again) == [3, 1]
        assert load(again, again.committed()[0]) == content_of(3, STATE)


def test_reading_a_file_that_was_removed(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=3) as store:
        save(store, 1, STATE)
        (info,) = store.committed()
        info.path.unlink()
        with pytest.raises(StorageError, match=str(info.path)):
            load(store, info)


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match="Not a directory"):
        open_store(tmp_path / "file" / "job")


def test_refused_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes, *, mode: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(opening, "write_atomically", refuse)
    with pytest.raises(StorageError, match=f"{tmp_path}.*use another directory"):
        open_store(tmp_path)
    monkeypatch.undo()
    with open_store(tmp_path):  # the lock was given back
        pass


def test_growth_after_a_commit_that_fails_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path, slots=3) as store:
        for step in (1, 2, 3):
            save(store, step, STATE)
        store.reserve(2 * STATE)

        def refuse(*_: object, **__: object) -> None:
            raise StorageError("no room")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "grow_slot_file", refuse)
            assert save(store, 4, STATE) == "durable"
            assert "no room" in caplog.text
            with pytest.raises(StorageError, match="no room"):
                store.begin(5, 2 * STATE, TIMEOUT_S)
            assert steps(store) == [4, 3]
        save(store, 6, 2 * STATE)
        assert steps(store)[:2] == [6, 4]
