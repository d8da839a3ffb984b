"""Locks name their holder and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lastgood.errors import LockHeld
from lastgood.locks import FileLock, describe_process, lock_holders
from lastgood.processes import die_with_parent

HOLDER = """
import sys, pathlib
from lastgood.locks import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]), "the test")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_told_who_holds_it(holder, tmp_path):
    with pytest.raises(LockHeld) as caught:
        FileLock(tmp_path / "lock", "the test").acquire()
    message = str(caught.value)
    assert "the test" in message
    assert f"process {holder.pid}" in message
    assert sys.executable in message


def test_waiting_says_for_whom_and_ends_when_the_holder_is_killed(holder, tmp_path):
    told = []

    def on_wait(text):
        told.append(text)
        holder.kill()

    lock = FileLock(tmp_path / "lock", "the test")
    lock.acquire(timeout_s=60, on_wait=on_wait)
    assert lock.held
    assert str(holder.pid) in told[0]
    lock.release()


OTHER_USER = """
import os, pathlib, sys
from lastgood.errors import LockHeld
from lastgood.locks import FileLock, describe_process, lock_holders
describe_process(os.getpid()), lock_holders(0)  # imports all it needs, while Python's own files can still be read
os.setgid(65534)
os.setuid(65534)
lock = FileLock(pathlib.Path(sys.argv[1]), "the test")
try:
    lock.acquire()
    print("held")
except LockHeld as error:
    print(error)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_waits_as_well():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        lock = FileLock(Path(folder) / "lock", "the test")
        command = [sys.executable, "-c", OTHER_USER, str(lock.path)]
        with lock:
            refused = subprocess.run(command, capture_output=True, text=True)
        assert f"process {os.getpid()}" in refused.stdout, refused.stderr
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "held\n"


def test_one_object_cannot_take_it_twice_and_release_is_idempotent(tmp_path):
    with FileLock(tmp_path / "lock", "the test") as lock:
        with pytest.raises(LockHeld, match="already"):
            lock.acquire()
        with pytest.raises(LockHeld, match=str(os.getpid())):
            FileLock(tmp_path / "lock", "the test").acquire()
    lock.release()
    assert not lock.held
    FileLock(tmp_path / "lock", "the test").acquire()


def test_many_threads_of_one_process_exclude_each_other(tmp_path):
    inside, most = [], []

    def work():
        lock = FileLock(tmp_path / "lock", "the test")
        lock.acquire(timeout_s=60)
        inside.append(1)
        most.append(len(inside))
        inside.pop()
        lock.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_a_holder_that_the_kernel_lists_twice_is_named_once(tmp_path, monkeypatch):
    """As it does now and then while other processes take and release locks."""
    with FileLock(tmp_path / "lock", "the test"), (tmp_path / "lock").open() as other:
        listed = Path("/proc/locks").read_text()
        monkeypatch.setattr(Path, "read_text", lambda self, encoding: 2 * listed)
        assert lock_holders(other.fileno()) == [os.getpid()]


def test_a_process_that_is_gone_is_still_named():
    assert describe_process(2**22 + 1) == f"process {2**22 + 1}"


@pytest.mark.parametrize("shared", [True, False])
def test_a_forked_child_that_outlives_its_parent(tmp_path, shared):
    """As a data loader's worker does for some seconds after its training was killed."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        die_with_parent()
        lock = FileLock(tmp_path / "lock", "a test", shared_with_forks=shared)
        lock.acquire()
        if os.fork() == 0:
            signal.alarm(300)  # it outlives its parent, but not a test that was killed
            # Told by itself: only then has it let go of what it does not share.
            os.write(write, os.getpid().to_bytes(8, "little") + bytes([lock.held]))
        time.sleep(300)  # until it is killed
        os._exit(0)
    told = os.read(read, 9)
    child = int.from_bytes(told[:8], "little")
    try:
        assert bool(told[8]) is shared
        mine = FileLock(tmp_path / "lock", "a test")
        with pytest.raises(LockHeld, match=f"process {parent}"):
            mine.acquire()
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        if shared:
            with pytest.raises(LockHeld):
                mine.acquire()
        else:
            mine.acquire()
            mine.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)
