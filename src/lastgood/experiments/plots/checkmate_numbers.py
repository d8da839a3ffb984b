"""What Checkmate's figure shows, from the tidy CSV of one model: frequencies, lost work, and costs on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from lastgood.checkpointers.registry import system_traits
from lastgood.errors import LastgoodError
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.systems.labels import system_rank

__all__ = ["Cost", "Lost", "Reach", "costs", "lost_work", "others_of", "published_ranges", "reaches", "subject_of"]


@dataclass(frozen=True)
class Reach:
    """How often a system can take checkpoints at the throughput that the subject has with one in each iteration."""

    interval_steps: int | None
    """The shortest measured interval with at least that throughput; None if no measured one has it."""
    longest_steps: int
    """The longest that was measured."""


@dataclass(frozen=True)
class Lost:
    """Iterations that failures took back."""

    interval_steps: int
    steps: list[int]
    """One for each kill, of all repetitions."""

    @property
    def mean(self) -> float:
        """Per failure."""
        return sum(self.steps) / len(self.steps)


@dataclass(frozen=True)
class Cost:
    """What one iteration costs at one interval, medians over repetitions."""

    interval_steps: int
    trainer_cpu_s: float
    shadow_cpu_s: float
    """0 for systems without shadows."""
    handed_bytes: float
    """What trainers hand to storage, to peers or to shadows."""


def subject_of(frame: pd.DataFrame) -> str | None:
    """The system that others are compared with: the first, in the order of all figures, that takes gradients."""
    return next((name for name in _ranked(frame) if system_traits(name).takes_gradients), None)


def others_of(frame: pd.DataFrame) -> list[str]:
    """The systems that the subject is compared with, in the order of all figures."""
    return [name for name in _ranked(frame) if name not in (BASELINE, subject_of(frame))]


def _ranked(frame: pd.DataFrame) -> list[str]:
    return sorted(set(frame["system"]), key=system_rank)


def reaches(frame: pd.DataFrame) -> dict[str, Reach]:
    """By system, for all others. Empty if the subject itself was not measured.

    Throughput is that of training, without the drain at the end, which weighs more on the others in a short run.
    """
    own = frame[frame["system"] == subject_of(frame)]
    if own.empty:
        return {}
    wanted = float(own["iterations_per_s"].median())
    found = {}
    for system in others_of(frame):
        rates = frame[frame["system"] == system].groupby("interval_steps")["iterations_per_s"].median()
        enough = [int(interval) for interval in rates[rates >= wanted].index]
        found[system] = Reach(min(enough, default=None), int(rates.index.max()))
    return found


def lost_work(frame: pd.DataFrame) -> dict[str, Lost]:
    """By system: at the interval of its `Reach`, or else the longest measured; the subject at its own.

    Systems without a kill are not there. Raises LastgoodError for text that no number of steps is.
    """
    places = {system: reach.interval_steps or reach.longest_steps for system, reach in reaches(frame).items()}
    for system in _ranked(frame):
        if system != BASELINE and system not in places:
            places[system] = int(frame.loc[frame["system"] == system, "interval_steps"].max())
    found = {}
    for system in sorted(places, key=system_rank):
        rows = frame[(frame["system"] == system) & (frame["interval_steps"] == places[system])]
        steps = [number for text in rows["lost_steps"].dropna() for number in _whole_numbers(str(text))]
        if steps:
            found[system] = Lost(places[system], steps)
    return found


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(";")]
    except ValueError as error:
        raise LastgoodError(f"lost_steps {text!r}: not whole numbers with semicolons between them") from error


def costs(frame: pd.DataFrame) -> dict[str, Cost]:
    """By system, `none` included: at the shortest interval that was measured for it."""
    found = {}
    for system in _ranked(frame):
        rows = frame[frame["system"] == system]
        interval = int(rows["interval_steps"].min())
        rows = rows[rows["interval_steps"] == interval]
        steps = rows["measured_steps"]
        found[system] = Cost(
            interval,
            float((rows["cpu_s"] / steps).median()),
            float((rows["shadow_cpu_s"].fillna(0) / steps).median()),
            float((rows["bytes_written"] / steps).median()),
        )
    return found


def published_ranges(frame: pd.DataFrame) -> Mapping[str, tuple[float, float]]:
    """By metric, the lowest and highest published value, from the rows' own column."""
    texts = frame["paper_ranges"].dropna()
    found = {}
    for part in str(texts.iloc[0]).split(";") if len(texts) else ():
        try:
            metric, low, high = part.split(":")
            found[metric] = (float(low), float(high))
        except ValueError as error:
            raise LastgoodError(f"paper_ranges {part!r}: not METRIC:LOW:HIGH") from error
    return found
