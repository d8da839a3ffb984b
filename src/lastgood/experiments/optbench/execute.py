"""Times a shadow's updates in processes of their own on this machine, and makes a record of it."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lastgood.cluster.hostfile import Host, Hostfile
from lastgood.errors import LastgoodError
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.optbench.bench import BenchOrder, BenchResult
from lastgood.experiments.records.optimizer import OptimizerPoint, OptimizerRecord, OptimizerSpec
from lastgood.experiments.services.place import Place
from lastgood.text import read_model

__all__ = ["execute_optimizer"]

_BENCH_S: Final = 30 * 3600.0
"""For all numbers of threads at one number of shadows, the wait for this machine's turn included."""
_MAX_BYTES: Final = 64 << 20


def execute_optimizer(
    spec: OptimizerSpec, _data_dir: Path, scratch: Path, logs: Path, report: Callable[[str], None]
) -> OptimizerRecord:
    """Time all points of `spec` and return the record. Several shadows work at the same time.

    They wait for this machine's turn to measure, at each number of shadows. `scratch` only says where the machine's
    disk is. Raises LaunchError for a process that fails, with its last lines; its log is in `logs` then.
    """
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    began = time.monotonic()
    order = BenchOrder(model=spec.model, optimizer=spec.optimizer, threads=tuple(spec.threads), steps=spec.updates)
    points: list[OptimizerPoint] = []
    parameters = 0
    for shadows in spec.shadows:
        report(f"{spec.updates} updates, {shadows} shadows with {', '.join(map(str, spec.threads))} threads")
        result = _bench(order, shadows, logs.absolute() / f"shadow-bench-{os.getpid()}", report)
        parameters = result.parameters
        points += [OptimizerPoint(threads=row.threads, shadows=shadows, update_s=row.update_s) for row in result.rows]
    return OptimizerRecord(
        spec=spec,
        started_at=started_at,
        wall_s=time.monotonic() - began,
        where=where_run(scratch),
        parameters=parameters,
        points=points,
    )


def _bench(order: BenchOrder, shadows: int, folder: Path, report: Callable[[str], None]) -> BenchResult:
    """One process for each shadow, which find each other as ranks of torchrun do; all end with this one."""
    path = folder / "result.json"
    program = [sys.executable, "-m", "lastgood.experiments.optbench.bench", order.model_dump_json(), str(path)]
    here = Place("ssh", Hostfile((Host(socket.gethostname(), shadows),)), remote=None, link_bits_per_s=None)
    here.start([*program, str(os.getpid())], {}, folder, _BENCH_S, report)
    result = read_model(BenchResult, path, "the result of a benchmark", most_bytes=_MAX_BYTES, error=LastgoodError)
    shutil.rmtree(folder)
    return result
