"""From run records to one figure's CSV files: a tidy one (a row per run) and a wide one (a row per series).

Everything that a figure shows is in its tidy CSV, and everything in the CSV comes from the records and the ceilings.
docs/figures.md explains each column.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord, load_ceilings
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.figures.axes import THROUGHPUT, FigureAxes
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.formulas.bound import Bound, throughput_bound
from lastgood.experiments.records.run import RunRecord, ShadowFacts, WhereRun, load_record
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.systems.labels import system_rank
from lastgood.experiments.tables.columns import TIDY_COLUMNS, TidyRow
from lastgood.experiments.tables.published import Published, load_published, published_slowdown
from lastgood.experiments.tables.wide import field_text, wide_table
from lastgood.files import write_result
from lastgood.sinks import Sink

__all__ = ["TIDY_COLUMNS", "Collected", "TidyRow", "collect", "collect_files", "load_placed_record", "run_name"]

_PATH_PARTS = 7
"""Parts of RunSpec.record_path(): machine, scale, workload, system, interval, variant, repetition."""


@dataclass(frozen=True)
class Collected:
    """A figure's numbers."""

    tidy: list[TidyRow]
    wide: list[list[str]]
    """Rows of text: the header first."""
    warnings: list[str]

    def summary(self) -> str:
        """``12 of 14 runs``."""
        return f"{len(self.tidy)} of {self.tidy[0].runs_expected} runs"

    def write(self, out_tidy: Path, out_wide: Path) -> None:
        """Write both files, each whole or not at all."""
        write_result(out_wide, _csv_bytes(self.wide))
        lines = [[field_text(getattr(row, name)) for name in TIDY_COLUMNS] for row in self.tidy]
        write_result(out_tidy, _csv_bytes([list(TIDY_COLUMNS), *lines]))


def load_placed_record(path: Path) -> RunRecord:
    """Load a record and check that it lies where its spec says.

    Raises LastgoodError where it does not: the file was moved or edited, or belongs to another version of the settings.
    """
    record = load_record(path)
    expected = record.spec.record_path()
    if path.absolute().parts[-_PATH_PARTS:] != expected.parts:
        raise LastgoodError(
            f"{path}: this record's settings belong at .../{expected}; it was moved or edited, or the settings' hash "
            "changed; remove it and run again"
        )
    return record


def run_name(path: Path | PurePosixPath, *, variant: bool = False) -> str:
    """``vgg16 pccheck f10 r1`` from a record's path, for messages about a record that is not there.

    With `variant`, its variant as well: in a sweep, the rest does not tell runs apart.
    """
    parts = path.parts[-_PATH_PARTS:]
    if len(parts) < _PATH_PARTS:
        return str(path)
    words = [parts[2], parts[3], parts[4], *([parts[5]] if variant else []), parts[6].removesuffix(".json")]
    return " ".join(words)


def collect_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    ceilings_path: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,
) -> Collected:
    """Load records and ceilings from files, and published numbers where there are any, and collect them.

    With `partial`, files of `paths` that are not there are named as missing; without, they are an error. `expected` is
    the number of runs of the whole figure, where `paths` does not name all of them.
    """
    there = [path for path in paths if path.exists()]
    sweep = _axes(figure) is not THROUGHPUT
    missing = [run_name(path, variant=sweep) for path in paths if not path.exists()]
    runs_expected = max(len(paths), expected or 0)
    if not there:
        raise LastgoodError(f"{figure} {panel}: none of its {runs_expected} run records is there")
    if not partial and len(there) < runs_expected:
        named = f": {', '.join(missing)}" if missing else ""
        raise LastgoodError(
            f"{figure} {panel}: {len(there)} of {runs_expected} run records are there{named}; run what is missing, "
            "or use --partial"
        )
    records = [load_placed_record(path) for path in there]
    return collect(
        figure,
        panel,
        records,
        load_ceilings(ceilings_path),
        runs_expected=runs_expected,
        runs_missing=missing,
        published=[] if reference is None else load_published(reference),
    )


