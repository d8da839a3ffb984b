"""The tidy CSV files of all figures together: what the report and the claims are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.figures.registry import figure_names
from lastgood.experiments.systems.labels import panel_title
from lastgood.experiments.tables.columns import TidyRow
from lastgood.experiments.tables.frames import read_frame
from lastgood.experiments.tables.goodput import GoodputRow
from lastgood.experiments.tables.optimizer import UpdateRow
from lastgood.units import MIB

__all__ = ["FigureCsv", "find_csvs", "goodput_rows", "load_csv", "load_csvs", "only_figure", "places_of", "run_rows"]

_MOST_BYTES = 64 * MIB
_OF_EVERY_FIGURE = ("figure", "panel", "workload", "system")
_OF_RUNS = ("machine", "scale", "interval_steps", "repetition", "durable_iterations_per_s", "none_iterations_per_s")


@dataclass(frozen=True)
class FigureCsv:
    """One figure's or panel's tidy CSV."""

    path: Path
    frame: pd.DataFrame

    @property
    def figure(self) -> str:
        """Its name, for instance ``fig8``."""
        return str(self.frame["figure"].iloc[0])

    @property
    def panel(self) -> str:
        """Its panel, for instance ``vgg16``."""
        return str(self.frame["panel"].iloc[0])

    @property
    def title(self) -> str:
        """``Figure 8a: VGG-16``."""
        return panel_title(self.figure, self.panel)


def find_csvs(folder: Path) -> list[Path]:
    """All tidy CSV files of known figures in `folder`, by name. Raises ConfigError if there is none."""
    figures = tuple(f"{name}_" for name in figure_names())
    found = sorted(
        path for path in folder.glob("*.csv") if path.name.startswith(figures) and not path.stem.endswith("_wide")
    )
    if not found:
        raise ConfigError(
            f"{folder}: no figure's CSV file (fig8_*.csv, checkmate_*.csv and so on) is there; run `snakemake` first, "
            "or name CSV files"
        )
    return found


def load_csvs(paths: Sequence[Path]) -> list[FigureCsv]:
    """Load files; the order of `paths` is no matter.

    Raises LastgoodError, naming the file, for one that is no figure's CSV, and ConfigError for a panel given twice.
    """
    loaded = sorted((load_csv(path) for path in paths), key=lambda one: (_number(one.figure), one.title, str(one.path)))
    seen: dict[tuple[str, str], Path] = {}
    for one in loaded:
        first = seen.setdefault((one.figure, one.panel), one.path)
        if first is not one.path:
            raise ConfigError(f"{first} and {one.path} both hold {one.figure} {one.panel}; leave one out")
    return loaded


def load_csv(path: Path) -> FigureCsv:
    """Load one file. Columns beyond those of every figure (figure, panel, workload, system) may be lacking."""
    frame = read_frame(path, TidyRow, GoodputRow, UpdateRow)
    lacking = [name for name in _OF_EVERY_FIGURE if name not in frame.columns]
    if lacking:
        raise LastgoodError(
            f"{path}: not a figure's tidy CSV: columns are missing: {', '.join(lacking)}; make it with the workflow"
        )
    if frame.empty:
        raise LastgoodError(f"{path}: holds no row; make it again with the workflow")
    for name in _OF_EVERY_FIGURE:
        if frame[name].isna().any():
            raise LastgoodError(f"{path}: a row has no {name}; make it again with the workflow")
    return FigureCsv(path, frame)


def only_figure(csvs: Sequence[FigureCsv], figure: str) -> pd.DataFrame:
    """The rows of one figure, of all panels; none, under the columns of runs, if it is not there."""
    frames = [one.frame for one in csvs if one.figure == figure]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*_OF_EVERY_FIGURE, *_OF_RUNS])


def places_of(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Machines and scales of the rows; none if a file has no such columns."""
    if not {"machine", "scale"} <= set(frame.columns):
        return []
    return sorted({(str(machine), str(scale)) for machine, scale in zip(frame["machine"], frame["scale"], strict=True)})


def run_rows(csvs: Sequence[FigureCsv]) -> pd.DataFrame:
    """The runs of figure 8: one setting for each system and interval, which the sweeps of other figures do not keep.

    Raises LastgoodError if a file lacks columns that runs have.
    """
    for one in csvs:
        lacking = [name for name in _OF_RUNS if one.figure == "fig8" and name not in one.frame.columns]
        if lacking:
            raise LastgoodError(
                f"{one.path}: columns are missing: {', '.join(lacking)}; make it again with `lastgood collect`"
            )
    return only_figure(csvs, "fig8")


def goodput_rows(csvs: Sequence[FigureCsv]) -> pd.DataFrame:
    """The rows of figure 9. Raises LastgoodError if a file lacks columns that name a cell."""
    for one in csvs:
        if one.figure == "fig9" and not {"machine", "scale", "interval_steps"} <= set(one.frame.columns):
            raise LastgoodError(f"{one.path}: columns that name a cell are missing; make it again with the workflow")
    return only_figure(csvs, "fig9")


def _number(figure: str) -> tuple[int, str]:
    digits = figure.removeprefix("fig")
    return (int(digits) if digits.isdecimal() and len(digits) < 6 else 1_000_000, figure)
