"""Times a shadow's updates with `lastgood optbench`, in processes of their own, and makes a record of it."""

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
from lastgood.experiments.optimizer_record import OptimizerPoint, OptimizerRecord, OptimizerSpec

__all__ = ["execute_optimizer"]

_BENCH_S: Final = 30 * 3600.0
"""For all numbers of threads at one number of shadows, the wait for this machine's turn included."""
_BENCH: Final = (sys.executable, "-c", "from lastgood.cli import main; main()", "optbench")
_TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    threads: int
    update_s: list[float]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    parameters: int
    shards: int
    rows: list[_Row]


def execute_optimizer(spec: OptimizerSpec, scratch: Path, report: Callable[[str], None]) -> OptimizerRecord:
    """Time all points of `spec` and return the record. Several shadows work at the same time, as ranks of torchrun.

    `optbench` waits for this machine's turn to measure, at each number of shadows. `scratch` only says where the
    machine's disk is. Raises LastgoodError where the benchmark fails, with its words, and WaitTimeout.
    """
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    began = time.monotonic()
    points: list[OptimizerPoint] = []
    parameters = 0
    for shadows in spec.shadows:
        report(f"{spec.updates} updates, {shadows} shadows with {', '.join(map(str, spec.threads))} threads")
        answer = _bench(spec, shadows)
        if answer.shards != shadows or [row.threads for row in answer.rows] != list(spec.threads):
            raise LastgoodError(f"{spec.title()}: `lastgood optbench` timed something else than it was asked for")
        parameters = answer.parameters
        points += [OptimizerPoint(threads=row.threads, shadows=shadows, update_s=row.update_s) for row in answer.rows]
    return OptimizerRecord(
        spec=spec,
        started_at=started_at,
        wall_s=time.monotonic() - began,
        where=where_run(scratch),
        parameters=parameters,
        points=points,
    )


def _bench(spec: OptimizerSpec, shadows: int) -> _Answer:
    command = [*_BENCH, "--model", spec.model, "--optimizer", spec.optimizer, "--steps", str(spec.updates), "--json"]
    command += ["--threads", ",".join(map(str, spec.threads))]
    if shadows > 1:
        command = [*_TORCHRUN, "--nproc-per-node", str(shadows), *command]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BENCH_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WaitTimeout(f"{spec.title()}: `lastgood optbench` did not end within {_BENCH_S / 3600:.0f} h") from error
    if done.returncode:
        raise LastgoodError(f"{spec.title()}: `lastgood optbench` failed: {done.stderr.strip()[-2000:]}")
    try:
        return _Answer.model_validate_json(done.stdout)
    except ValidationError as error:
        raise LastgoodError(f"{spec.title()}: `lastgood optbench` told something else: {error}") from error