def collect(
    figure: str,
    panel: str,
    records: Sequence[RunRecord],
    ceilings: CeilingsRecord,
    *,
    runs_expected: int | None = None,
    runs_missing: Sequence[str] = (),
    published: Sequence[Published] = (),
) -> Collected:
    """Put `records` of one panel together with the ceilings of their machine. Pure; the order of records is no matter.

    Raises LastgoodError where records do not make one panel: several workloads or scales, a run given twice, runs
    without the figure's axis, or two settings of one system at one interval and one value of the axis.
    """
    axes = _axes(figure)
    _refuse_mixtures(f"{figure} {panel}", records, axes)
    ordered = sorted(records, key=lambda record: _order(record, axes))
    shared_notes = _shared_notes(ordered, ceilings)
    warnings = [f"{figure} {panel}: {note}" for note in shared_notes]
    baselines = _baselines(ordered)
    proofs = _proofs(ordered)
    rows = []
    for record in ordered:
        baseline = baselines.get(_workload_key(record.spec))
        notes = [*record.notes, *shared_notes]
        if not axes.baseline:
            pass  # times of single checkpoints are compared with nothing
        elif baseline is None:
            notes.append("no `none` run of this workload: no ratio and no bound")
            warnings.append(
                f"{figure} {panel}: {record.spec.title()}: no `none` run of this workload: no ratio, no bound"
            )
        elif record.spec.repetition not in baseline.iterations_per_s:
            notes.append("no `none` run of this repetition: no ratio")
            warnings.append(f"{figure} {panel}: {record.spec.title()}: no `none` run of this repetition: no ratio")
        rows.append(
            _row(
                figure,
                panel,
                record,
                ceilings,
                baseline,
                axes,
                proof_equal=proofs.get(record.spec.cell_hash),
                runs_expected=max(len(records), runs_expected or 0),
                runs_missing="; ".join(runs_missing),
                notes="; ".join(notes),
                published=published_slowdown(published, record.spec) if axes is THROUGHPUT else None,
            )
        )
    return Collected(rows, wide_table(rows, axes), warnings)


@dataclass(frozen=True)
class _Baseline:
    """What the `none` runs of a workload say."""

    iterations_per_s: dict[int, float]
    """By repetition."""
    iteration_s: float
    hide_s: float


