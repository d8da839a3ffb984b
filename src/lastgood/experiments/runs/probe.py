"""A short look at this machine, by which plans predict how long runs take that nobody has measured here yet."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from pydantic import Field

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.disk import disk_bursts
from lastgood.experiments.config.schema import Config
from lastgood.experiments.machine.disturbance import disturbance_between, look
from lastgood.experiments.machine.facts import machine_label, usable_cores
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.plan.grid import Grid
from lastgood.experiments.records.base import Scale, Spec
from lastgood.experiments.records.spec import RunSpec
from lastgood.files import write_result
from lastgood.models import FrozenModel
from lastgood.processes import die_with_parent
from lastgood.text import parse_json, parse_model, read_bytes
from lastgood.units import MIB
from lastgood.workloads.registry import workload_data_kind, workload_module

__all__ = [
    "Probe",
    "can_be_probed",
    "kept_probe",
    "load_probe",
    "probe_file",
    "probe_machine",
    "with_probe",
    "with_probe_of_kind",
]

Report = Callable[[str], None]

_BUDGET_S = 12.0
"""No further workload is looked at after it; with what one takes, and the imports, it stays below 20 s."""
_MOST_S = 120.0
"""On a busy machine."""
_MOST_SHARE = 0.25
"""Of all cores' time, that others may have had while a machine was looked at whose probe is kept."""
_STEPS = 3
_BURSTS = 5


_Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""Of building a workload, and of a step."""


class Probe(FrozenModel):
    """What was found, by workload: its options, and seconds of building it and of a step."""

    machine: str
    """The label of the machine that was looked at."""
    scratch: str
    """The folder whose disk was written to."""
    device: str
    threads: int
    options: dict[str, dict[str, Any]]
    build_s: dict[str, _Seconds] = Field(min_length=1)
    step_s: dict[str, _Seconds] = Field(min_length=1)
    persist_bytes_per_s: float = Field(ge=1, le=1e15)
    disturbed: bool
    """Whether others had much of the machine meanwhile: then it says little of other times."""

    def is_of(self, specs: Iterable[Spec], scratch: Path) -> bool:
        """Whether it was made here, for the workloads of these runs as they are configured."""
        here = (machine_label(), str(scratch.absolute()))
        return (self.machine, self.scratch) == here and all(
            (self.device, self.threads) == (spec.device, spec.threads)
            and self.options.get(spec.workload) in (None, spec.workload_options)
            for spec in _workloads(specs)
        )


def probe_file(config: Config) -> Path:
    """Where a look at this machine is kept, beside its records."""
    return Path(config.results_dir, machine_label(), config.scale, "probe.json")


def kept_probe(config: Config, specs: Iterable[Spec]) -> Probe | None:
    """What `load_probe` finds there; None as well if the runs are called another machine's."""
    return None if config.machine is not None else load_probe(probe_file(config), specs, config.scratch_folder)


def load_probe(path: Path, specs: Iterable[Spec], scratch: Path) -> Probe | None:
    """The probe that was kept in a file.

    None if there is none that can be read, or if it is of another machine or disk, or of other workloads.
    """
    if not path.is_file():
        return None  # nor is a pipe waited for
    try:
        found = parse_model(Probe, read_bytes(path, MIB), str(path), most_bytes=MIB)
    except (LastgoodError, OSError):
        return None
    return found if found.is_of(specs, scratch) else None


def probe_machine(specs: Iterable[Spec], data_dir: Path, scratch: Path, path: Path, report: Report) -> Probe | None:
    """Build each workload of `specs` once and take a few steps, write to the disk, and keep the result in `path`.

    Takes 20 s at most on a quiet machine, in a process of its own: whoever asks may have threads already. What others
    disturbed is not kept. None if the machine is measuring now, or if nothing of the kind is planned. Raises
    LastgoodError if a workload cannot be built.
    """
    chosen = _workloads(specs)
    if not chosen:
        return None
    lock = machine_lock()
    try:
        lock.acquire()
    except LastgoodError as error:
        report(f"no probe of this machine: {error}")
        return None
    report(f"probing this machine with {', '.join(spec.workload for spec in chosen)}, and its disk")
    asked = json.dumps([[spec.canonical_json() for spec in chosen], str(data_dir), str(scratch)])
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    with lock:
        try:
            done = subprocess.run(command, input=asked.encode(), capture_output=True, timeout=_MOST_S, check=False)
        except subprocess.TimeoutExpired:
            raise LastgoodError(f"it was not done within {_MOST_S:.0f} s; `--no-probe` predicts without it") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise LastgoodError(lines[-1] if lines else f"it ended with exit code {done.returncode}")
    probe = parse_model(Probe, done.stdout, "what the probe found", most_bytes=MIB)
    if probe.disturbed:
        report("others had much of this machine meanwhile: the probe is not kept, and times may be shorter")
        return probe
    try:
        write_result(path, (json.dumps(probe.model_dump(mode="json"), indent=1) + "\n").encode())
    except LastgoodError as error:
        report(f"the probe is not kept: {error}")
    return probe


