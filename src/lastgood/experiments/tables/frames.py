"""A figure's CSV as a frame whose columns hold what their row's class says: numbers, text, True or False."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lastgood.errors import LastgoodError
from lastgood.experiments.formulas.pairs import Interval
from lastgood.text import read_bytes

__all__ = ["pair_interval", "read_frame", "read_panel"]

_MOST_BYTES = 64 << 20
_MOST_COLUMNS = 1000
_MOST_NUMBER = 1e18
"""Nothing that a figure shows comes near it."""


def read_frame(path: Path, *rows: type[Any]) -> pd.DataFrame:
    """Read a CSV file whose rows are those of a dataclass: of several, of the one that has most of its columns.

    Other columns are kept as they come. Raises LastgoodError, naming the file, and row and column if one is wrong:
    text or nothing in a column of numbers, a number that is not finite or beyond 10^18. A file that lacks columns is
    the caller's to judge.
    """
    content = read_bytes(path, _MOST_BYTES, LastgoodError)
    named = content.partition(b"\n")[0].decode(errors="replace").strip().split(",")
    if len(named) > _MOST_COLUMNS or len(set(named)) < len(named):
        raise LastgoodError(f"{path}: not a figure's CSV file: its first line names a column twice, or too many")
    kinds = max(
        ({field.name: str(field.type) for field in fields(row)} for row in rows),
        key=lambda kinds: len(kinds.keys() & set(named)),
    )
    try:
        with warnings.catch_warnings():
            # Of rows with more fields than the first line pandas only warns, and drops what is too much.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.BytesIO(content),
                # Text is never to be taken for numbers, however a revision's digits fall.
                dtype={name: str for name, kind in kinds.items() if "str" in kind},
                keep_default_na=False,
                na_values=[""],
                index_col=False,
                low_memory=False,
            )
    except (ValueError, pd.errors.ParserWarning) as error:  # pandas' own errors are ValueErrors
        raise LastgoodError(f"{path}: not a figure's CSV file: {str(error).strip()}") from error
    for name, kind in kinds.items():
        if name in frame.columns and "str" not in kind:
            _check_column(path, frame, name, kind)
    return frame


def read_panel(path: Path, row: type[Any], later: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Read a tidy CSV of rows of `row`, all of whose columns it must have but for those of `later`, given by value.

    Raises LastgoodError, naming the file and what is wrong, if it is not one.
    """
    frame = read_frame(path, row)
    for name, value in (later or {}).items():
        if name not in frame.columns:
            frame[name] = value
    lacking = [field.name for field in fields(row) if field.name not in frame.columns]
    if lacking:
        raise LastgoodError(f"{path}: columns are missing: {', '.join(lacking)}; make it with `lastgood collect`")
    if frame.empty:
        raise LastgoodError(f"{path}: holds no run")
    return frame


def _check_column(path: Path, frame: pd.DataFrame, name: str, kind: str) -> None:
    column = frame[name]
    empty = column.isna()
    if "bool" in kind:
        wrong = ~column.isin([True, False, "True", "False"]) & ~empty
        wanted = "True or False"
    else:
        numbers = _numbers(column)
        wrong = ~(numbers.abs() <= _MOST_NUMBER) & ~empty
        wanted = "a number up to 10^18"
    if "None" not in kind:
        wrong |= empty
    if wrong.any():
        place = int(np.flatnonzero(wrong.to_numpy())[0])
        raise LastgoodError(
            f"{path}: not a figure's CSV file: row {place + 1} holds {str(column.iloc[place])[:40]!r} in column "
            f"{name}, and {wanted} belongs there"
        )


def _numbers(column: pd.Series) -> pd.Series:
    """NaN if it is not a number."""
    if column.dtype == bool:
        return pd.Series(np.nan, column.index)
    try:
        return pd.to_numeric(column, errors="coerce")
    except OverflowError:  # whole numbers of hundreds of digits
        return pd.to_numeric(column.astype(str), errors="coerce")


def pair_interval(runs: pd.DataFrame) -> Interval | None:
    """The ratio to training without checkpoints: of several repetitions the widest interval.

    None if a run of the cell was measured in one stretch.
    """
    if "ratio_low" not in runs.columns or runs.empty or runs["ratio_low"].isna().any():
        return None
    return Interval(
        float(runs["ratio_low"].min()), float(runs["ratio_to_none"].median()), float(runs["ratio_high"].max())
    )