def _row(
    figure: str,
    panel: str,
    record: RunRecord,
    ceilings: CeilingsRecord,
    baseline: _Baseline | None,
    axes: FigureAxes,
    *,
    proof_equal: bool | None,
    runs_expected: int,
    runs_missing: str,
    notes: str,
    published: Published | None,
) -> TidyRow:
    spec, clocks, counts, where = record.spec, record.clocks, record.counts, record.where
    bound: Bound | None = None
    copy_ceiling: float | None = None
    stored = _stored(record, ceilings)
    none_iterations_per_s: float | None = None
    if baseline is not None:
        copy_ceiling = ceilings.copy_bytes_per_s(spec.device)
        if stored is not None:
            bound = throughput_bound(
                iteration_s=baseline.iteration_s,
                interval_steps=spec.interval_steps,
                # Checkmate sends gradients from where they are; nothing copies the state.
                state_bytes=0 if spec.shadows else record.workload.state_bytes,
                copy_bytes_per_s=copy_ceiling,
                persist_bytes_per_s=stored.bytes_per_s,
                hide_s=baseline.hide_s,
                stored_bytes=stored.nbytes,
                sink=stored.sink,
            )
        none_iterations_per_s = baseline.iterations_per_s.get(spec.repetition)
    proof = record.proof
    none_rate = none_iterations_per_s or (1 / baseline.iteration_s if baseline else None)
    durable_rate, state_bytes = clocks.durable_iterations_per_s, record.workload.state_bytes
    return TidyRow(
        figure=figure,
        panel=panel,
        machine=spec.machine,
        scale=spec.scale,
        workload=spec.workload,
        system=spec.system,
        interval_steps=spec.interval_steps,
        repetition=spec.repetition,
        cell=spec.variant,
        iterations_per_s=clocks.iterations_per_s,
        durable_iterations_per_s=clocks.durable_iterations_per_s,
        none_iterations_per_s=none_iterations_per_s,
        ratio_to_none=clocks.iterations_per_s / none_iterations_per_s if none_iterations_per_s else None,
        bound_iterations_per_s=bound.iterations_per_s if bound else None,
        bound_binds=str(bound.binds) if bound else None,
        ratio_to_bound=clocks.durable_iterations_per_s / bound.iterations_per_s if bound else None,
        stall_save_s=clocks.stall_save_s,
        stall_update_s=clocks.stall_update_s,
        persist_p50_s=statistics.median(clocks.persist_s) if clocks.persist_s else None,
        persist_p99_s=_nearest_rank(clocks.persist_s, 0.99) if clocks.persist_s else None,
        drain_s=clocks.drain_s,
        restore_s=proof.restore_s if proof else None,
        state_bytes=record.workload.state_bytes,
        checkpoints_started=counts.started,
        checkpoints_durable=counts.durable,
        checkpoints_superseded=counts.superseded,
        checkpoints_failed=counts.failed,
        checkpoints_skipped=counts.skipped,
        # A superseded checkpoint was written in full, so it cost what a durable one costs.
        enough_checkpoints=counts.durable + counts.superseded >= 2 if spec.interval_steps else None,
        proof_equal=proof.equal if proof else proof_equal,
        peak_rss_bytes=record.resources.peak_rss_bytes,
        peak_device_bytes=record.resources.peak_device_bytes,
        cpu_s=record.resources.cpu_s,
        bytes_written=record.resources.bytes_written,
        warmup_steps=spec.warmup_steps,
        measured_steps=clocks.measured_steps,
        threads=spec.threads,
        device=spec.device,
        seed=spec.seed,
        method=spec.method,
        system_options=_json(spec.system_options),
        workload_options=_json(spec.workload_options),
        data_name=record.workload.data_name,
        parameters=record.workload.parameters,
        iteration_s=baseline.iteration_s if baseline else None,
        hide_s=baseline.hide_s if baseline else None,
        copy_ceiling_bytes_per_s=copy_ceiling,
        persist_ceiling_bytes_per_s=ceilings.persist_bytes_per_s,
        ceilings_measured_at=ceilings.measured_at,
        cpu=where.cpu,
        cores=where.cores,
        memory_bytes=where.memory_bytes,
        gpu=where.gpu,
        kernel=where.kernel,
        scratch_filesystem=where.scratch_filesystem,
        scratch_device=where.scratch_device,
        storage=_json(record.storage),
        git_revision=where.git_revision,
        git_dirty=where.git_dirty,
        started_at=record.started_at,
        record=str(spec.record_path()),
        runs_expected=runs_expected,
        runs_missing=runs_missing,
        notes=notes,
        axis=axes.axis,
        axis_value=axes.value_of(spec),
        slowdown=none_rate / durable_rate if none_rate else None,
        slowdown_bound=1 / baseline.iteration_s / bound.iterations_per_s if baseline and bound else None,
        persist_min_s=min(clocks.persist_s) if clocks.persist_s else None,
        persist_max_s=max(clocks.persist_s) if clocks.persist_s else None,
        persist_bound_s=stored.nbytes / stored.bytes_per_s if stored and spec.interval_steps else None,
        max_in_flight=_integer(spec, "max_in_flight"),
        writer_threads=_integer(spec, "writer_threads"),
        pool_bytes=_integer(spec, "pool_bytes", default=state_bytes),
        drain_each=spec.drain_each,
        paper_slowdown=published.slowdown if published else None,
        paper_source=published.source if published else None,
        ranks=spec.ranks,
        nodes=spec.nodes,
        parallel=spec.parallel,
        link_bits_per_s=record.ranks.link_bits_per_s if record.ranks else None,
        stored_bytes=stored.nbytes if stored and spec.interval_steps else None,
        shadows=spec.shadows,
        **_of_shadows(record.shadows),
        kills=spec.kills,
        lost_steps=";".join(str(failure.lost_steps) for failure in record.failures) or None,
        lives_unlike=sum(not failure.losses_equal for failure in record.failures),
        losses_compared=sum(failure.losses_checked for failure in record.failures) if record.failures else None,
    )


