"""The text of CSV files: the same fields and line ends in all of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from lastgood.files import write_result

__all__ = ["field_text", "write_tables"]


def write_tables(
    out_tidy: Path, columns: Sequence[str], rows: Iterable[object], out_wide: Path, wide: Iterable[Sequence[str]]
) -> None:
    """Write a tidy CSV, whose `rows` have the `columns` as attributes, and a wide one, each complete or not at all."""
    write_result(out_wide, _csv_bytes(wide))
    write_result(
        out_tidy, _csv_bytes([columns, *([field_text(getattr(row, name)) for name in columns] for row in rows)])
    )


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
