"""One run: a parent that holds the machine's lock, and fresh processes that train and restore.

The parent imports torch once and forks; it starts no thread, computes nothing and never touches CUDA, so that each
child begins as an interpreter that has only imported. The restorer shares no memory of a model with the trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lastgood.errors import ConfigError, LastgoodError, WaitTimeout
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.machine.turn import Turn, take_turn
from lastgood.experiments.records.run import Proof, RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.logs import keep_logs_of_failure
from lastgood.experiments.runs.timeline import write_timeline
from lastgood.experiments.services.shadows import local_shadows
from lastgood.processes import die_with_parent
from lastgood.workloads.registry import workload_module

__all__ = ["SILENCE_S", "execute", "hear_child", "import_before_fork", "start_child"]

Report = Callable[[str], None]

SILENCE_S = 900.0
"""A child that says nothing for this long is ended."""
_END_S = 60.0


def execute(
    spec: RunSpec, data_dir: Path, scratch: Path, logs: Path, report: Report, timeline: Path | None = None
) -> RunRecord:
    """Measure `spec` and return its record.

    Checkpoints live in a folder of their own below `scratch`, which is removed at the end. `report` is told each stage.
    A trace of the measured steps is written to `timeline`, if it is given. Raises LastgoodError, naming what failed;
    nothing is left behind then but logs of the system's own processes (peers, shadows), in `logs`.
    """
    if timeline is not None and timeline.is_dir():
        raise ConfigError(f"timeline {timeline} is a folder; name a file, for instance {timeline / 'trace.json'}")
    with take_turn(spec, scratch, report) as turn, keep_logs_of_failure(turn.folder, logs, report):
        return _execute(spec, data_dir, turn, report, timeline)


def _execute(
    spec: RunSpec,
    data_dir: Path,
    turn: Turn,
    report: Report,
    timeline: Path | None,
) -> RunRecord:
    report("importing torch")
    import_before_fork(spec)
    with local_shadows(spec, turn.folder, report) if spec.shadows else contextlib.nullcontext():
        return _measure_and_prove(spec, data_dir, turn, report, timeline)


def _measure_and_prove(spec: RunSpec, data_dir: Path, turn: Turn, report: Report, timeline: Path | None) -> RunRecord:
    from lastgood.experiments.runs.measure import prove_restore, train_and_measure

    checkpoints = turn.folder / "checkpoints"
    arguments = (spec, checkpoints, data_dir, timeline is not None)
    measured = _in_child(f"the trainer of {spec.title()}", train_and_measure, arguments, report)
    proof = None
    if measured.proof is not None:
        restored = _in_child(f"the restorer of {spec.title()}", prove_restore, (spec, checkpoints, data_dir), report)
        proof = Proof(
            step=measured.proof.step,
            restored_step=restored.step,
            digest_live=measured.proof.digest,
            digest_restored=restored.digest,
            equal=(measured.proof.step, measured.proof.digest, measured.proof.next_losses)
            == (restored.step, restored.digest, restored.next_losses),
            restore_s=restored.restore_s,
            next_losses_live=measured.proof.next_losses,
            next_losses_restored=restored.next_losses,
        )
    if timeline is not None:
        write_timeline(timeline, spec.title(), measured.timeline)
    return RunRecord(
        spec=spec,
        started_at=turn.started_at,
        wall_s=time.monotonic() - turn.began_s,
        where=where_run(turn.folder.parent),
        workload=measured.workload,
        clocks=measured.clocks,
        resources=measured.resources,
        counts=measured.counts,
        storage=measured.storage,
        proof=proof,
        notes=measured.notes,
        shadows=measured.shadows,
    )


def import_before_fork(spec: RunSpec) -> None:
    """Import what both children need. numpy's OpenBLAS would start threads at import; a fork must not lose them."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    importlib.import_module("torch")
    importlib.import_module("torch._dynamo")  # every optimizer imports it when it is made, a second for each child
    importlib.import_module(workload_module(spec.workload))
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise LastgoodError(f"cannot fork: threads are running already ({names}); start runs through `lastgood run`")


# -- children ----------------------------------------------------------------------------------------------------------


def _in_child(name: str, function: Callable[..., Any], arguments: tuple[Any, ...], report: Report) -> Any:
    """Call `function(*arguments, report)` in a forked child and return its result.

    Raises LastgoodError with the child's own message if it fails, its exit code if it dies, or WaitTimeout if it falls
    silent.
    """
    process, ours = start_child(name, function, arguments)
    try:
        return _listen(name, ours, process, report)
    finally:
        if process.is_alive():
            process.kill()
        process.join(_END_S)
        ours.close()


def start_child(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Connection]:
    """Fork a child that calls `function(*arguments, report)`; returns the process and what it says.

    It says ``("stage", text)`` for each report, and then ``("result", value)`` or ``("error", text)``.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, os.getpid(), function, arguments), name=name)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    theirs.close()
    return process, ours


def hear_child(name: str, process: Any, pipe: Connection, stage: str) -> tuple[str, Any]:
    """The next thing that a child of `start_child` says. Raises LastgoodError with its exit code if it died."""
    try:
        kind, content = pipe.recv()
    except (EOFError, OSError):  # OSError: in the midst of a word
        process.join(_END_S)
        raise LastgoodError(f"{name} died while {stage}, exit code {process.exitcode}") from None
    return kind, content


def _listen(name: str, pipe: Connection, process: Any, report: Report) -> Any:
    stage = "starting"
    while True:
        if not pipe.poll(SILENCE_S):
            raise WaitTimeout(f"{name} said nothing for {SILENCE_S:.0f} s while {stage}; ended it")
        kind, content = hear_child(name, process, pipe, stage)
        if kind == "stage":
            stage = content
            report(content)
        elif kind == "error":
            raise LastgoodError(f"{name} failed while {stage}: {content}")
        else:
            return content


def _child(pipe: Connection, parent: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    try:
        result = function(*arguments, lambda stage: pipe.send(("stage", stage)))
        pipe.send(("result", result))
        # No tidy end: nothing that was promised to be durable may depend on one.
        os.kill(os.getpid(), signal.SIGKILL)
    except LastgoodError as error:
        pipe.send(("error", str(error)))
    except BaseException as error:  # whatever it is, the parent must hear of it, and the log must show where
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


# -- scratch -----------------------------------------------------------------------------------------------------------
