"""A figure's CSV that says something else than its columns are for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from lastgood.errors import LastgoodError
from lastgood.experiments.tables.frames import read_frame


@dataclass
class Row:
    name: str
    count: int
    rate: float | None
    good: bool | None


@dataclass
class Other:
    first: str
    second: str


def test_what_belongs_there_is_read(tmp_path: Path) -> None:
    frame = read_frame(_written(tmp_path, "name,count,rate,good,more\n007,3,,True,x\nb,4,1.5,,y\n"), Row, Other)
    assert list(frame["name"]) == ["007", "b"] and list(frame["count"]) == [3, 4]
    assert frame["rate"].isna().tolist() == [True, False]


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("a,many,1,True", "count"),
        ("a,,1,True", "count"),
        ("a,inf,1,True", "count"),
        ("a,1e30,1,True", "count"),
        (f"a,{'9' * 400},1,True", "count"),
        ("a,True,1,True", "count"),
        ("a,1,fast,True", "rate"),
        ("a,1,-inf,True", "rate"),
        ("a,1,1,perhaps", "good"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_text_in_a_column_of_numbers_is_named_with_its_row(tmp_path: Path, line: str, column: str) -> None:
    path = _written(tmp_path, f"name,count,rate,good\n{line}\n{line}\n")
    with pytest.raises(LastgoodError, match=rf"x\.csv: not a figure's CSV file: row 1 .* in column {column}"):
        read_frame(path, Row, Other)


@pytest.mark.parametrize(
    "text",
    [
        "name,count,rate,good\na,1,1,True,5\n",
        "name,name\na,b\n",
        "",
        ",".join(f"c{number}" for number in range(2000)) + "\n",
        'name,count\n"a,1\n',
    ],
    ids=["too many fields", "a column twice", "empty", "too many columns", "an open quote"],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(LastgoodError, match=r"x\.csv: not a figure's CSV file"):
        read_frame(_written(tmp_path, text), Row)
