"""The archive: which checkpoints it takes, that it never disturbs, and what is left when it is killed."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.export.archive import Archive, archived_files
from lastgood.checkpointers.export.formats import load_exported
from lastgood.errors import ConfigError, LastgoodError, LockHeld, WaitTimeout
from lastgood.state import state_digest
from tests.checkpointers.support import archive_driver
from tests.checkpointers.support.archive_driver import state_of
from tests.checkpointers.support.stored_helpers import open_store, put
from tests.support.warm import WarmProcess

WAIT_S = 60


def small(step: int) -> dict:
    return {"step": step, "x": torch.full((100,), float(step))}


def steps(directory: Path) -> list[int]:
    return [step for _, step, _ in archived_files(directory)]


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "job") as opened:
        yield opened


class Gate:
    """Lets exports of the archive's thread begin one by one."""

    def __init__(self, monkeypatch):
        self.reached = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        real = Archive._follow

        def export(archive, view, info):
            self.reached.release()
            assert self.open.acquire(timeout=WAIT_S), "the test did not go on"
            real(archive, view, info)

        monkeypatch.setattr(Archive, "_follow", export)


def test_every_mth_is_archived_over_all_lives(tmp_path):
    due = []
    for life in range(3):
        archive = Archive(tmp_path / "archive", 3)
        with open_store(tmp_path / "job") as store:
            for step in range(4 * life + 1, 4 * life + 5):
                if archive.offer(store, put(store, step, small(step))):
                    due.append(step)
                    archive.drain(WAIT_S)
            archive.close(WAIT_S)
    assert due == [3, 6, 9, 12]
    assert steps(tmp_path / "archive") == [12, 9, 6, 3]
    newest = archived_files(tmp_path / "archive")[0][2]
    assert newest.name == "step-0000000012-seq-000012.safetensors"
    assert state_digest(load_exported(newest)) == state_digest(small(12))


def test_a_checkpoint_that_failed_does_not_shift_what_follows_for_ever(tmp_path, store):
    archive = Archive(tmp_path / "archive", 2)
    taken = []
    for step in range(1, 9):
        if step == 4:
            store.begin(step, 100, WAIT_S).abort()  # this sequence is never offered
            continue
        if archive.offer(store, put(store, step, small(step))):
            taken.append(step)
    archive.close(WAIT_S)
    assert taken == [2, 5, 7]


def test_offers_may_come_out_of_order(tmp_path, store):
    archive = Archive(tmp_path / "archive", 1)
    first, second = put(store, 1, small(1)), put(store, 2, small(2))
    assert archive.offer(store, second)
    assert not archive.offer(store, first)
    archive.close(WAIT_S)


def test_one_waits_at_most_and_newer_ones_replace_it(tmp_path, store, monkeypatch, caplog):
    gate = Gate(monkeypatch)
    before = set(threading.enumerate())  # that of an earlier test may still be ending
    archive = Archive(tmp_path / "archive", 1)
    for step in range(1, 5):
        assert archive.offer(store, put(store, step, small(step)))
        if step == 1:
            assert gate.reached.acquire(timeout=WAIT_S)
    assert [thread.name for thread in set(threading.enumerate()) - before].count("lastgood-archive") == 1
    with pytest.raises(WaitTimeout, match=r"steps \[1, 4\]"):
        archive.drain(0.05)
    gate.open.release(2)
    archive.close(WAIT_S)
    # Step 1 left its slot to training while the gate was closed.
    assert (archive.counts.done, archive.counts.replaced, archive.counts.failed) == (1, 2, 1)
    assert steps(tmp_path / "archive") == [4]
    messages = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert sum("was due before" in message for message in messages) == 1, "logged once"
    assert sum("step 1 was not archived: CorruptCheckpoint" in message for message in messages) == 1


def test_the_slot_is_not_reused_while_it_is_exported(tmp_path, store, monkeypatch):
    from lastgood.checkpointers.export import formats as export

    reading, go_on = threading.Event(), threading.Event()
    real = export.read_blocks

    def read_blocks(view, info, layout, threads, window_bytes):
        for block in real(view, info, layout, threads, 1):
            reading.set()
            assert go_on.wait(WAIT_S), "the test did not go on"
            yield block

    monkeypatch.setattr(export, "read_blocks", read_blocks)
    archive = Archive(tmp_path / "archive", 1)
    state = {"x": torch.randn(20_000), "y": torch.randn(20_000)}
    info = put(store, 1, state)
    archive.offer(store, info)
    assert reading.wait(WAIT_S)
    archive.every = 1000
    for step in range(2, 9):
        archive.offer(store, put(store, step, small(step)))
    assert info in store.committed()
    go_on.set()
    archive.close(WAIT_S)
    assert archive.counts.done == 1
    assert state_digest(load_exported(archived_files(tmp_path / "archive")[0][2])) == state_digest(state)
    for step in range(9, 13):
        put(store, step, small(step))
    assert info not in store.committed(), "given back afterwards"