def _of_shadows(shadows: Sequence[ShadowFacts]) -> dict[str, Any]:
    """Columns of a run under Checkmate: sums over its shadows."""
    if not shadows:
        return {}
    return {
        "shadow_cpu_s": sum(one.cpu_s for one in shadows),
        "shadow_received_bytes": sum(one.received_bytes for one in shadows),
        "shadow_optimizer_s": sum(one.optimizer_s for one in shadows),
        "shadow_peak_rss_bytes": sum(one.peak_rss_bytes for one in shadows),
    }


@dataclass(frozen=True)
class _Stored:
    """What one checkpoint puts on the sink that has most to do with it, and how fast that is at best."""

    nbytes: int
    bytes_per_s: float
    sink: Sink


def _stored(record: RunRecord, ceilings: CeilingsRecord) -> _Stored | None:
    """None where a checkpoint goes over a link whose rate nobody knows.

    Hosts are taken to have disks like the one that was measured, and share it where they share a kernel.
    """
    ranks = record.ranks
    sink, nbytes = (Sink.DISK, record.workload.state_bytes) if ranks is None else ranks.most_on
    if sink is Sink.DISK:
        return _Stored(0 if record.spec.shadows else nbytes, ceilings.persist_bytes_per_s, sink)
    if ranks is None or ranks.link_bits_per_s is None:
        return None
    return _Stored(nbytes, ranks.link_bits_per_s / 8, sink)


def _axes(figure: str) -> FigureAxes:
    axes = figure_kind(figure).axes
    if axes is None:
        raise LastgoodError(f"{figure} is not made of runs; `lastgood collect {figure}` knows how it is")
    return axes


def _integer(spec: RunSpec, knob: str, default: int | None = None) -> int | None:
    """A knob of the system, `default` where it has the knob and it is null; None where it has no such knob."""
    value = spec.system_options.get(knob)
    if value is None and knob in spec.system_options:
        return default
    return value if isinstance(value, int) else None


def _order(record: RunRecord, axes: FigureAxes) -> tuple[tuple[int, str], int, float, int]:
    spec = record.spec
    value = axes.value_of(spec)
    return (system_rank(spec.system), spec.interval_steps, -1 if value is None else value, spec.repetition)


def _workload_key(spec: RunSpec) -> str:
    """What a run and its `none` run share."""
    shared = (spec.machine, spec.scale, spec.workload, spec.workload_options, spec.device, spec.threads, spec.data)
    return _json((*shared, spec.ranks, spec.nodes, spec.parallel))


def _baselines(records: Iterable[RunRecord]) -> dict[str, _Baseline]:
    runs: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.spec.system == BASELINE:
            runs[_workload_key(record.spec)].append(record)
    return {
        key: _Baseline(
            iterations_per_s={record.spec.repetition: record.clocks.iterations_per_s for record in found},
            iteration_s=statistics.median(1 / record.clocks.iterations_per_s for record in found),
            hide_s=statistics.median(record.clocks.hide_s for record in found),
        )
        for key, found in runs.items()
    }


