"""What a machine and its disk must do for checkpoints to hold there, as tests. docs/conformance.md lists them.

Whoever collects this class gives the fixture `place`, a fresh folder on the disk that will hold the checkpoints.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lastgood.checkpointers.pccheck.system import PCcheck
from lastgood.conformance.fixtures import not_flushed
from lastgood.conformance.training import SmallTraining
from lastgood.errors import LockHeld
from lastgood.files import sync_directory, write_atomically
from lastgood.locks import FileLock
from lastgood.mounts import lies_in_memory, mount_of

__all__ = ["TestMachine"]

_WAIT_S = 60
_HOLDER = """
import sys
from pathlib import Path
from lastgood.locks import FileLock
lock = FileLock(Path(sys.argv[1]), "a test")  # given back if nobody holds this object
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


class TestMachine:
    """A folder that keeps what it is given, locks that end with their process, and a clock that all processes share."""

    def test_it_is_a_disk(self, place: Path) -> None:
        """A folder in memory holds nothing after a power cut, and is measured at the memory's speed."""
        assert not lies_in_memory(place), f"{place} lies in memory: {mount_of(place)}"

    def test_a_flush_leaves_nothing_in_memory(self, place: Path) -> None:
        """After fdatasync no page of a file waits."""
        path = place / "flushed"
        with path.open("wb") as file:
            file.write(os.urandom(4 << 20))
            file.flush()
            os.fdatasync(file.fileno())
        try:
            waiting = not_flushed(path)
        except OSError as error:
            pytest.skip(f"the kernel does not tell what is flushed: {error}")
        assert waiting == 0, "bytes that a power cut would take, though they were flushed"

    def test_a_name_is_replaced_at_once(self, place: Path) -> None:
        """By rename, and the directory can be flushed; nothing else is left there."""
        for content in (b"first", b"second"):
            write_atomically(place / "file", content)
            sync_directory(place)
            assert (place / "file").read_bytes() == content
        assert [path.name for path in place.iterdir()] == ["file"]

    def test_a_file_can_be_refused_and_nothing_else_is_lost(self, place: Path) -> None:
        """A write beyond a limit is an error, and not a file that looks complete."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        descriptor = os.open(place / "refused", os.O_WRONLY | os.O_CREAT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            assert os.write(descriptor, bytes(8192)) == 4096, "the kernel wrote more than it may"
            with pytest.raises(OSError, match="File too large"):
                os.write(descriptor, bytes(4096))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
            os.close(descriptor)

    def test_a_lock_excludes_and_ends_with_its_process(self, place: Path) -> None:
        """Network file systems without locks let two trainings write to one directory."""
        path = place / "lock"
        words = [sys.executable, "-c", _HOLDER, str(path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            try:
                assert holder.stdout is not None and holder.stdout.readline() == "held\n"
                with pytest.raises(LockHeld):
                    FileLock(path, "a test").acquire()
            finally:
                holder.kill()
                holder.wait(_WAIT_S)
        again = FileLock(path, "a test")
        again.acquire(timeout_s=5)
        again.release()

    def test_processes_share_one_clock(self) -> None:
        """Times that one process wrote are compared by another."""
        before = time.monotonic_ns()
        words = [sys.executable, "-c", "import time; print(time.monotonic_ns())"]
        told = int(subprocess.run(words, capture_output=True, text=True, check=True, timeout=_WAIT_S).stdout)
        assert before < told < time.monotonic_ns()

    def test_a_checkpoint_comes_back(self, place: Path) -> None:
        """Through the slots, with direct I/O if the disk has it."""
        training = SmallTraining()
        checkpointer = PCcheck(place / "job")
        checkpointer.start(training.state)
        digests = []
        for step in (1, 2):
            training.step()
            digests.append(training.digest())
            checkpointer.save(step)
            checkpointer.drain()
        checkpointer.close()
        fresh = SmallTraining(seed=1)
        assert PCcheck(place / "job").restore(fresh.state) == 2
        assert fresh.digest() == digests[1]
