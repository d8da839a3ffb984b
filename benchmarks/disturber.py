"""Disturb this machine in a way that a seed fixes: a core is burnt in bursts of seconds, and the disk written to.

Ends with the process --while-pid, or after --seconds. For `benchmarks/agree.py`, which says what figures make of it.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from pathlib import Path

import psutil

from lastgood.units import MIB

_WRITE_BYTES = 32 * MIB
_BLOCK = os.urandom(MIB)


def burn(seed: int, ends: threading.Event, share: float) -> None:
    """Bursts of 2 to 4 s, and pauses after which `share` of the time was burnt."""
    drawn = random.Random(seed)
    while not ends.is_set():
        burst_s = drawn.uniform(2, 4)
        until_s = time.monotonic() + burst_s
        while time.monotonic() < until_s:
            pass
        ends.wait(burst_s * (1 - share) / share)


def write(seed: int, ends: threading.Event, folder: Path) -> None:
    """32 MiB and a flush, after pauses of 2 to 6 s."""
    drawn = random.Random(seed + 1)
    with tempfile.TemporaryFile(dir=folder) as file:
        while not ends.wait(drawn.uniform(2, 6)):
            file.seek(0)
            for _ in range(_WRITE_BYTES // len(_BLOCK)):
                file.write(_BLOCK)
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.5, help="of one core, over time (default: 0.5)")
    parser.add_argument("--directory", type=Path, default=Path("scratch"), help="folder on the disk to write to")
    parser.add_argument("--while-pid", type=int, help="end with this process")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after so long (default: an hour)")
    options = parser.parse_args()
    if not 0 < options.share <= 1:
        parser.error("--share must be above 0 and at most 1")
    options.directory.mkdir(parents=True, exist_ok=True)
    ends = threading.Event()
    threads = [
        threading.Thread(target=burn, args=(options.seed, ends, options.share)),
        threading.Thread(target=write, args=(options.seed, ends, options.directory)),
    ]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + options.seconds
    try:
        while time.monotonic() < until_s and (options.while_pid is None or psutil.pid_exists(options.while_pid)):
            time.sleep(0.5)
    finally:
        ends.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
