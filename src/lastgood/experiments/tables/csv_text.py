"""CSV files of a panel: the same fields and line ends in all of them."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from lastgood.files import write_result

__all__ = ["Collected", "field_text", "median_lines", "rows_csv"]

_Row = TypeVar("_Row")
_Name = TypeVar("_Name")
_Place = TypeVar("_Place")


@dataclass(frozen=True)
class Collected(Generic[_Row]):
    """The numbers of one panel."""

    tidy: list[_Row]
    columns: Sequence[str]
    """Of the tidy file: attributes of its rows."""
    wide: list[list[str]]
    """Rows of text: the header first."""
    warnings: list[str]
    """For the person who asked."""
    summary: str
    """How many runs it holds, in a few words."""

    def write(self, out_tidy: Path, out_wide: Path) -> None:
        """Write both CSV files, each complete or not at all."""
        write_result(out_wide, _csv_bytes(self.wide))
        write_result(out_tidy, rows_csv(self.tidy, self.columns))


def rows_csv(rows: Iterable[object], columns: Sequence[str]) -> bytes:
    """A file of `rows`, whose attributes are the columns."""
    return _csv_bytes([columns, *([field_text(getattr(row, name)) for name in columns] for row in rows)])


def median_lines(
    names: Mapping[_Name, str], places: Sequence[_Place], values: Mapping[tuple[_Name, _Place], Sequence[float]]
) -> list[list[str]]:
    """A line for each of `names`, with its text first: the median of its values at each place."""

    def median(name: _Name, place: _Place) -> str:
        found = values.get((name, place))
        return field_text(statistics.median(found) if found else None)

    return [[text, *(median(name, place) for place in places)] for name, text in names.items()]


def _csv_bytes(lines: Iterable[Sequence[str]]) -> bytes:
    """A file of `lines`, each a row of fields."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def field_text(value: object) -> str:
    """A field of a CSV; a float is written so that reading it back gives the same float."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
