"""The CSV files of FlowCheck's figure: a row for each number that a panel shows, whatever its part.

A number is measured, simulated, or follows from a formula or a model; those of a paper stand beside them under their
own source. `measure` says which small picture of its panel shows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from lastgood.errors import LastgoodError
from lastgood.experiments.records.flowcheck import FlowcheckRecord
from lastgood.experiments.systems.papers import FLOWCHECK
from lastgood.experiments.tables.csv_text import Collected, median_lines
from lastgood.experiments.tables.flowcheck_numbers import NUMBERS, PUBLISHED_MEASURES, WORDS, Number
from lastgood.experiments.tables.panels import PanelRecords, load_panel
from lastgood.experiments.tables.published import read_reference
from lastgood.text import parse_number

__all__ = ["FLOWCHECK_COLUMNS", "FlowcheckRow", "collect_flowcheck", "collect_flowcheck_files"]

_LEAST: Final = 1e-300
_MOST: Final = 1e18


@dataclass(frozen=True)
class FlowcheckRow:
    """The fields are the columns of the tidy CSV, in their order. None is an empty field."""

    figure: str
    panel: str
    workload: str
    """The part, as `panel`."""
    system: str
    machine: str
    scale: str
    repetition: int
    measure: str
    series: str
    source: str
    place: str
    x: float | None
    y: float
    y_low: float | None
    y_high: float | None
    count: int | None
    note: str | None
    setting: str | None
    paper_source: str | None
    words: str
    """What the part was asked for, for the caption."""
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    torch: str
    git_revision: str | None
    git_dirty: bool | None
    started_at: str
    record: str
    runs_expected: int
    runs_missing: str


FLOWCHECK_COLUMNS = tuple(field.name for field in fields(FlowcheckRow))


def collect_flowcheck_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    _ceilings: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,
) -> Collected[FlowcheckRow]:
    """Load records (`load_panel`) and collect them. Published numbers of the panel come from `reference`.

    No ceiling of the machine bounds any of these numbers.
    """
    published = [] if reference is None else list(_published(reference, panel))
    return collect_flowcheck(load_panel(FlowcheckRecord, figure, panel, paths, expected, partial=partial), published)


def collect_flowcheck(of: PanelRecords[FlowcheckRecord], published: Sequence[Number] = ()) -> Collected[FlowcheckRow]:
    """Pure. Raises LastgoodError for records of more than one setting, or of several machines."""
    if len({(record.spec.cell_hash, record.spec.machine) for record in of.records}) > 1:
        raise LastgoodError(f"{of.name}: records of different settings or machines; a panel shows one")
    rows = []
    for record in sorted(of.records, key=lambda record: record.spec.repetition):
        first = record is of.records[0]
        # What follows from the settings is the same for all repetitions, and so is what others published.
        numbers = [*NUMBERS[record.spec.part](record), *(published if first else ())]
        common = {
            **of.shared_columns(record, FLOWCHECK_COLUMNS),
            "workload": record.spec.part,
            "system": FLOWCHECK,
            "words": WORDS[record.spec.part](record),
        }
        rows += [FlowcheckRow(**common, **vars(number)) for number in numbers]
    marks = [mark for record in of.records for mark in record.marks()]
    return of.collected(rows, FLOWCHECK_COLUMNS, _wide(rows), marks)


def _published(path: Path, panel: str) -> Iterator[Number]:
    """The rows of this panel; `metric` is the measure, `interval_steps` is empty, `workload` the place."""
    for number, line in read_reference(path, _REFERENCE_COLUMNS):
        if line["panel"] != panel:
            continue
        try:
            value = parse_number(line["value"], least=_LEAST, most=_MOST)
            x = parse_number(line["x"], least=_LEAST, most=_MOST) if line["x"] else None
        except ValueError as error:
            raise LastgoodError(f"{path}:{number}: {error}") from error
        yield Number(
            measure=PUBLISHED_MEASURES.get(line["metric"], line["metric"]),
            series=line["series"],
            source="published",
            place=line["x"],
            x=x,
            y=value,
            setting=line["setting"],
            paper_source=line["source"],
        )


_REFERENCE_COLUMNS: Final = ("panel", "metric", "value", "x", "series", "setting", "source")


def _wide(rows: Sequence[FlowcheckRow]) -> list[list[str]]:
    """Medians over repetitions: a line for each measure, series and source, a column for each place."""
    values: dict[tuple[tuple[str, str, str], str], list[float]] = defaultdict(list)
    for row in rows:
        values[(row.measure, row.series, row.source), row.place].append(row.y)
    names = {key: ", ".join(key) for key in dict.fromkeys(name for name, _ in values)}
    places = list(dict.fromkeys(place for _, place in values))
    return [["number", *places], *median_lines(names, places, values)]
