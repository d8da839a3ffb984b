"""How good the advice is: each workload in turn is held out, advised from the others, compared with its own runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lastgood.errors import ConfigError
from lastgood.experiments.advise.model import (
    Cell,
    Costs,
    Question,
    Rates,
    advise,
    fit_costs,
    goodput_fraction,
    hide_share,
    model_costs,
)

__all__ = ["Score", "score", "summary"]

_Key = tuple[str, int]
"""System and interval."""


@dataclass(frozen=True)
class Score:
    """One held-out workload at one MTBF. A regret is 1 - goodput / best measured goodput of the workload's cells."""

    workload: str
    job_mtbf_s: float
    best: str
    """System and interval of the best measured cell."""
    best_goodput: float
    from_records: str
    """The cell that the other workloads' records advise."""
    records_regret: float
    from_model: str
    """The cell that the ceilings alone advise."""
    model_regret: float
    from_others: str
    """No model at all: the cell that was best in the mean of the other workloads."""
    others_regret: float
    median_regret: float
    """Of a cell taken blindly: the median over the workload's cells."""
    worst_regret: float


def score(cells: Sequence[Cell], rates: Rates, job_mtbfs_s: Sequence[float]) -> list[Score]:
    """Score the advice at each of `job_mtbfs_s` (seconds between failures of the job).

    The goodput of a measured cell is the artefact's formula over its own ratio, write time and load time. The advice
    chooses among the same cells and sees, of the held-out workload, only state size, iteration time and h. Raises
    ConfigError if fewer than two workloads were measured.
    """
    workloads = sorted({cell.workload for cell in cells})
    if len(workloads) < 2:
        raise ConfigError(f"a score holds one workload out, and the records have only {', '.join(workloads) or 'none'}")
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.workload, cell.setting].append(cell)
    found = []
    for held_out, own in sorted(groups.items()):
        others = {key: group for key, group in groups.items() if key[0] != held_out[0]}
        for mtbf_s in job_mtbfs_s:
            question = _question(own, mtbf_s, rates)
            measured = _measured(own, question)
            fitted = fit_costs([cell for group in others.values() for cell in group], rates, question)
            elsewhere = [_measured(group, _question(group, mtbf_s, rates)) for group in others.values()]
            from_records = _choice(fitted, measured, question, rates)
            from_model = _choice(model_costs(rates, question)[0], measured, question, rates)
            from_others = _best_elsewhere(elsewhere, measured)
            best = max(measured, key=lambda key: measured[key])
            if measured[best] <= 0:
                raise ConfigError(
                    f"{held_out[0]}: at {question.job_mtbf_s:g} s between failures no measured cell gets anywhere; "
                    "ask for a longer MTBF"
                )
            regrets = {key: 1 - value / measured[best] for key, value in measured.items()}
            found.append(
                Score(
                    workload=held_out[0],
                    job_mtbf_s=question.job_mtbf_s,
                    best=_name(best),
                    best_goodput=measured[best],
                    from_records=_name(from_records),
                    records_regret=regrets[from_records],
                    from_model=_name(from_model),
                    model_regret=regrets[from_model],
                    from_others=_name(from_others),
                    others_regret=regrets[from_others],
                    median_regret=statistics.median(regrets.values()),
                    worst_regret=max(regrets.values()),
                )
            )
    return found


def _question(own: Sequence[Cell], job_mtbf_s: float, rates: Rates) -> Question:
    iteration_s = statistics.median(cell.iteration_s for cell in own)
    return Question(
        state_bytes=statistics.median(cell.state_bytes for cell in own),
        iteration_s=iteration_s,
        # Two nodes, so that Gemini can be there; that both its copies end together is not what runs measure.
        mtbf_s=2 * job_mtbf_s,
        nodes=2,
        job_s=0.0,
        hide_s=hide_share(own) * iteration_s if rates.device == "cuda" else None,
    )


def _measured(own: Sequence[Cell], question: Question) -> dict[_Key, float]:
    return {(cell.system, cell.interval_steps): _measured_goodput(cell, own, question) for cell in own}


def _best_elsewhere(elsewhere: Sequence[Mapping[_Key, float]], measured: Mapping[_Key, float]) -> _Key:
    """The cell that was best in the mean of other workloads, among those that were measured here too."""
    found = {
        key: [cells[key] for cells in elsewhere if key in cells]
        for key in measured
        if any(key in cells for cells in elsewhere)
    }
    if not found:
        raise ConfigError("the held-out workload shares no system and interval with the others: nothing to compare")
    return max(found, key=lambda key: statistics.mean(found[key]))


def _measured_goodput(cell: Cell, own: Sequence[Cell], question: Question) -> float:
    loads = [other.load_s for other in own if other.system == cell.system and other.load_s is not None]
    taken_s = cell.ratio * question.iteration_s
    share, _ = goodput_fraction(
        cell.system,
        cell.interval_steps,
        question,
        taken_s,
        durable_s=cell.durable_s or 0.0,
        load_s=cell.load_s if cell.load_s is not None else statistics.median(loads) if loads else 0.0,
        max_in_flight=cell.max_in_flight,
    )
    return share


def _choice(costs: Mapping[str, Costs], measured: Mapping[_Key, float], question: Question, rates: Rates) -> _Key:
    """The best advised cell among the measured ones."""
    intervals = {interval for _, interval in measured}
    for advice in advise(question, costs, rates, intervals):
        if (advice.system, advice.interval_steps) in measured:
            return advice.system, advice.interval_steps
    raise ConfigError(
        f"of the systems {', '.join(sorted({system for system, _ in measured}))} none is known to the advice; "
        f"it knows {', '.join(sorted(costs)) or 'none'}"
    )


def _name(cell: _Key) -> str:
    return f"{cell[0]} f{cell[1]}"


def summary(scores: Sequence[Score]) -> str:
    """One sentence: mean and largest regret of each way to choose."""
    parts = [
        f"{name} {statistics.mean(values):.2%} in the mean, {max(values):.2%} at most"
        for name, values in (
            ("advice from records", [found.records_regret for found in scores]),
            ("from the ceilings alone", [found.model_regret for found in scores]),
            ("the cell that was best elsewhere", [found.others_regret for found in scores]),
            ("a cell taken blindly (median)", [found.median_regret for found in scores]),
        )
    ]
    return f"Regret over {len(scores)} held-out cases: {'; '.join(parts)}."
