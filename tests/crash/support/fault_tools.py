"""For programs that run on the faulty disk: arming faults, and mounts that end with the process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

SHORT = -1
HANG = -2
FOR_EVER = 1 << 40
ANY = -1

_disk = ctypes.CDLL(None)  # the preloaded library is a part of the process itself


class CannotRun(Exception):
    """The machine lacks something that a scenario needs."""


@contextlib.contextmanager
def fault(
    call: str,
    name: str,
    effect: int,
    *,
    skip: int = 0,
    times: int = 1,
    release: Path | str = "",
    hits: int | None = None,
) -> Iterator[Callable[[], int]]:
    """While inside, calls of this kind on files with `name` in their path fail: the `times` after the first `skip`.

    It must have struck `hits` times at the end, at least once where None. Gives a function that counts.
    """
    _arm(call.encode(), name.encode(), skip, times, effect, os.fsencode(release))
    try:
        yield _hits
        struck = _hits()
    finally:
        _arm(b"", b"", 0, 0, 0, b"")
    if hits != ANY:
        assert struck == hits if hits is not None else struck > 0, f"{call} on {name}: the fault struck {struck} times"


def _hits() -> int:
    return int(_disk.fault_hits())


def _arm(call: bytes, name: bytes, skip: int, times: int, effect: int, release: bytes) -> None:
    _disk.fault_arm(call, name, ctypes.c_long(skip), ctypes.c_long(times), ctypes.c_int(effect), release)


def own_mounts() -> None:
    """From now on mounts of this process are seen by nobody else and end with it."""
    if os.geteuid() != 0:
        raise CannotRun("mounting needs root")
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace = 0x00020000
    if libc.unshare(new_namespace) != 0:
        raise CannotRun(f"unshare: {os.strerror(ctypes.get_errno())}")
    mount("--make-rprivate", "/")


def mount(*arguments: str) -> None:
    # The helper program must not meet the faults.
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, env=clean, timeout=30)
    if done.returncode != 0:
        raise CannotRun(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def small_disk(where: Path, mib: int) -> None:
    where.mkdir(parents=True)
    own_mounts()
    mount("-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(where))


def fill(disk: Path) -> Path:
    """Take all room that is left; returns the file to remove."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(65536))
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0
    return filler


def run_scenarios(known: dict[str, Callable[[Path], None]]) -> None:
    """Run those named in the arguments after the directory; tell of each, between marks that the test looks for.

    What is there to be named is told first.
    """
    place, *names = sys.argv[1:]
    sys.stdout.write("\x01known\x02" + "\n".join(known))
    sys.stdout.flush()
    for name in names:
        directory = Path(place, name.replace("[", "-").replace("]", ""))
        directory.mkdir()
        try:
            known[name](directory)
            told = "passed"
        except CannotRun as reason:
            told = f"skipped\n{reason}"
        except BaseException:
            told = "failed\n" + traceback.format_exc()
        sys.stdout.write(f"\x01{name}\x02{told}")
        sys.stdout.flush()


EIO, ENOSPC = errno.EIO, errno.ENOSPC
