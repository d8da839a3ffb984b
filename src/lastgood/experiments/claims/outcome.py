"""What a published number and its outcome are, and how a sample is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lastgood.experiments.claims.evidence import Evidence, Sample
from lastgood.experiments.systems.labels import system_label

__all__ = [
    "ONE_RUN",
    "Accepted",
    "Outcome",
    "Published",
    "Rule",
    "Verdict",
    "elsewhere",
    "judge",
    "not_testable",
    "unknown_metric",
]

Verdict = Literal["reproduced", "refuted", "not testable"]

ONE_RUN = "undecided, a side is one run without pairs, which does not tell an effect from noise"
"""Why a comparison of times or rates is not judged."""

_OTHER_NAMES = {"bytecheckpoint": "ByteCheckpoint", "datastates": "DataStates-LLM", "fastpersist": "FastPersist"}
"""Printed names of systems that are only in the published numbers."""
_METRIC_TEXTS = {
    "iterations_per_s": "throughput",
    "slowdown_worst_interval": "slowdown at its worst interval",
    "slowdown_best_interval": "slowdown at its best interval",
    "stall_gain": "stalls shorter by a factor of",
    "save_gain": "saves faster by a factor of",
    "load_gain": "loads faster by a factor of",
    "checkpoint_gain": "checkpoints faster by a factor of",
}


@dataclass(frozen=True)
class Published:
    """One row of figures/reference/*.csv; the fields are its columns."""

    figure: str
    panel: str
    workload: str
    system: str
    interval_steps: int | None
    metric: str
    value: float
    unit: str
    qualifier: str
    setting: str
    kind: str
    source: str

    @property
    def name(self) -> str:
        """The system's name in print."""
        return _OTHER_NAMES.get(self.system, system_label(self.system))


@dataclass(frozen=True)
class Outcome:
    """What became of one published number, for one workload of one machine."""

    statement: str
    workload: str
    sample: Sample
    accepted: str
    """The rule in words, with its limit."""
    verdict: Verdict
    reason: str
    tolerance: str


Rule = Callable[[Published, list[Published], Evidence], Iterator[Outcome]]


def elsewhere(published: Published) -> Outcome | None:
    """The outcome of a number that no single machine can test; None for all others."""
    for place in ("several nodes", "several ranks"):
        if place in published.setting:
            text = f"{published.name}: {_metric_text(published)} ({published.setting})"
            return not_testable(
                text, published.workload, f"needs {place}; these runs are of one process on one machine"
            )
    return None


def unknown_metric(published: Published) -> Outcome:
    """The outcome of a number that no rule is for."""
    text = f"{published.name}: {_metric_text(published)} ({published.setting})"
    return not_testable(text, published.workload, f"no rule tests {published.metric!r}")


@dataclass(frozen=True)
class Accepted:
    """What a claim allows, both ends included."""

    least: float = -math.inf
    most: float = math.inf

    def holds(self, low: float, high: float) -> bool:
        """Whether everything from `low` to `high` is allowed."""
        return self.least <= low and high <= self.most

    def beyond(self, low: float, high: float) -> float:
        """How far all of `low` to `high` is away from what is allowed; 0 or less if it is not."""
        return max(self.least - high, low - self.most)


def judge(
    statement: str,
    workload: str,
    sample: Sample,
    limits: Accepted,
    accepted: str,
    tolerance: str,
    *,
    easy: str = "",
    unlike: str = "",
) -> Outcome:
    """All repetitions must agree. Of what is timed one unpaired run decides nothing.

    Unpaired runs refute nothing either if they are further from each other than the nearest of them is from the limit:
    another run might keep it.

    `easy` says why keeping the limit proves nothing here, `unlike` why this machine cannot show the effect at all.
    """
    if not sample.good:
        return not_testable(statement, workload, sample.trouble or "no value", accepted, tolerance)
    low, high = sample.low, sample.high
    verdict: Verdict = "not testable"
    if unlike:
        reason = f"{_range(sample)}, but {unlike}"
    elif limits.holds(low, high) and easy:
        reason = f"{_range(sample)}, but {easy}"
    elif sample.of_one_run:
        reason = f"{ONE_RUN}: {_range(sample)}"
    elif limits.holds(low, high):
        verdict, reason = "reproduced", _range(sample)
    elif limits.beyond(low, high) > 0:
        if sample.interval or sample.counted or high - low <= limits.beyond(low, high):
            verdict, reason = "refuted", _range(sample)
        else:
            reason = f"undecided, repetitions scatter more than they are away from the limit: {_range(sample)}"
    else:
        why = "undecided, the limit lies in the interval" if sample.interval else "repetitions disagree"
        reason = f"{why}: {_range(sample)}"
    return Outcome(statement, workload, sample, accepted, verdict, reason, tolerance)


def not_testable(statement: str, workload: str, reason: str, accepted: str = "", tolerance: str = "") -> Outcome:
    """The outcome of a claim for which there is no number."""
    return Outcome(statement, workload, Sample(()), accepted, "not testable", reason, tolerance)


def _range(sample: Sample) -> str:
    if len(sample.values) == 1:
        return f"{sample.median:.3g} in one run"
    if sample.interval:
        return f"{sample.median:.3g} (95 % interval {sample.low:.3g} to {sample.high:.3g})"
    return f"{sample.median:.3g} ({sample.low:.3g} to {sample.high:.3g} in {len(sample.values)} values)"


def _metric_text(published: Published) -> str:
    qualifier = "" if published.qualifier == "equal" else f"{published.qualifier} "
    unit = "" if published.unit == "ratio" else f" {published.unit}"
    interval = "" if published.interval_steps is None else f" at interval {published.interval_steps}"
    words = _METRIC_TEXTS.get(published.metric, published.metric.replace("_", " "))
    return f"{words} {qualifier}{published.value:.4g}{unit}{interval}"
