"""One run: a parent that holds the machine's lock, and fresh processes that train and restore.

The parent imports torch once and forks; it starts no thread, computes nothing and never touches CUDA, so that each
child begins as an interpreter that has only imported. The restorer shares no memory of a model with the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lastgood.errors import ConfigError
from lastgood.experiments.machine.exclusive import ExclusiveRun, exclusive_machine
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.records.run import Proof, RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.children import call_in_child, import_before_fork
from lastgood.experiments.runs.logs import keep_logs_of_failure
from lastgood.experiments.runs.timeline import write_timeline
from lastgood.experiments.services.registry import services_of
from lastgood.experiments.services.service import run_services

__all__ = ["execute"]

Report = Callable[[str], None]


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
    with exclusive_machine(spec, scratch, report) as mine, keep_logs_of_failure(mine.folder, logs, report):
        report("importing torch")
        import_before_fork(spec.workload)
        with run_services(services_of(spec), mine.folder, report) as services:
            return _measure_and_prove(spec, data_dir, mine, services.watched(report), timeline)


def _measure_and_prove(
    spec: RunSpec, data_dir: Path, mine: ExclusiveRun, report: Report, timeline: Path | None
) -> RunRecord:
    from lastgood.experiments.runs.measure import prove_restore, train_and_measure, train_and_prove

    checkpoints = mine.folder / "checkpoints"
    apart = spec.proof and spec.device == "cuda"
    trained = spec.model_copy(update={"proof": False}) if apart else spec
    arguments = (trained, checkpoints, data_dir, timeline is not None)
    measured = call_in_child(f"the trainer of {spec.title()}", train_and_measure, arguments, report)
    live = measured.proof
    if apart:
        live = call_in_child(f"the prover of {spec.title()}", train_and_prove, (spec, checkpoints, data_dir), report)
    proof = None
    if live is not None:
        restored = call_in_child(
            f"the restorer of {spec.title()}", prove_restore, (spec, checkpoints, data_dir), report
        )
        proof = Proof(
            step=live.step,
            restored_step=restored.step,
            digest_live=live.digest,
            digest_restored=restored.digest,
            equal=(live.step, live.digest, live.next_losses) == (restored.step, restored.digest, restored.next_losses),
            restore_s=restored.restore_s,
            next_losses_live=live.next_losses,
            next_losses_restored=restored.next_losses,
        )
    if timeline is not None:
        write_timeline(timeline, spec.title(), measured.timeline)
    return RunRecord(
        spec=spec,
        started_at=mine.started_at,
        wall_s=time.monotonic() - mine.began_s,
        where=where_run(mine.folder.parent),
        proof=proof,
        pairs=measured.pairs,
        **measured.facts(),
    )