def with_probe(grid: Grid, probe: Probe, scale: Scale) -> Grid:
    """`grid`, whose prediction of `scale` is this machine's.

    What the probe had no time for is scaled as what it looked at.
    """
    known = grid.prediction[scale]
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


def with_probe_of_kind(
    grids: Mapping[str, Grid], figures: Iterable[str], specs: Iterable[Spec], probe: Probe, scale: Scale
) -> dict[str, Grid]:
    """`with_probe` of each figure's grid; `figures` are those of `specs`.

    Grids of figures that have no run of a kind that can be looked at stay as they are.
    """
    looked_at = {figure for figure, spec in zip(figures, specs, strict=True) if can_be_probed(spec)}
    return {figure: with_probe(grid, probe, scale) if figure in looked_at else grid for figure, grid in grids.items()}


_BESIDE_BUILDING_S = 2.0
"""Of a run in a workflow: its command's start, its folder, its record."""


def can_be_probed(spec: Spec) -> TypeGuard[RunSpec]:
    """Whether it trains a model on data, in one process: what a probe takes steps of."""
    return isinstance(spec, RunSpec) and not spec.over_ranks and workload_data_kind(spec.workload) is not None


def _workloads(specs: Iterable[Spec]) -> list[RunSpec]:
    """A run of each workload that a probe can look at."""
    found: dict[str, RunSpec] = {}
    for spec in specs:
        if can_be_probed(spec):
            found.setdefault(spec.workload, spec)
    return list(found.values())


def _look(chosen: Sequence[RunSpec], data_dir: Path, scratch: Path) -> Probe:
    """What `probe_machine` asks a fresh process for."""
    from lastgood.checkpointers.registry import checkpointer_class
    from lastgood.experiments.runs.measure import build_planned
    from lastgood.training.loop import TrainingLoop, configure_compute
    from lastgood.workloads.data.prepare import prepare_dataset

    began_s = time.monotonic()
    scratch.mkdir(parents=True, exist_ok=True)
    before = look({os.getpid()}, scratch)
    options: dict[str, dict[str, Any]] = {}
    building_s: dict[str, float] = {}
    step_s: dict[str, float] = {}
    for spec in chosen:
        if options and time.monotonic() - began_s > _BUDGET_S:
            break
        kind = workload_data_kind(spec.workload)
        if spec.data is None and kind is not None:
            prepare_dataset(kind, data_dir)
        importlib.import_module(workload_module(spec.workload))
        configure_compute(spec.threads, deterministic=False)
        build_began_s = time.monotonic()
        workload = build_planned(spec, data_dir)
        building_s[spec.workload] = time.monotonic() - build_began_s
        system = checkpointer_class("none")
        loop = TrainingLoop(workload, system(scratch, system.Options()), 0, spec.device)
        loop.start()
        loop.train(2)
        step_s[spec.workload] = statistics.median(loop.train(_STEPS).clock.step_s())
        options[spec.workload] = spec.workload_options
    with disk_bursts(scratch) as burst:
        persist = statistics.median(burst() for _ in range(_BURSTS))
    after = look({os.getpid()}, scratch)
    found = disturbance_between(before, after)
    room_s = _MOST_SHARE * usable_cores() * (after.at_s - before.at_s)
    return Probe(
        machine=machine_label(),
        scratch=str(scratch.absolute()),
        device=chosen[0].device,
        threads=chosen[0].threads,
        options=options,
        build_s=building_s,
        step_s=step_s,
        persist_bytes_per_s=persist,
        disturbed=found.others_cpu_s + found.steal_s > room_s,
    )


def main() -> None:
    """Read what is asked for on stdin, and print what was found. Argument: the process to end with."""
    die_with_parent(int(sys.argv[1]))
    asked = parse_json(sys.stdin.buffer.read(MIB), "what to probe", most_bytes=MIB)
    texts, data_dir, scratch = asked
    chosen = [parse_model(RunSpec, text, "a spec", most_bytes=MIB) for text in texts]
    try:
        found = _look(chosen, Path(data_dir), Path(scratch))
    except LastgoodError as error:
        sys.exit(str(error))
    sys.stdout.write(found.model_dump_json())


if __name__ == "__main__":
    main()
