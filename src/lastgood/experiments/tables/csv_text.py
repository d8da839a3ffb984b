"""The text of CSV files: the same fields and line ends in all of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

__all__ = ["csv_bytes", "field_text"]


def csv_bytes(lines: Iterable[Sequence[str]]) -> bytes:
    """A file of `lines`, each a row of fields."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def field_text(value: object) -> str:
    """A field of a CSV; a float is written so that reading it back gives the same float."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
