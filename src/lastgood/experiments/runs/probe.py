"""A short look at this machine, by which plans predict how long runs take that nobody has measured here yet."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.disk import DiskBursts
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.plan.grid import Grid
from lastgood.experiments.records.base import Spec
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.children import call_in_child, import_before_fork
from lastgood.files import write_result
from lastgood.models import FrozenModel
from lastgood.text import parse_model, read_bytes
from lastgood.units import MIB
from lastgood.workloads.registry import workload_data_kind

__all__ = ["Probe", "load_probe", "probe_machine", "with_probe"]

Report = Callable[[str], None]

_BUDGET_S = 12.0
"""No further workload is looked at after it; with what one takes, and the imports, it stays below 20 s."""
_STEPS = 3
_BURSTS = 5


class Probe(FrozenModel):
    """What was found, by workload: its options, and seconds of building it and of a step."""

    options: dict[str, dict[str, Any]]
    build_s: dict[str, float]
    step_s: dict[str, float]
    persist_bytes_per_s: float

    def is_of(self, specs: Iterable[Spec]) -> bool:
        """Whether it was made for the workloads of these runs, as they are configured."""
        return all(self.options.get(spec.workload) in (None, spec.workload_options) for spec in _workloads(specs))


@dataclass(frozen=True)
class _Found:
    build_s: float
    step_s: float


def load_probe(path: Path, specs: Iterable[Spec]) -> Probe | None:
    """The probe that was kept in a file. None if there is none that can be read, or if it is of other workloads."""
    try:
        found = parse_model(Probe, read_bytes(path, MIB), str(path), most_bytes=MIB)
    except (LastgoodError, OSError):
        return None
    return found if found.is_of(specs) else None


def probe_machine(specs: Iterable[Spec], data_dir: Path, scratch: Path, path: Path, report: Report) -> Probe | None:
    """Build each workload of `specs` once and take a few steps, write to the disk, and keep the result in `path`.

    Takes 20 s at most. None if the machine is measuring now, or if nothing of the kind is planned. Raises
    LastgoodError if a workload cannot be built.
    """
    from lastgood.workloads.data.prepare import prepare_dataset

    chosen = _workloads(specs)
    lock = machine_lock()
    try:
        lock.acquire()
    except LastgoodError as error:
        report(f"no probe of this machine: {error}")
        return None
    with lock:
        began_s = time.monotonic()
        found: dict[str, _Found] = {}
        for spec in chosen:
            if time.monotonic() - began_s > _BUDGET_S:
                break
            report(f"probing this machine: {spec.workload}")
            kind = workload_data_kind(spec.workload)
            if spec.data is None and kind is not None:
                prepare_dataset(kind, data_dir)
            import_before_fork(spec.workload)
            found[spec.workload] = call_in_child(f"the probe of {spec.workload}", _look, (spec, data_dir), report)
        if not found:
            return None
        report("probing this machine: the disk")
        scratch.mkdir(parents=True, exist_ok=True)
        with DiskBursts(scratch) as disk:
            persist = statistics.median(disk.burst() for _ in range(_BURSTS))
    probe = Probe(
        options={spec.workload: spec.workload_options for spec in chosen if spec.workload in found},
        build_s={name: one.build_s for name, one in found.items()},
        step_s={name: one.step_s for name, one in found.items()},
        persist_bytes_per_s=persist,
    )
    write_result(path, (json.dumps(probe.model_dump(mode="json"), indent=1) + "\n").encode())
    return probe


def with_probe(grid: Grid, probe: Probe, scale: str) -> Grid:
    """`grid`, whose prediction of `scale` is this machine's.

    What the probe had no time for is scaled as what it looked at.
    """
    known = grid.prediction[scale]  # type: ignore[index]
    ratios = [step_s / known.step_s.get(name, known.other_step_s) for name, step_s in probe.step_s.items()]
    ratio = statistics.median(ratios)
    build_s = statistics.median(probe.build_s.values())
    changed = known.model_copy(
        update={
            "startup_s": _BESIDE_BUILDING_S + build_s,
            "proof_s": build_s,
            "persist_bytes_per_s": probe.persist_bytes_per_s,
            "copy_bytes_per_s": known.copy_bytes_per_s / ratio,
            "step_s": {**{name: ratio * step_s for name, step_s in known.step_s.items()}, **probe.step_s},
            "other_step_s": ratio * known.other_step_s,
        }
    )
    return grid.model_copy(update={"prediction": {**grid.prediction, scale: changed}})


_BESIDE_BUILDING_S = 2.0
"""Of a run in a workflow: its command's start, its folder, its record."""


def _workloads(specs: Iterable[Spec]) -> list[RunSpec]:
    """A run of each workload that trains a model on data, in one process."""
    found: dict[str, RunSpec] = {}
    for spec in specs:
        if isinstance(spec, RunSpec) and not spec.over_ranks and workload_data_kind(spec.workload) is not None:
            found.setdefault(spec.workload, spec)
    return list(found.values())


def _look(spec: RunSpec, data_dir: Path, report: Report) -> _Found:
    from lastgood.checkpointers.registry import checkpointer_class
    from lastgood.experiments.runs.measure import build_planned
    from lastgood.training.loop import TrainingLoop, configure_compute

    del report
    configure_compute(spec.threads, deterministic=False)
    began_s = time.monotonic()
    workload = build_planned(spec, data_dir)
    build_s = time.monotonic() - began_s
    kind = checkpointer_class("none")
    loop = TrainingLoop(workload, kind(data_dir, kind.Options()), 0, spec.device)
    loop.start()
    loop.train(2)
    return _Found(build_s, statistics.median(loop.train(_STEPS).clock.step_s()))
