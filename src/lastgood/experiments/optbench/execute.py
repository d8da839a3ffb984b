"""Times a shadow's updates with `lastgood shadow bench`, in processes of their own, and makes a record of it."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from pydantic import BaseModel, ConfigDict

from lastgood.errors import LastgoodError, WaitTimeout
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.records.optimizer import OptimizerPoint, OptimizerRecord, OptimizerSpec
from lastgood.ports import free_ports
from lastgood.processes import die_with_parent
from lastgood.text import parse_model

__all__ = ["execute_optimizer"]

_BENCH_S: Final = 30 * 3600.0
"""For all numbers of threads at one number of shadows, the wait for this machine's turn included."""
_BENCH: Final = (sys.executable, "-m", "lastgood", "shadow", "bench")
_POLL_S: Final = 0.1
_END_S: Final = 60.0
_MAX_BYTES: Final = 16 << 20


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    threads: int
    update_s: list[float]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    parameters: int
    shards: int
    rows: list[_Row]


def execute_optimizer(
    spec: OptimizerSpec, _data_dir: Path, scratch: Path, _logs: Path, report: Callable[[str], None]
) -> OptimizerRecord:
    """Time all points of `spec` and return the record. Several shadows work at the same time.

    `shadow bench` waits for this machine's turn to measure, at each number of shadows. `scratch` only says where the
    machine's disk is. Raises LastgoodError if the benchmark fails, with its messages, and WaitTimeout.
    """
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    began = time.monotonic()
    points: list[OptimizerPoint] = []
    parameters = 0
    for shadows in spec.shadows:
        report(f"{spec.updates} updates, {shadows} shadows with {', '.join(map(str, spec.threads))} threads")
        answer = _bench(spec, shadows)
        if answer.shards != shadows or [row.threads for row in answer.rows] != list(spec.threads):
            raise LastgoodError(f"{spec.title()}: `lastgood shadow bench` timed something else than it was asked for")
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
    """One process for each shadow, which find each other as ranks of torchrun do; all end with this one."""
    command = [*_BENCH, "--model", spec.model, "--optimizer", spec.optimizer, "--steps", str(spec.updates), "--json"]
    command += ["--threads", ",".join(map(str, spec.threads))]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0]), "GLOO_SOCKET_IFNAME": "lo"}
    parent = os.getpid()
    deadline = time.monotonic() + _BENCH_S
    with contextlib.ExitStack() as stack:
        started: list[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]] = []
        for rank in range(shadows):
            answer, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(shadows)}
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=errors,
                env={**os.environ, **meeting, **own},
                preexec_fn=lambda: die_with_parent(parent),  # this process has one thread
            )
            stack.callback(_end, process)
            started.append((process, answer, errors))
        left = list(started)
        while left:
            for one in [one for one in left if one[0].poll() is not None]:
                left.remove(one)
                if one[0].returncode:
                    raise LastgoodError(f"{spec.title()}: `lastgood shadow bench` failed: {_read(one[2])[-2000:]}")
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{spec.title()}: `lastgood shadow bench` did not end within {_BENCH_S / 3600:.0f} h")
            time.sleep(_POLL_S)
        text = _read(started[0][1])
    what = f"{spec.title()}: `lastgood shadow bench` told something else"
    return parse_model(_Answer, text, what, most_bytes=4 * _MAX_BYTES, error=LastgoodError)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_END_S)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_BYTES).decode(errors="replace").strip()
