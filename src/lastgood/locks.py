"""Kernel locks on files. They end with the process that holds them, however it ends, so no lock is ever stale.

The holder is found in /proc/locks, not in the file's content: another user's lock file can be locked, but not written.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from lastgood.errors import LockHeld
from lastgood.files import PUBLIC, open_new, open_regular, storage_errors

__all__ = ["FileLock", "describe_process", "finishes_beside", "lock_holders"]

_POLL_S = 0.2
_FINISH_S = 10.0
"""For what a dropped holder of a lock has in progress, in this very process."""
_LOOKS = 3
"""At a lock that nobody holds by the time its holders are read."""


class FileLock:
    """An exclusive flock on `path`, which is made if it is not there.

    `purpose` says what the lock guards and is part of every message. With `shared_with_forks`, child processes made by
    fork share the lock until the last of them ends, as a run's processes must share a machine; without, a child lets go
    of it at once, so that a data loader's workers that outlive a killed training do not hold its directory. `mode` is
    the file's: whoever can open it can hold it. With `on_directory` the lock is on `path` itself, a directory that is
    there.
    """

    def __init__(
        self,
        path: Path,
        purpose: str,
        *,
        shared_with_forks: bool = True,
        mode: int = PUBLIC,
        on_directory: bool = False,
    ) -> None:
        self.path = path
        self.purpose = purpose
        self._shared = shared_with_forks
        self._mode = mode
        self._on_directory = on_directory
        self._descriptor: int | None = None
        self._dropped: weakref.finalize[[int], FileLock] | None = None
        """Gives the lock back when this object is dropped without `release`."""

    def acquire(self, timeout_s: float = 0.0, on_wait: Callable[[str], None] | None = None) -> None:
        """Take the lock, waiting up to `timeout_s`; `on_wait` is told once, and at each change, who holds it.

        Raises LockHeld, naming the holder, when the time is up; StorageError if something else than a lock file is
        there, or none can be made.
        """
        if self._descriptor is not None:
            raise LockHeld(f"{self.path}: this process already holds the lock for {self.purpose}")
        deadline = time.monotonic() + timeout_s
        while True:
            with storage_errors(self.path, "opening the lock file"):
                descriptor = self._open()
            self._wait(descriptor, deadline, timeout_s, on_wait)
            if self._is_named(descriptor):
                break
            os.close(descriptor)  # its holder has removed it: others lock the file that has the name now
        self._descriptor = descriptor
        self._dropped = weakref.finalize(self, os.close, descriptor)
        self._dropped.atexit = False  # the kernel does it then
        if not self._shared:
            _not_shared.add(self)

    def _wait(self, descriptor: int, deadline: float, timeout_s: float, on_wait: Callable[[str], None] | None) -> None:
        """Until the open file is locked; it is closed if it cannot be."""
        told = ""
        collected, looks = False, 0
        try:
            while not _try_flock(descriptor):
                holders = lock_holders(descriptor)
                if os.getpid() in holders and not collected:
                    collected = True
                    _let_dropped_end()
                    continue
                looks += not holders
                if not holders and looks < _LOOKS:
                    continue  # given back between the two looks, or /proc/locks cannot be read
                holder = " and ".join(map(describe_process, holders)) or "another process"
                if time.monotonic() >= deadline:
                    waited = f" (waited {timeout_s:.0f} s)" if timeout_s else ""
                    raise LockHeld(f"{self.purpose} is held by {holder}{waited}; lock file {self.path}")
                if on_wait is not None and holder != told:
                    on_wait(f"waiting for {self.purpose}, held by {holder}; lock file {self.path}")
                    told = holder
                time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise

    def _is_named(self, descriptor: int) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove the file of a lock that is held: who waits for it finds that out, and makes another."""
        if self.held:
            self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back. The file stays, or all who come later would have to make it again."""
        if self._descriptor is not None:
            _not_shared.discard(self)
            if self._dropped is not None:
                self._dropped()
            self._descriptor = None

    def _open(self) -> int:
        if self._on_directory:
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Without O_CREAT first, which sticky folders refuse on another user's file.
        try:
            return open_regular(self.path)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return open_new(self.path, os.O_RDWR, self._mode)
        except FileExistsError:
            return open_regular(self.path)

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def __enter__(self) -> FileLock:
        if not self.held:
            self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_not_shared: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the child's copies: the lock itself stays with the parent, whose descriptor is still open."""
    for lock in list(_not_shared):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


_finishing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def finishes_beside(thread: threading.Thread) -> None:
    """Note a thread that ends by itself, and until then keeps alive what holds a lock (a checkpoint in progress)."""
    _finishing.add(thread)


def _let_dropped_end() -> None:
    """What was dropped in this process gives its lock back, perhaps only now."""
    deadline = time.monotonic() + _FINISH_S
    for thread in list(_finishing):
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    gc.collect()


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def lock_holders(descriptor: int) -> list[int]:
    """Process ids that hold an flock on the open file, from /proc/locks; empty if that file is not readable."""
    status = os.fstat(descriptor)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    locks = [words for words in map(str.split, lines) if len(words) >= 6 and (words[1], words[5]) == ("FLOCK", wanted)]
    # While others take and release locks, the kernel may list one twice.
    return [pid for pid in dict.fromkeys(int(words[4]) for words in locks) if pid > 0]


def describe_process(pid: int) -> str:
    """``process 123 (lastgood run ..., in /folder)``, as far as this user may know it."""
    if pid == os.getpid():
        return (
            f"this very process ({pid}), by an object that was not closed (in a notebook, the checkpointer of a cell "
            "that ran before); call its close()"
        )
    folder = Path("/proc", str(pid))
    try:
        command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return f"process {pid}"
    if len(command) > 160:
        command = command[:157] + "..."
    try:
        where = f", in {folder.joinpath('cwd').readlink()}"
    except OSError:
        where = ""
    return f"process {pid} ({command}{where})"
