"""A rule for each kind of published number: what counts as reproduced, and when this machine cannot tell.

Only ratios and shapes are compared. Limits are computed from the published number, so the rules hold no number of a
paper. docs/report.md says why each tolerance is what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from lastgood.checkpointers.registry import system_traits
from lastgood.errors import LastgoodError
from lastgood.experiments.claims.evidence import Evidence, json_object
from lastgood.experiments.claims.memory_rules import device_memory, host_memory, storage
from lastgood.experiments.claims.outcome import (
    ONE_RUN,
    Accepted,
    Outcome,
    Published,
    Rule,
    Verdict,
    judge,
    not_testable,
    unknown_metric,
)
from lastgood.experiments.systems.labels import system_label
from lastgood.experiments.systems.papers import PCCHECK, PCCHECK_EARLIER

__all__ = ["RULES"]

_OVERHEAD_POINTS = 2.0
_SLOWDOWN_SLACK = 0.03
_OWN_INTERVAL_POINTS = 1.0
_ALIKE = 0.1
_SHARE_OF_GAP = 0.5
_SHARE_OF_LOAD = 0.5
_WHY_OVERHEAD = (
    f"{_OVERHEAD_POINTS:g} points on top: the setting is not stated, and the paper's own interval rule allows 5 %"
)
_WHY_SLOWDOWN = f"{_SLOWDOWN_SLACK:g} on top: what repetitions on one machine differ by"
_WHY_GAP = (
    "half of the published gain at least: the gain grows with state size over disk rate and step time, which differ"
)
_WHY_ALIKE = "published as within a tenth of each other, so that is what is asked"
_WHY_SHAPE = "a shape: which of the measured intervals is worst, no number"
_WHY_OWN = f"{_OWN_INTERVAL_POINTS:g} point on top: the budget is kept on average, and runs are short"


def _overhead(published: Published, _others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """About v percent at an interval, on whatever was trained."""
    interval = _interval(published)
    limit = published.value + _OVERHEAD_POINTS
    for workload in _workloads(published, evidence):
        statement = f"{published.name} at interval {interval} costs about {published.value:g} % of throughput"
        sample = evidence.slowdown(workload, published.system, interval).map(lambda value: 100 * (value - 1))
        accepted = f"at most {limit:g} % overhead"
        easy = _too_easy(evidence, workload, published.system, interval, 1 + limit / 100)
        yield judge(statement, workload, sample, Accepted(most=limit), accepted, _WHY_OVERHEAD, easy=easy)


def _slowdown(published: Published, others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """A slowdown at an interval: an upper limit for PCcheck; for the others the gap to PCcheck in the same setting."""
    interval = _interval(published)
    if published.system == PCCHECK:
        limit = published.value + _SLOWDOWN_SLACK
        for workload in _workloads(published, evidence):
            slows = f"{published.name} slows training down by {published.value:g}"
            statement = f"{slows} at interval {interval} ({published.setting})"
            sample = evidence.slowdown(workload, published.system, interval)
            easy = _too_easy(evidence, workload, published.system, interval, limit)
            yield judge(
                statement,
                workload,
                sample,
                Accepted(most=limit),
                f"at most {limit:.3g}",
                _WHY_SLOWDOWN,
                easy=easy,
            )
        return
    best = _twin(published, others, PCCHECK, interval)
    if best is None:
        yield unknown_metric(published)
        return
    gain = published.value / best.value
    yield from _gap(published, evidence, gain, published.value)


def _artefact_throughput(published: Published, others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """Throughputs in the artefact's files: PCcheck's over another system's, each by its own run without checkpoints."""
    interval = _interval(published)
    if interval == 0 or published.system == PCCHECK:
        return  # part of the other systems' ratios
    rows = [
        _twin(published, others, published.system, 0),
        _twin(published, others, PCCHECK, interval),
        _twin(published, others, PCCHECK, 0),
    ]
    if any(row is None for row in rows):
        yield unknown_metric(published)
        return
    own_none, best, best_none = (row.value for row in rows if row is not None)
    slowdown = own_none / published.value
    yield from _gap(published, evidence, slowdown * best / best_none, slowdown)


def _gap(published: Published, evidence: Evidence, gain: float, slowdown: float) -> Iterator[Outcome]:
    """PCcheck is `gain` times as fast as a system whose own published slowdown is `slowdown`."""
    interval = _interval(published)
    limit = 1 + _SHARE_OF_GAP * (gain - 1)
    for workload in _workloads(published, evidence):
        statement = (
            f"PCcheck is {gain:.3g} times as fast as {published.name} at interval {interval} ({published.setting})"
        )
        sample = evidence.gain(workload, PCCHECK, published.system, interval)
        if abs(gain - 1) <= _ALIKE:
            accepted = f"between {1 - _ALIKE:g} and {1 + _ALIKE:g}"
            slow = evidence.slowest(workload, interval)
            easy = "" if slow is None or slow[1] > 1 + _ALIKE else _cheap(interval, slow)
            yield judge(statement, workload, sample, Accepted(1 - _ALIKE, 1 + _ALIKE), accepted, _WHY_ALIKE, easy=easy)
            continue
        unlike = _other_load(published, evidence, workload, interval, slowdown)
        accepted = f"at least {limit:.3g}"
        yield judge(statement, workload, sample, Accepted(least=limit), accepted, _WHY_GAP, unlike=unlike)


