"""What fio says of the same disk: a second witness for the ceilings, if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any, Literal

from lastgood.errors import LastgoodError
from lastgood.text import parse_json

__all__ = ["fio_bytes_per_s"]

_TIMEOUT_S = 60.0
_MOST_ANSWER_BYTES = 4 << 20


def fio_bytes_per_s(
    descriptor: int, direction: Literal["write", "read"], *, jobs: int, block_bytes: int, nbytes: int, direct: bool
) -> float | None:
    """Bytes per second of one pass of fio over `nbytes` of an open file, the closing flush of writes included.

    Each job has an equal part. None if fio is not installed or fails: it is a check, and nothing rests on it.
    """
    program = shutil.which("fio")
    part = nbytes // jobs // block_bytes * block_bytes
    if program is None or part == 0:
        return None
    command = [
        program,
        "--name=job",
        # The file has no name any more; fio inherits what is open.
        f"--filename=/proc/self/fd/{descriptor}",
        f"--rw={direction}",
        f"--bs={block_bytes}",
        f"--direct={int(direct)}",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={jobs}",
        f"--size={part}",
        f"--offset_increment={part}",
        "--allow_file_create=0",
        "--fallocate=none",
        "--refill_buffers",
        "--output-format=json",
        *(["--overwrite=1", "--end_fsync=1"] if direction == "write" else ["--readonly"]),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, pass_fds=(descriptor,)
        )
        # Warnings may stand before the document.
        document = done.stdout[max(0, done.stdout.find("{")) :]
        answer = parse_json(document, "fio's answer", most_bytes=_MOST_ANSWER_BYTES, error=LastgoodError)
        return _rate(answer, direction) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, LastgoodError, LookupError, TypeError, AttributeError):
        return None


def _rate(answer: Any, direction: str) -> float | None:
    """Its own time: from the first block to the last job's end, starting up excluded."""
    moved = sum(float(job[direction]["io_bytes"]) for job in answer["jobs"])
    runtime_s = max(float(job[direction]["runtime"]) for job in answer["jobs"]) / 1e3
    return moved / runtime_s if moved > 0 and runtime_s > 0 else None