def _proofs(records: Iterable[RunRecord]) -> dict[str, bool]:
    """By cell: whether every proof made in it held. Cells without a proof are not there."""
    found: dict[str, bool] = {}
    for record in records:
        if record.proof is not None:
            cell = record.spec.cell_hash
            found[cell] = found.get(cell, True) and record.proof.equal
    return found


def _refuse_mixtures(name: str, records: Sequence[RunRecord], axes: FigureAxes) -> None:
    if not records:
        raise LastgoodError(f"{name}: no run record")
    for what, values in (
        ("workload", {record.spec.workload for record in records}),
        ("scale", {record.spec.scale for record in records}),
        ("number of ranks", {str(record.spec.ranks) for record in records}),
        ("number of nodes", {str(record.spec.nodes) for record in records}),
        ("kind of parallelism", {record.spec.parallel for record in records}),
        ("link rate", {_link(record) for record in records}),
    ):
        if len(values) > 1:
            raise LastgoodError(
                f"{name}: a panel shows one {what}, not {', '.join(sorted(values))}; collect them one by one"
            )
    twice = [str(path) for path, count in Counter(record.spec.record_path() for record in records).items() if count > 1]
    if twice:
        raise LastgoodError(f"{name}: given twice: {', '.join(sorted(twice))}")
    cells: dict[tuple[str, int, float | None], PurePosixPath] = {}
    for record in sorted(records, key=lambda record: _order(record, axes)):
        spec = record.spec
        path = spec.record_path()
        value = axes.value_of(spec)
        first = cells.setdefault((spec.system, spec.interval_steps, value), path)
        if first.parent != path.parent:
            at = "" if axes is THROUGHPUT else f" and {axes.axis} {value}"
            raise LastgoodError(
                f"{name}: two settings of {spec.system} at interval {spec.interval_steps}{at}: "
                f"{first.parent} and {path.parent}; a panel shows one, so leave the other out"
            )


def _shared_notes(records: Sequence[RunRecord], ceilings: CeilingsRecord) -> list[str]:
    """What every row of a panel should say, because its rows are not of one make."""
    notes = []
    revisions = {_revision(record) for record in records}
    if len(revisions) > 1:
        notes.append(f"mixed revisions: {', '.join(sorted(revisions))}")
    machines = {record.spec.machine for record in records}
    if len(machines) > 1:
        notes.append(f"mixed machines: {', '.join(sorted(machines))}")
    if machines != {ceilings.machine}:
        notes.append(f"ceilings are of {ceilings.machine}, runs of {', '.join(sorted(machines))}")
    disks = {_disk(record.where) for record in records}
    if len(disks) > 1:
        notes.append(f"mixed scratch disks: {', '.join(sorted(disks))}")
    if disks != {_disk(ceilings.where)}:
        notes.append(f"ceilings are of {_disk(ceilings.where)}, runs of {', '.join(sorted(disks))}")
    for package in ("torch", "python"):
        installed = {record.where.versions.get(package, "unknown") for record in records}
        if len(installed) > 1:
            notes.append(f"mixed versions of {package}: {', '.join(sorted(installed))}")
    methods: dict[str, set[int]] = defaultdict(set)
    for record in records:
        methods[record.spec.system].add(record.spec.method)
    for system, versions in methods.items():
        if len(versions) > 1:
            notes.append(f"mixed methods of {system}: {', '.join(map(str, sorted(versions)))}")
    if ceilings.quick:
        notes.append("ceilings were measured with --quick")
    return notes


def _link(record: RunRecord) -> str:
    rate = record.ranks.link_bits_per_s if record.ranks else None
    return "unknown" if rate is None else f"{rate / 1e9:g} Gbit/s"


def _disk(where: WhereRun) -> str:
    return f"{where.scratch_filesystem} on {where.scratch_device}"


def _revision(record: RunRecord) -> str:
    revision = (record.where.git_revision or "unknown")[:12]
    return f"{revision}+dirty" if record.where.git_dirty else revision


def _nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest measured value that at least `share` of all values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _csv_bytes(lines: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
