"""Times a shadow's updates with `lastgood optbench`, in a process of its own, and makes a record of it."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from lastgood.errors import LastgoodError, WaitTimeout
from lastgood.experiments.machine import where_run
from lastgood.experiments.machine_lock import machine_lock
from lastgood.experiments.optimizer_record import OptimizerPoint, OptimizerRecord, OptimizerSpec

__all__ = ["execute_optimizer"]

_TURN_S: Final = 24 * 3600.0
_BENCH_S: Final = 4 * 3600.0
_COMMAND: Final = (sys.executable, "-c", "from lastgood.cli import main; main()", "optbench")


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    parameters: int
    points: list[OptimizerPoint]


def execute_optimizer(spec: OptimizerSpec, scratch: Path, report: Callable[[str], None]) -> OptimizerRecord:
    """Wait for this machine's turn, time all points of `spec`, and return the record.

    `scratch` only says where the machine's disk is. Raises LastgoodError where the benchmark fails, with its words.
    """
    lock = machine_lock()
    lock.acquire(_TURN_S, on_wait=report)
    try:
        started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        began = time.monotonic()
        report(f"{spec.updates} updates for {spec.threads} threads and {spec.shadows} shadows")
        answer = _bench(spec)
        wanted = {(threads, shadows) for threads in spec.threads for shadows in spec.shadows}
        if {(point.threads, point.shadows) for point in answer.points} != wanted:
            raise LastgoodError(f"{spec.title()}: the benchmark left points out, or made more than it was asked for")
        return OptimizerRecord(
            spec=spec,
            started_at=started_at,
            wall_s=time.monotonic() - began,
            where=where_run(scratch),
            parameters=answer.parameters,
            points=answer.points,
        )
    finally:
        lock.release()


def _bench(spec: OptimizerSpec) -> _Answer:
    command = [
        *_COMMAND,
        "--model",
        spec.model,
        "--optimizer",
        spec.optimizer,
        "--updates",
        str(spec.updates),
        "--json",
    ]
    command += ["--threads", ",".join(map(str, spec.threads)), "--shadows", ",".join(map(str, spec.shadows))]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BENCH_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WaitTimeout(f"{spec.title()}: `lastgood optbench` did not end within {_BENCH_S:.0f} s") from error
    if done.returncode:
        raise LastgoodError(f"{spec.title()}: `lastgood optbench` failed: {done.stderr.strip()[-2000:]}")
    try:
        return _Answer.model_validate_json(done.stdout)
    except ValidationError as error:
        raise LastgoodError(f"{spec.title()}: `lastgood optbench` told something else: {error}") from error
