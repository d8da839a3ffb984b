"""Measured cells for `lastgood advise`: from run records, or from the tidy CSV files that figures keep."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from lastgood.checkpointers.registry import BASELINE
from lastgood.errors import ConfigError, CorruptCheckpoint, LastgoodError
from lastgood.experiments.advise.model import Cell, Rates
from lastgood.experiments.ceilings.record import CeilingsRecord
from lastgood.experiments.formulas.pairs import Interval, estimate_pairs
from lastgood.experiments.records.kinds import RUN, kind_of_file
from lastgood.experiments.records.run import RunRecord
from lastgood.text import is_whole, parse_csv, parse_json, parse_number, read_bytes
from lastgood.units import MIB

__all__ = ["Device", "Measured", "rates_of", "read_cells"]

_DEVICES: dict[str, Device] = {"cpu": "cpu", "cuda": "cuda"}
_MAX_FILES = 20_000
_MAX_CSV_BYTES = 64 << 20
_MAX_CSV_ROWS = 1_000_000
_MOST_NUMBER = 1e18
_NEEDED_COLUMNS = frozenset(
    {"machine", "device", "workload", "system", "interval_steps", "ratio_to_none", "durable_iterations_per_s"}
)


Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Measured:
    """What a folder of results says."""

    cells: list[Cell]
    machine: str
    device: Device
    rates: Rates | None
    """The ceilings that CSV files carry; None from records, which do not know them."""
    notes: list[str]


@dataclass(frozen=True)
class _Run:
    source: str
    machine: str
    device: Device
    workload: str
    setting: str
    """Everything that a run shares with its `none` run, as text."""
    system: str
    options: str
    interval_steps: int
    repetition: int
    state_bytes: float
    per_s: float
    durable_per_s: float
    pairs: Interval | None
    """Throughput with checkpoints over that without, if it was measured in pairs of blocks."""
    hide_s: float
    durable_s: float | None
    load_s: float | None
    max_in_flight: int
    usable: str
    """Empty, or why this run says nothing."""
    rates: tuple[float, float] | None
    """Copy and write ceilings in bytes per second, if the source has them."""


def rates_of(ceilings: CeilingsRecord, device: Device) -> Rates:
    """The numbers of a ceilings record that advice needs, for a training on `device`."""
    return Rates(
        write=ceilings.persist_bytes_per_s,
        copy=ceilings.copy_bytes_per_s(device),
        read=ceilings.disk.read_bytes_per_s or None,
        network=ceilings.network_bytes_per_s,
        device=device,
    )


def read_cells(folder: Path, *, machine: str | None = None, device: Device | None = None) -> Measured:
    """Read all run records (``r0.json`` and so on) and tidy CSV files below `folder`.

    `machine` and `device` choose if the folder has several. Raises LastgoodError, naming file and line, for a
    damaged file, and ConfigError if there is nothing to read or a choice is needed.
    """
    if not folder.is_dir():
        raise ConfigError(f"--records {folder}: no such folder; name one with run records or tidy CSV files")
    runs = [*_from_records(folder), *_from_csv(folder)]
    runs = _choose(runs, folder, "machine", machine, lambda run: run.machine)
    runs = _choose(runs, folder, "device", device, lambda run: run.device)
    notes: list[str] = []
    runs = list(_one_setting_each(runs, notes))
    cells = _cells(runs, notes)
    if not cells:
        raise ConfigError(
            f"--records {folder}: no cell with a `none` run of its workload, two checkpoints and a complete proof"
            + "".join(f"; {note}" for note in notes)
        )
    known = [run.rates for run in runs if run.rates is not None]
    rates = None
    if known:
        copy, write = (statistics.median(values) for values in zip(*known, strict=True))
        rates = Rates(write=write, copy=copy, device=runs[0].device)
    return Measured(cells, runs[0].machine, runs[0].device, rates, notes)


def _choose(runs: list[_Run], folder: Path, what: str, wanted: str | None, key: Callable[[_Run], str]) -> list[_Run]:
    there = sorted({key(run) for run in runs})
    if wanted is not None and wanted in there:
        return [run for run in runs if key(run) == wanted]
    if wanted is not None or not there:
        raise ConfigError(
            f"--records {folder}: no run{f' of {what} {wanted!r}' if wanted else ''}; "
            f"it has {', '.join(there) or 'none at all'}"
        )
    if len(there) > 1:
        raise ConfigError(f"--records {folder}: runs of several {what}s: {', '.join(there)}; choose with --{what}")
    return runs


def _one_setting_each(runs: list[_Run], notes: list[str]) -> Iterator[_Run]:
    """Of a system with several sets of options, the one with most runs: cells of different options make no curve."""
    options: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        options[run.system][run.options] += 1
    kept = {system: min(found, key=lambda text: (-options[system][text], text)) for system, found in options.items()}
    for system, found in sorted(options.items()):
        if len(found) > 1:
            notes.append(f"{system} has {len(found)} sets of options in the records; used: {kept[system]}")
    return (run for run in runs if run.options == kept[run.system])


def _cells(runs: Iterable[_Run], notes: list[str]) -> list[Cell]:
    groups: dict[tuple[str, str, str, int], list[_Run]] = defaultdict(list)
    none: dict[str, dict[int, _Run]] = defaultdict(dict)
    seen: dict[tuple[str, str, str, int, int], str] = {}
    for run in runs:
        if run.usable:
            notes.append(f"{run.source}: {run.workload} {run.system} f{run.interval_steps} is left out: {run.usable}")
            continue
        # A run may be in a record and in a CSV: it counts once.
        identity = (run.workload, run.setting, run.system, run.interval_steps, run.repetition)
        if seen.setdefault(identity, run.source) != run.source:
            continue
        if run.system == BASELINE:
            none[run.setting][run.repetition] = run
        else:
            groups[run.workload, run.setting, run.system, run.interval_steps].append(run)
    cells = []
    for (workload, setting, system, interval), found in sorted(groups.items()):
        # Ratios within a run if it has pairs, else within a repetition: its runs were made close together.
        with_none = [run for run in found if run.repetition in none[setting]]
        spans = [
            Interval(*[none[setting][run.repetition].per_s / run.durable_per_s] * 3)
            if run.pairs is None
            else run.pairs.map(lambda ratio: 1 / ratio)
            for run in with_none
        ]
        if not spans:
            notes.append(f"{workload} {system} f{interval}: no `none` run of its repetitions")
            continue
        baseline = list(none[setting].values())
        durable = [run.durable_s for run in found if run.durable_s is not None]
        loads = [run.load_s for run in found if run.load_s is not None]
        cells.append(
            Cell(
                workload=workload,
                setting=setting,
                system=system,
                interval_steps=interval,
                state_bytes=statistics.median(run.state_bytes for run in found),
                iteration_s=statistics.median(1 / run.per_s for run in baseline),
                hide_s=statistics.median(run.hide_s for run in baseline),
                ratio=statistics.median(span.middle for span in spans),
                ends=None if len(spans) == 1 and with_none[0].pairs is None else _ends(spans),
                durable_s=statistics.median(durable) if durable else None,
                load_s=statistics.median(loads) if loads else None,
                max_in_flight=found[0].max_in_flight,
            )
        )
    return cells


def _ends(spans: Sequence[Interval]) -> tuple[float, float]:
    """The widest interval over repetitions. One run without pairs has none."""
    return min(span.low for span in spans), max(span.high for span in spans)


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(islice(folder.rglob(pattern), _MAX_FILES + 1))
    if len(found) > _MAX_FILES:
        raise ConfigError(f"--records {folder}: more than {_MAX_FILES} files {pattern}; name a folder further down")
    return found


def _from_records(folder: Path) -> Iterator[_Run]:
    for path in _files(folder, "r[0-9]*.json"):
        if kind_of_file(path) is not RUN:
            continue  # a goodput run's own terms are in the runs without failures
        record = RunRecord.load(path)
        spec, clocks, counts = record.spec, record.clocks, record.counts
        if spec.drain_each or spec.ranks > 1:
            continue  # training waited for each checkpoint, or the state lies on several ranks: another question
        shared = (spec.scale, spec.workload, spec.workload_options, spec.threads, record.workload.data_name)
        found = estimate_pairs(record.blocks)
        yield _Run(
            source=str(path),
            machine=spec.machine,
            device=spec.device,
            workload=spec.workload,
            setting=json.dumps(shared, sort_keys=True),
            system=spec.system,
            options=json.dumps(spec.system_options, sort_keys=True),
            interval_steps=spec.interval_steps,
            repetition=spec.repetition,
            state_bytes=record.workload.state_bytes,
            per_s=clocks.iterations_per_s,
            durable_per_s=clocks.durable_iterations_per_s,
            pairs=None if found is None else Interval(found.low, found.ratio, found.high),
            hide_s=clocks.hide_s,
            durable_s=statistics.median(clocks.persist_s) if clocks.persist_s else None,
            load_s=record.proof.restore_s if record.proof else None,
            max_in_flight=_in_flight(spec.system_options),
            usable=_why_not(
                spec.interval_steps,
                counts.durable + counts.superseded,
                counts.failed + counts.skipped,
                record.proof.equal if record.proof else None,
            ),
            rates=None,
        )


def _from_csv(folder: Path) -> Iterator[_Run]:
    for path in _files(folder, "*.csv"):
        content = read_bytes(path, _MAX_CSV_BYTES, LastgoodError)
        named = content.partition(b"\n")[0].decode(errors="replace").rstrip("\r").split(",")
        if not _NEEDED_COLUMNS.issubset(name.strip('"') for name in named):
            continue  # a wide CSV, or another figure's
        rows = parse_csv(
            content, str(path), [], most_bytes=_MAX_CSV_BYTES, most_rows=_MAX_CSV_ROWS, error=LastgoodError
        )
        for line, row in rows:
            if row.get("drain_each") == "True" or row.get("ranks", "1") not in ("", "1"):
                continue
            try:
                yield _csv_run(f"{path}:{line}", row)
            except (CorruptCheckpoint, KeyError, TypeError, ValueError, AttributeError) as error:
                raise LastgoodError(
                    f"{path}, line {line}: not a row of a tidy CSV: {error!r}; collect it again"
                ) from error


def _csv_run(source: str, row: dict[str, str]) -> _Run:
    options = parse_json(row["system_options"], "system_options", most_bytes=MIB)
    interval = _whole(row["interval_steps"])
    shared = (
        row["scale"],
        row["workload"],
        parse_json(row["workload_options"], "workload_options", most_bytes=MIB),
        _whole(row["threads"]),
        row["data_name"],
    )
    none = row["system"] == BASELINE
    per_s, durable_per_s = _number(row["iterations_per_s"]), _number(row["durable_iterations_per_s"])
    if not (per_s > 0 and durable_per_s > 0 and _number(row["state_bytes"]) > 0):
        raise ValueError("throughput and state must be above 0")
    return _Run(
        source=source,
        machine=row["machine"],
        device=_DEVICES[row["device"]],
        workload=row["workload"],
        setting=json.dumps(shared, sort_keys=True),
        system=row["system"],
        options=json.dumps(options, sort_keys=True),
        interval_steps=interval,
        repetition=_whole(row["repetition"]),
        state_bytes=_number(row["state_bytes"]),
        per_s=per_s,
        durable_per_s=durable_per_s,
        pairs=_csv_interval(row),
        # The column repeats the `none` runs' median on every row of the panel.
        hide_s=_number(row["hide_s"]) if none else 0.0,
        durable_s=_number(row["persist_p50_s"]) if row["persist_p50_s"] else None,
        load_s=_number(row["restore_s"]) if row["restore_s"] else None,
        max_in_flight=_in_flight(options),
        usable=_why_not(
            interval,
            _whole(row["checkpoints_durable"]) + _whole(row["checkpoints_superseded"]),
            _whole(row["checkpoints_failed"]) + _whole(row["checkpoints_skipped"]),
            {"": None, "True": True, "False": False}[row["proof_equal"]],
        ),
        rates=(_number(row["copy_ceiling_bytes_per_s"]), _number(row["persist_ceiling_bytes_per_s"]))
        if row["copy_ceiling_bytes_per_s"]
        else None,
    )


def _csv_interval(row: dict[str, str]) -> Interval | None:
    names = ("ratio_low", "ratio_to_none", "ratio_high")
    if not all(row.get(name) for name in names):
        return None
    found = Interval(*(_number(row[name]) for name in names))
    if not found.low > 0:
        raise ValueError("ratios must be above 0")
    return found


def _number(text: str) -> float:
    return parse_number(text, least=0, most=_MOST_NUMBER)


def _whole(text: str) -> int:
    number = _number(text)
    if number != int(number):
        raise ValueError(f"{text!r} is no whole number")
    return int(number)


def _in_flight(options: Mapping[str, object]) -> int:
    found = options.get("max_in_flight", 1)
    return int(str(found)) if is_whole(found, 1, 10**6) else 1


def _why_not(interval_steps: int, written: int, missed: int, proof_equal: bool | None) -> str:
    """Why a run with checkpoints says nothing about their price; empty if it does."""
    if interval_steps == 0:
        return ""
    if proof_equal is False:
        return "its restore proof failed"
    if missed:
        return f"{missed} of its checkpoints failed or were skipped"
    return "" if written >= 2 else f"it wrote {written} checkpoints, and two are needed"
