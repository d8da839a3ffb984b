"""What all benchmarks share: their command line, the machine's lock, a scratch folder, the order of rounds, the report.

Every script is started as ``python benchmarks/NAME.py``, so that its neighbours can be imported by their plain names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from rich.console import Console
from rich.table import Table

from lastgood.errors import ConfigError, LastgoodError, LockHeld
from lastgood.experiments.machine.facts import machine_label, where_run
from lastgood.experiments.machine.lock import machine_lock
from lastgood.files import write_result
from lastgood.locks import FileLock
from lastgood.mounts import refuse_memory
from lastgood.units import parse_bytes

FORMAT = 1
"""Version of the JSON that `--out` writes."""
LOCK_TIMEOUT_S = 4 * 3600.0
_SCRATCH_PREFIX = "lastgood-benchmark-"

Verdict = Literal["met", "missed", "not judged"]


# -- numbers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Two sides that were measured in one run, round by round, in a number of which more is better."""

    what: str
    unit: str
    ours: str
    our_values: list[float]
    """One value per round."""
    theirs: str
    their_values: list[float]
    """One value per round, or a single one where there is only one (a bound)."""
    goal: float | None = None
    """The ratio of medians must be at least this; None where no goal is set."""

    @property
    def ratio(self) -> float:
        """Median of ours over median of theirs."""
        return statistics.median(self.our_values) / statistics.median(self.their_values)

    @property
    def round_ratios(self) -> list[float]:
        """The ratio of every round: how much of the spread is the machine's drift, which both sides share."""
        theirs = self.their_values
        if len(theirs) == 1:
            theirs = theirs * len(self.our_values)
        return [a / b for a, b in zip(self.our_values, theirs, strict=True)]

    @property
    def verdict(self) -> Verdict:
        """What the goal says of the ratio."""
        return judge(self.ratio, at_least=self.goal)

    def as_json(self) -> dict[str, Any]:
        """All of it, with what follows from it."""
        return {
            **dataclasses.asdict(self),
            "our_median": statistics.median(self.our_values),
            "their_median": statistics.median(self.their_values),
            "ratio_of_medians": self.ratio,
            "round_ratios": self.round_ratios,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Limit:
    """One number that must not be above another one."""

    what: str
    unit: str
    value: float
    limit: float
    verdict: Verdict
    how: str = ""


def judge(value: float, *, at_least: float | None = None, at_most: float | None = None) -> Verdict:
    """Compare with a goal; a quick run is compared as well, though it is too short to mean much."""
    if at_least is None and at_most is None:
        return "not judged"
    met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return "met" if met else "missed"


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """``median (lowest..highest)``."""
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def interleaved(names: Sequence[str], rounds: int, seed: int) -> Iterator[tuple[int, str]]:
    """(round, name): every name once a round, in an order that the seed fixes and that differs from round to round."""
    generator = random.Random(seed)
    for number in range(rounds):
        order = list(names)
        generator.shuffle(order)
        for name in order:
            yield number, name


# -- report --------------------------------------------------------------------------------------------------------


@dataclass
class TextTable:
    """A table that only people read."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


@dataclass
class Report:
    """What a benchmark found."""

    settings: dict[str, Any] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    tables: list[TextTable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _print(name: str, report: Report, head: dict[str, Any]) -> None:
    # In a pipe or a log rich assumes 80 columns, and would cut the numbers.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    where = head["where"]
    revision = (where["git_revision"] or "no revision")[:12] + (" with changes" if where["git_dirty"] else "")
    place = f"{where['scratch_filesystem']} on {where['scratch_device']}"
    console.print(
        f"{name}: {head['machine']}, Linux {where['kernel']}, {place}; {revision}; {head['measured_at']}", markup=False
    )
    tables = list(report.tables)
    if report.comparisons:
        columns = ("what", "unit", "ours", "theirs", "ratio", "ratio by round", "goal", "")
        table = TextTable("Goals: medians (lowest..highest)", columns)
        for item in report.comparisons:
            digits = 1 if statistics.median(item.our_values) >= 100 else 3
            table.rows.append(
                (
                    item.what,
                    item.unit,
                    f"{item.ours} {spread(item.our_values, digits=digits)}",
                    f"{item.theirs} {spread(item.their_values, digits=digits)}",
                    f"{item.ratio:.3f}",
                    f"{min(item.round_ratios):.3f}..{max(item.round_ratios):.3f}",
                    "" if item.goal is None else f">= {item.goal:g}",
                    item.verdict,
                )
            )
        tables.append(table)
    if report.limits:
        table = TextTable("Limits", ("what", "unit", "found", "limit", "", "how"))
        for limit in report.limits:
            numbers = (f"{limit.value:.4g}", f"{limit.limit:.4g}")
            table.rows.append((limit.what, limit.unit, *numbers, limit.verdict, limit.how))
        tables.append(table)
    for shown in tables:
        rich = Table(title=shown.title, title_justify="left")
        for column in shown.columns:
            rich.add_column(column)
        for row in shown.rows:
            rich.add_row(*row)
        console.print(rich)
    for note in report.notes:
        console.print(f"- {note}", markup=False)


# -- a benchmark's life --------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Progress, for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def cannot(message: str) -> NoReturn:
    """End: this machine or this revision lacks what the benchmark needs."""
    say(f"cannot run: {message}")
    raise SystemExit(2)


def command_line(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that it works; the numbers mean nothing")
    parser.add_argument("--out", type=Path, help="file of the results (JSON)")
    parser.add_argument(
        "--directory", type=Path, default=Path("scratch"), help="folder on the disk to measure (default: ./scratch)"
    )
    parser.add_argument("--rounds", type=_positive, help=f"repetitions (default: {rounds}; with --quick: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the order inside each round (default: 0)")
    parser.set_defaults(full_rounds=rounds)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 10_000:
        raise argparse.ArgumentTypeError(f"must be between 1 and 10000, not {number}")
    return number


def sizes(text: str) -> list[int]:
    """``96MiB,960MiB`` in bytes, for an option."""
    try:
        found = [parse_bytes(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not all(0 < size <= 1 << 40 for size in found):
        raise argparse.ArgumentTypeError(f"sizes must be between 1 byte and 1 TiB: {text}")
    return found


def main(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace, Path], Report], script: str
) -> NoReturn:
    """Parse, wait for the machine, measure in a scratch folder that is removed again, print and write the report."""
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else options.full_rounds)
    name = Path(script).stem
    signal.signal(signal.SIGTERM, _end)
    try:
        refuse_memory(options.directory)
        lock = machine_lock()
        lock.acquire(LOCK_TIMEOUT_S, say)
        with lock, _ScratchFolder(options.directory) as folder:
            # Before it is measured: that may take cores from this process.
            machine, where = machine_label(), where_run(options.directory).model_dump()
            begin = time.perf_counter()
            report = measure(options, folder)
            head = {
                "benchmark": name,
                "format": FORMAT,
                "quick": options.quick,
                "machine": machine,
                "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "wall_s": round(time.perf_counter() - begin, 3),
                # Results are published: the folder's name is enough, its place on this machine is nobody's business.
                "where": {**where, "scratch_path": options.directory.name},
            }
    except LastgoodError as error:
        say(f"{name}: {error}")
        raise SystemExit(error.exit_code) from None
    if options.quick:
        report.notes.append("a quick run: too short to judge anything by")
    _print(name, report, head)
    if options.out is not None:
        document = {
            **head,
            "settings": {"rounds": options.rounds, "seed": options.seed, **report.settings},
            "comparisons": [item.as_json() for item in report.comparisons],
            "limits": [dataclasses.asdict(item) for item in report.limits],
            "results": report.results,
            "notes": report.notes,
        }
        write_result(options.out, (json.dumps(document, indent=1) + "\n").encode())
    raise SystemExit(0)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that folders are removed and child processes ended.
    del frame
    raise SystemExit(128 + number)


class _ScratchFolder:
    """A folder of this process. Its lock tells it from the folders that killed benchmarks left, which are removed."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for left in sorted(directory.glob(f"{_SCRATCH_PREFIX}*")):
                self._remove_if_dead(left)
            self.path = directory.absolute() / f"{_SCRATCH_PREFIX}{os.getpid()}"
            self.path.mkdir()
        except OSError as error:
            raise ConfigError(
                f"{directory}: cannot make a folder here: {error.strerror}; choose another --directory"
            ) from error
        self._lock = _folder_lock(self.path)

    @staticmethod
    def _remove_if_dead(left: Path) -> None:
        lock = _folder_lock(left)
        try:
            lock.acquire()
        except (LockHeld, OSError):
            return  # in use, or another user's
        shutil.rmtree(left, ignore_errors=True)
        lock.release()

    def __enter__(self) -> Path:
        self._lock.acquire()
        return self.path

    def __exit__(self, *ignored: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _folder_lock(folder: Path) -> FileLock:
    return FileLock(folder / "benchmark.lock", f"benchmark folder {folder}")
