"""A disk that takes its time to make a slot's old checkpoint void, or never does, keeps no save waiting."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.pccheck.system import PCcheck
from lastgood.errors import CheckpointError, StorageError, WaitTimeout
from lastgood.storage import SlotStore
from lastgood.storage import format as fmt
from lastgood.storage.medium import DirectFile
from tests.checkpointers.support.small_training import SmallTraining

WAIT_S = 30


class Disk:
    """Holds, or refuses, the flush behind each record that a slot is being written."""

    def __init__(self, monkeypatch):
        self.hangs = self.refuses = False
        self.go, self.held = threading.Event(), threading.Event()
        self._voids: set[int] = set()
        write, flush = DirectFile.write_block, DirectFile.flush

        def write_block(file, content, offset):
            record = fmt.CommitRecord.decode(content) if offset == fmt.COMMIT_OFFSET else None
            if record is not None and record.kind is fmt.RecordKind.WRITING:
                self._voids.add(file.descriptor)
            write(file, content, offset)

        def held_flush(file):
            if file.descriptor in self._voids:
                self._voids.discard(file.descriptor)
                if self.refuses:
                    raise OSError(errno.EIO, "Input/output error")
                if self.hangs:
                    self.held.set()
                    assert self.go.wait(WAIT_S), "nobody let the disk go on"
            flush(file)

        monkeypatch.setattr(DirectFile, "write_block", write_block)
        monkeypatch.setattr(DirectFile, "flush", held_flush)


@pytest.fixture
def disk(monkeypatch):
    found = Disk(monkeypatch)
    yield found
    found.go.set()


@pytest.fixture
def job(tmp_path):
    training = SmallTraining()
    checkpointer = PCcheck(tmp_path, chunk_bytes=16384, max_in_flight=1)
    checkpointer.start(training.state)
    save(training, checkpointer)
    checkpointer.drain(WAIT_S)
    yield training, checkpointer
    checkpointer.close()


def save(training, checkpointer):
    training.step()
    checkpointer.save(training.step_number)


def restored(tmp_path):
    fresh = SmallTraining(seed=1)
    return PCcheck(tmp_path).restore(fresh.state), fresh.digest()


def test_a_save_returns_before_the_old_checkpoint_is_void(disk, job, tmp_path):
    training, checkpointer = job
    disk.hangs = True
    save(training, checkpointer)
    digest = training.digest()
    assert disk.held.wait(WAIT_S) and not disk.go.is_set()
    assert checkpointer.events[-1].outcome is Outcome.PENDING
    # The next update waits until the copy is made, which waits for the flush.
    threading.Timer(0.2, disk.go.set).start()
    training.step()
    checkpointer.drain(WAIT_S)
    assert checkpointer.events[-1].outcome is Outcome.DURABLE
    assert [name for name, _, _ in checkpointer.events[-1].phases] == ["wait", "void", "write", "flush", "commit"]
    assert restored(tmp_path) == (2, digest)


def test_an_update_does_not_wait_for_ever_and_that_checkpoint_never_commits(disk, job, tmp_path, monkeypatch):
    training, checkpointer = job
    digest = training.digest()
    disk.hangs = True
    monkeypatch.setattr(checkpointer, "_timeout_s", lambda: 0.3)
    save(training, checkpointer)
    training.step()
    event = checkpointer.events[-1]
    assert event.outcome is Outcome.FAILED and event.error.startswith(WaitTimeout.__name__)
    disk.hangs = False
    disk.go.set()
    monkeypatch.undo()
    checkpointer.drain(WAIT_S)
    assert event.outcome is Outcome.FAILED
    assert restored(tmp_path) == (1, digest)
    save(training, checkpointer)
    checkpointer.drain(WAIT_S)
    assert restored(tmp_path) == (4, training.digest())


def test_a_slot_that_could_not_be_made_void_is_used_again(disk, job, tmp_path):
    training, checkpointer = job
    disk.refuses = True
    for _ in range(3):
        save(training, checkpointer)
        checkpointer.drain(WAIT_S)
        assert checkpointer.events[-1].error.startswith(f"{StorageError.__name__}: {tmp_path}/slot-")
    disk.refuses = False
    for _ in range(4):
        save(training, checkpointer)
        checkpointer.drain(WAIT_S)
        assert restored(tmp_path) == (training.step_number, training.digest())


def test_a_write_that_is_given_up_while_its_slot_is_made_void_ends_with_that(disk, tmp_path):
    with SlotStore(tmp_path, slots=2, keep=1, pool_bytes=1 << 20, chunk_bytes=4096) as store:
        write = store.begin(1, 100, later=True)
        with pytest.raises(CheckpointError, match=r"before void\(\)"):
            write.acquire()
        write = store.begin(2, 100, later=True)
        disk.hangs = True
        told: list[object] = []

        def void():
            try:
                told.append(write.void())
                write.acquire()
            except CheckpointError as error:
                told.append(error)

        thread = threading.Thread(target=void)
        thread.start()
        assert disk.held.wait(WAIT_S)
        write.abort()
        assert store._busy(), "its slot is nobody else's while the disk has it"
        disk.go.set()
        thread.join(WAIT_S)
        assert "is over" in str(told[-1])
        deadline = time.monotonic() + WAIT_S
        while store._busy():
            assert time.monotonic() < deadline
        disk.hangs = False
        again = store.begin(3, 100)
        again.abort()