def _interval_rule(published: Published, _others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """At intervals f >= Tw / (N q t) the slowdown is at most q."""
    q = published.value
    for workload in _workloads(published, evidence):
        statement = f"At intervals of at least Tw / (N q t), {published.name} slows down by at most q = {q:g}"
        accepted = f"at most {q + _SLOWDOWN_SLACK:.3g} at each such interval"
        kept = []
        for interval in evidence.intervals(workload, published.system):
            sample = evidence.slowdown(workload, published.system, interval)
            least = _least_interval(evidence.cell(workload, published.system, interval), q)
            if sample.good and least is not None and interval >= least:
                easy = _too_easy(evidence, workload, published.system, interval, q + _SLOWDOWN_SLACK)
                kept.append((sample, interval, easy))
        if not kept:
            reason = f"{workload}: no measured interval that the rule allows"
            yield not_testable(statement, workload, reason, accepted, _WHY_SLOWDOWN)
            continue
        telling = [one for one in kept if not one[2]]
        # The worst of them decides; if all are easy the hardest of those is shown.
        sample, interval, easy = max(telling or kept, key=lambda one: one[0].median)
        outcome = judge(
            statement, workload, sample, Accepted(most=q + _SLOWDOWN_SLACK), accepted, _WHY_SLOWDOWN, easy=easy
        )
        allowed = ", ".join(str(one[1]) for one in kept)
        yield replace(outcome, reason=f"{outcome.reason}; the rule allows {allowed}, shown is {interval}")


def _least_interval(cell: pd.DataFrame, q: float) -> float | None:
    if not {"persist_p99_s", "iteration_s", "system_options"} <= set(cell.columns):
        return None
    in_flight = json_object(cell["system_options"].iloc[0]).get("max_in_flight", 0)
    worst_s, iteration_s = float(cell["persist_p99_s"].max()), float(cell["iteration_s"].median())
    if not isinstance(in_flight, int) or in_flight < 1 or not math.isfinite(worst_s) or not iteration_s > 0:
        return None
    return worst_s / (in_flight * q * iteration_s)


def _worst_interval(published: Published, others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """The interval at which PCcheck gains most over the best of the earlier systems lies in a range."""
    first = published.value
    last = max(row.value for row in others if row.metric == "worst_interval_last" and row.setting == published.setting)
    for workload in _workloads(published, evidence):
        statement = f"Intervals from {first:g} to {last:g} are those that systems before PCcheck handle worst"
        accepted = "PCcheck's gain over the best of them is largest there, with intervals measured on both sides"
        gains = {}
        for interval in evidence.intervals(workload, PCCHECK):
            found = [evidence.gain(workload, PCCHECK, other, interval) for other in PCCHECK_EARLIER]
            good = [sample for sample in found if sample.good]
            if good:
                gains[interval] = min(good, key=lambda sample: sample.median)
        inside = {interval: sample for interval, sample in gains.items() if first <= interval <= last}
        outside = {interval: sample for interval, sample in gains.items() if interval not in inside}
        if not inside or not outside:
            lack = f"{workload}: needs PCcheck and an earlier system at intervals inside and outside the range"
            yield not_testable(statement, workload, lack, accepted, _WHY_SHAPE)
            continue
        best_in = max(inside, key=lambda interval: inside[interval].low)
        best_out = max(outside, key=lambda interval: outside[interval].low)
        most_in = max(sample.high for sample in inside.values())
        most_out = max(sample.high for sample in outside.values())
        numbers = ", ".join(f"{gains[interval].median:.3g} at {interval}" for interval in sorted(gains))
        both_sides = min(outside) < first and max(outside) > last
        verdict: Verdict = "not testable"
        lone = [interval for interval in sorted(gains) if gains[interval].of_one_run]
        if lone:
            reason = f"{ONE_RUN}, as at interval {lone[0]}: gain {numbers}"
        elif outside[best_out].low > most_in:
            verdict, reason = "refuted", f"gain {numbers}: largest at interval {best_out}"
        elif inside[best_in].low <= most_out:
            reason = f"gain {numbers}: repetitions do not tell intervals {best_in} and {best_out} apart"
        elif not both_sides:
            reason = f"gain {numbers}: largest at interval {best_in}, but one side of the range was not measured"
        else:
            verdict, reason = "reproduced", f"gain {numbers}: largest at interval {best_in}"
        yield Outcome(statement, workload, inside[best_in], accepted, verdict, reason, _WHY_SHAPE)


def _goodput_gain(published: Published, _others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """Goodput of PCcheck divided by another system's, at one cell or the largest over all cells."""
    limit = 1 + _SHARE_OF_GAP * (published.value - 1)
    workload = None if published.workload == "any" else published.workload
    where = f"at interval {published.interval_steps}" if published.interval_steps is not None else "at best"
    statement = f"PCcheck's goodput is {published.value:g} times that of {published.name} {where} ({published.setting})"
    accepted = f"at least {limit:.3g}"
    gains, source = evidence.goodput_gains(published.system, workload, published.interval_steps)
    shown = workload or "any"
    if not gains:
        place = "" if workload is None else f" with {workload} at interval {published.interval_steps}"
        reason = f"no goodput of both PCcheck and {published.name}{place} in a CSV of figure 9"
        yield not_testable(statement, shown, reason, accepted, _WHY_GAP)
        return
    cell = max(gains, key=lambda key: gains[key].median)
    # A gain that comes from waiting for writes needs writes that long in one of the cells at least.
    loads = [_other_load(published, evidence, model, interval, published.value) for model, interval in gains]
    unlike = loads[list(gains).index(cell)] if all(loads) else ""
    outcome = judge(statement, shown, gains[cell], Accepted(least=limit), accepted, _WHY_GAP, unlike=unlike)
    place = f"{cell[0]} at interval {cell[1]}, of {len(gains)} cells"
    yield replace(outcome, reason=f"{outcome.reason}; {source}, {place}")


def _own_interval(published: Published, _others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """An overhead limit at the interval that the system itself chose."""
    limit = published.value + _OWN_INTERVAL_POINTS
    statement = f"{published.name} costs at most {published.value:g} % at the interval that it chooses itself"
    accepted = f"at most {limit:g} % overhead"
    rows = evidence.own_intervals(published.system)
    if rows.empty:
        reason = f"no run in which {published.name} chose its interval"
        yield not_testable(statement, "any", reason, accepted, _WHY_OWN)
        return
    for workload, chosen in rows.groupby("workload"):
        sample = evidence.slowdown_of(chosen).map(lambda value: 100 * (value - 1))
        yield judge(statement, str(workload), sample, Accepted(most=limit), accepted, _WHY_OWN)


RULES: dict[str, Rule | None] = {
    "overhead": _overhead,
    "slowdown": _slowdown,
    "iterations_per_s": _artefact_throughput,
    "slowdown_by_rule": _interval_rule,
    "worst_interval_first": _worst_interval,
    "worst_interval_last": None,
    "goodput_gain": _goodput_gain,
    "host_memory": host_memory,
    "device_memory": device_memory,
    "storage": storage,
    "storage_beyond_in_flight": storage,
    "overhead_at_own_interval": _own_interval,
}
"""Metric of figures/reference/*.csv to its rule; None for a number that is a part of another row's claim."""


# -- parts of rules ----------------------------------------------------------------------------------------------------


def _workloads(published: Published, evidence: Evidence) -> list[str]:
    return (evidence.workloads or ["any"]) if published.workload == "any" else [published.workload]


def _interval(published: Published) -> int:
    if published.interval_steps is None:
        where = f"figures/reference: {published.figure} {published.workload} {published.system} {published.metric}"
        raise LastgoodError(f"{where}: this metric needs an interval_steps; give the row one")
    return published.interval_steps


def _twin(published: Published, others: list[Published], system: str, interval: int) -> Published | None:
    """The row of another system or interval in the same setting."""
    for row in others:
        same = (row.metric, row.setting, row.kind) == (published.metric, published.setting, published.kind)
        if same and row.system == system and row.interval_steps == interval:
            return row
    return None


def _too_easy(evidence: Evidence, workload: str, system: str, interval: int, limit: float) -> str:
    """A limit tells nothing if every other system keeps it as well."""
    slow = evidence.slowest(workload, interval, but=(system,))
    if slow is None:
        return f"no other system was measured at interval {interval}, so nothing shows that it is hard here"
    return "" if slow[1] > limit else _cheap(interval, slow)


def _cheap(interval: int, slow: tuple[str, float]) -> str:
    return (
        f"checkpoints at interval {interval} are too cheap here to tell: the slowest other system, "
        f"{system_label(slow[0])}, slows down by {slow[1]:.3g}"
    )


def _other_load(published: Published, evidence: Evidence, workload: str, interval: int, slowdown: float) -> str:
    """A slow system is slow because its writes take longer than an interval; if they do not, there is no gap."""
    load = evidence.load(workload, published.system, interval)
    # Training stands still while GPM writes; under others it waits only for what an interval is too short for.
    cost = system_traits(published.system).cost
    there = slowdown - 1 if cost is not None and cost.waits else slowdown
    if load is None or load >= _SHARE_OF_LOAD * there:
        return ""
    return (
        f"a write of {published.name} takes {100 * load:.0f} % of an interval here, and about {100 * there:.0f} % "
        "by the published number"
    )
