"""The other side of the storage benchmarks: fio, with direct I/O and as many jobs, on a file of the same kind."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

from harness import cannot

from lastgood.errors import LastgoodError

_TIMEOUT_S = 600.0


def fio_version() -> str:
    """The version of the fio that is installed; ends the benchmark where there is none."""
    program = shutil.which("fio")
    if program is None:
        cannot("fio is not installed (Debian: apt-get install fio); this benchmark measures against it")
    return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def fio_bytes_per_s(
    path: Path,
    direction: Literal["write", "read"],
    *,
    jobs: int,
    offset: int,
    total_bytes: int,
    block_bytes: int,
    loops: int,
) -> float:
    """Rate of `loops` passes over `total_bytes` of an existing file, each job on its own equal part of it.

    The time is fio's own: from the first block to the last job's end, closing fsync included, starting up excluded.
    """
    part = total_bytes // jobs // block_bytes * block_bytes
    if part == 0:
        raise LastgoodError(f"{path}: {total_bytes} bytes are less than one block for each of {jobs} jobs")
    command = [
        "fio",
        "--name=job",
        f"--filename={path}",
        f"--rw={direction}",
        f"--bs={block_bytes}",
        "--direct=1",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={jobs}",
        f"--size={part}",
        f"--offset={offset}",
        f"--offset_increment={part}",
        f"--loops={loops}",
        "--allow_file_create=0",
        "--fallocate=none",
        # fio's default changes a few bytes of each buffer for each write: it is at its fastest without.
        "--scramble_buffers=0",
        "--output-format=json",
        *(["--overwrite=1", "--end_fsync=1"] if direction == "write" else ["--readonly"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    start = done.stdout.find("{")
    if done.returncode != 0 or start < 0:
        raise LastgoodError(f"fio failed with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout[start:])
    moved: int = sum(job[direction]["io_bytes"] for job in answer["jobs"])
    runtime_s: float = max(job[direction]["runtime"] for job in answer["jobs"]) / 1e3
    if moved != part * jobs * loops or runtime_s <= 0:
        raise LastgoodError(f"fio moved {moved} of {part * jobs * loops} bytes of {path} in {runtime_s} s")
    return moved / runtime_s
