"""Published slowdowns, from files like figures/reference/fig8.csv, to show beside ours. Needs no torch.

Absolute rates of another machine say nothing here; the ratio to training without checkpoints compares. docs/figures.md
explains the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.systems.labels import panel_letter
from lastgood.text import parse_csv, parse_number, read_bytes

__all__ = [
    "MOST_VALUE",
    "Published",
    "PublishedGain",
    "load_gains",
    "load_published",
    "load_ranges",
    "parse_interval",
    "published_slowdown",
    "read_reference",
]

_COLUMNS = ("panel", "workload", "system", "interval_steps", "metric", "value", "qualifier", "kind", "source")
_KINDS = ("paper", "artefact")
"""In the order of preference. Numbers of kind `measured` are ours, of another machine."""
MOST_VALUE = 1e18
"""Of a published number."""
_LEAST_VALUE = 1e-9
_MOST_INTERVAL = 10**9
_MOST_BYTES = 16 << 20
_MOST_ROWS = 10_000


@dataclass(frozen=True)
class Published:
    """Throughput without checkpoints divided by throughput with them, as published."""

    workload: str
    system: str
    interval_steps: int
    slowdown: float
    kind: str
    source: str


@dataclass(frozen=True)
class PublishedGain:
    """Goodput of PCcheck divided by that of `system`, as published."""

    workload: str
    system: str
    interval_steps: int
    gain: float
    source: str


def load_published(path: Path) -> list[Published]:
    """Every slowdown in the file, and those that its rates give.

    Left out: bounds (`qualifier` is `below`), rows without an interval, and rows of another panel than the workload's
    own, which were measured on several nodes. Raises LastgoodError, naming the file and the line.
    """
    found = []
    rates: dict[tuple[str, ...], dict[int, float]] = {}
    for number, line in read_reference(path):
        if line["kind"] not in _KINDS or line["qualifier"] == "below" or not line["interval_steps"]:
            continue
        if line["panel"] != panel_letter(line["workload"]):
            continue
        interval, value = _numbers(path, number, line)
        if line["metric"] == "slowdown":
            found.append(Published(line["workload"], line["system"], interval, value, line["kind"], line["source"]))
        elif line["metric"] == "iterations_per_s":
            key = (line["workload"], line["system"], line["kind"], line["source"])
            rates.setdefault(key, {})[interval] = value
    for (workload, system, kind, source), by_interval in rates.items():
        if 0 in by_interval and system != BASELINE:
            found += [
                Published(workload, system, interval, by_interval[0] / rate, kind, source)
                for interval, rate in by_interval.items()
                if interval
            ]
    return found


def load_gains(path: Path) -> list[PublishedGain]:
    """Every gain in goodput of one model at one interval; raises as `load_published` does.

    Left out: what is only said to be at most so (`qualifier` is not `equal`), and rows without an interval.
    """
    found = []
    for number, line in read_reference(path):
        if line["metric"] != "goodput_gain" or line["kind"] not in _KINDS:
            continue
        if line["qualifier"] == "equal" and line["interval_steps"]:
            interval, value = _numbers(path, number, line)
            found.append(PublishedGain(line["workload"], line["system"], interval, value, line["source"]))
    return found


def load_ranges(path: Path) -> list[tuple[str, float, str]]:
    """Metric, value and source of both ends of every published range (`qualifier` is `from` or `to`).

    Raises as `load_published` does.
    """
    found = []
    for number, line in read_reference(path):
        if line["kind"] in _KINDS and line["qualifier"] in ("from", "to"):
            found.append((line["metric"], _numbers(path, number, line)[1], line["source"]))
    return found


def read_reference(path: Path, columns: Sequence[str] = _COLUMNS) -> list[tuple[int, dict[str, str]]]:
    """The rows of a file of published numbers, each with its line. Raises LastgoodError, naming the file."""
    content = read_bytes(path, _MOST_BYTES, LastgoodError)
    return parse_csv(content, str(path), columns, most_bytes=_MOST_BYTES, most_rows=_MOST_ROWS, error=LastgoodError)


def parse_interval(text: str) -> int:
    """Steps between checkpoints, 0 for none. Raises ValueError."""
    number = parse_number(text, least=0, most=_MOST_INTERVAL)
    if number != int(number):
        raise ValueError(f"{text!r} is no whole number")
    return int(number)


def _numbers(path: Path, number: int, line: dict[str, str]) -> tuple[int, float]:
    try:
        return parse_interval(line["interval_steps"]), parse_number(line["value"], least=_LEAST_VALUE, most=MOST_VALUE)
    except ValueError as error:
        raise LastgoodError(f"{path}:{number}: {error}") from error


def published_slowdown(published: Sequence[Published], spec: RunSpec) -> Published | None:
    """The number for a run's model, system and interval: a paper's own before its artefact's; None if there is none."""
    wanted = (spec.workload, spec.system, spec.interval_steps)
    fitting = [one for one in published if (one.workload, one.system, one.interval_steps) == wanted]
    return min(fitting, key=lambda one: _KINDS.index(one.kind), default=None)