def test_failures_are_counted_and_logged_once_per_kind(tmp_path, store, caplog):
    archive = Archive(tmp_path / "archive", 1)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    infos = [put(store, step, {"x": torch.randn(60_000)}) for step in (1, 2)]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        for info in infos:
            archive.offer(store, info)
            archive.drain(WAIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    third = put(store, 3, {"x": torch.zeros(4, dtype=torch.complex128)})
    archive.offer(store, third)
    archive.drain(WAIT_S)
    archive.offer(store, put(store, 4, small(4)))
    archive.close(WAIT_S)
    assert (archive.counts.done, archive.counts.failed) == (1, 3)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "step 1 was not archived: StorageError" in errors[0]
    assert "step 3 was not archived: StateError" in errors[1]
    assert sorted(path.suffix for path in (tmp_path / "archive").iterdir()) == ["", ".safetensors"]


def test_an_archive_belongs_to_one_job_and_one_process(tmp_path, caplog):
    with open_store(tmp_path / "a") as store:
        archive = Archive(tmp_path / "archive", 1)
        with pytest.raises(LockHeld, match="archive"):
            Archive(tmp_path / "archive", 1)
        archive.offer(store, put(store, 1, small(1)))
        archive.close(WAIT_S)
        archive.close(WAIT_S)
        assert not archive.offer(store, put(store, 2, small(2))), "closed"
    with open_store(tmp_path / "b") as store:
        archive = Archive(tmp_path / "archive", 1)
        for step in (1, 2):
            assert not archive.offer(store, put(store, step, small(step)))
        archive.close(WAIT_S)
    assert archive.counts.failed == 2
    assert steps(tmp_path / "archive") == [1]
    assert sum("this is job" in record.message for record in caplog.records) == 1


def test_an_archive_that_cannot_be_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        Archive(tmp_path, 0)
    (tmp_path / "file").touch()
    with pytest.raises(LastgoodError, match="file"):
        Archive(tmp_path / "file", 1)


def test_what_was_left_half_made_is_removed(tmp_path, caplog):
    left = tmp_path / "step-0000000002-seq-000002.safetensors.77.tmp"
    left.write_bytes(b"half")
    Archive(tmp_path, 1).close()
    assert not left.exists()
    assert "half made" in caplog.text


def test_its_thread_is_polite_and_ends_when_there_is_nothing_to_do(tmp_path, store, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Archive,
        "_follow",
        lambda self, view, info: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
    )
    archive = Archive(tmp_path / "archive", 1)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    archive.offer(store, put(store, 1, small(1)))
    archive.drain(WAIT_S)
    assert seen == [max(before, 10)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    for thread in threading.enumerate():
        if thread.name == "lastgood-archive":
            thread.join(WAIT_S)
            assert not thread.is_alive()
    archive.close(WAIT_S)


def kill_many(tmp_path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    archive = tmp_path / "archive"
    driver = Path(archive_driver.__file__)
    offered = 0
    for _ in range(kills):
        with (tmp_path / "log").open("ab") as log:
            child = WarmProcess([driver, tmp_path / "job", archive], stderr=log)
        with child.stdout:
            timer = threading.Timer(150, child.kill)
            timer.start()
            first = child.stdout.readline()
            timer.cancel()
            assert first, "the driver ended by itself"
            timer = threading.Timer(chance.uniform(0, 0.1), os.kill, (child.pid, signal.SIGKILL))
            timer.start()
            rest = child.stdout.read()
            timer.join()
        child.wait()
        offered = max([offered, *map(int, (first + rest).rpartition("\n")[0].split())])
        for _, step, path in archived_files(archive):
            assert state_digest(load_exported(path)) == state_digest(state_of(step))
        assert max(steps(archive), default=0) >= offered - 1
    Archive(archive, 2).close()
    assert {path.suffix for path in archive.iterdir()} <= {"", ".safetensors"}


def test_a_killed_process_leaves_whole_files_only(tmp_path):
    kill_many(tmp_path, 3, seed=3)


@pytest.mark.slow
def test_many_kills_leave_whole_files_only(tmp_path):
    kill_many(tmp_path, 40, seed=40)


def test_a_training_fills_its_archive_and_keeps_its_places(tmp_path: Path) -> None:
    knobs = {"archive_every": 3, "archive_dir": str(tmp_path / "archive"), "max_in_flight": 1, "keep": 2}
    model = torch.nn.Linear(16, 16)
    digests = {}
    for life in range(2):
        checkpointer = PCcheck(tmp_path / "job", interval_steps=1, **knobs)
        assert checkpointer.attach(model=model) == 7 * life
        for _ in range(7):
            with torch.no_grad():
                model.weight += 1
            step = checkpointer.step()
            digests[step] = model.weight.clone()
            checkpointer.drain()
            checkpointer._beside.archive.drain(
                WAIT_S
            )  # one that waits keeps no slot, and training may overtake its thread
        assert len(list((tmp_path / "job").glob("slot-*"))) == 4
        checkpointer.close()
    archived = archived_files(tmp_path / "archive")
    assert [step for _, step, _ in reversed(archived)] == [3, 6, 9, 12]
    for _, step, path in archived:
        assert torch.equal(load_exported(path)["model"]["weight"], digests[step])
    with pytest.raises(ConfigError, match="go together"):
        PCcheck(tmp_path / "job", archive_every=3)
