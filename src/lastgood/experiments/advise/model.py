"""Which system, at which interval, gives the best goodput. Pure arithmetic over ceilings, or over measured runs.

A checkpoint of S bytes every f iterations of t seconds makes an iteration take, in the mean::

    t_c = max( t + (a S + e) / f,  b S / f )        e = max(0, S/C - h) if the copy overlaps with training, else 0

``a`` (stall, seconds a byte): training stands still for a S seconds a checkpoint, or is slowed down by as much.
``b`` (busy, seconds a byte): the system needs b S seconds between two checkpoints, however much of that training hides.
C is the copy ceiling and h the time from a save to the next update, as in the bound (docs/timing.md). On a CPU h is 0:
the copy takes memory and cores that the training would use, so it hides behind nothing.

Without records, a and b come from the ceilings (`model_costs`): each system as its paper describes it, on a machine
that loses nothing. With records they are fitted to measured ratios t_c/t (`fit_costs`), and are never better than the
ceilings allow. What a failure costs is the formula of PCcheck's artefact (goodput_model). docs/advise.md has more.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lastgood.checkpointers.registry import BASELINE, all_traits, system_traits
from lastgood.errors import ConfigError
from lastgood.experiments.formulas.goodput import goodput, lost_s
from lastgood.experiments.formulas.pairs import Interval
from lastgood.sinks import Sink

__all__ = [
    "ONE_NODE",
    "Advice",
    "Cell",
    "Costs",
    "Question",
    "Rates",
    "advise",
    "copies_in_peers",
    "default_intervals",
    "fit_costs",
    "goodput_fraction",
    "hide_share",
    "iteration_with_s",
    "model_costs",
    "undecided",
]

HIDE_SHARE = 0.85
"""h / t of a CUDA training if nothing better is known: the forward and backward passes' share of an iteration. The
`none` runs of figure 8 on a laptop had 0.84 to 0.94 (figures/measured)."""

MIN_SECONDS = 1e-6
MAX_STATE_BYTES = 1e15
MAX_ITERATION_S = 3600.0
MAX_MTBF_S = 1e7 * 3600
MAX_NODES = 1_000_000
MAX_INTERVAL = 10_000_000
_DAY_S = 86400.0
ONE_NODE = "with one node its two copies end together"
"""Why a system is left out whose copies are in two nodes' memory."""


@dataclass(frozen=True)
class Rates:
    """Ceilings in bytes per second."""

    write: float
    copy: float
    read: float | None = None
    network: float | None = None
    """To a peer; None if it was not measured."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the training runs that `copy` takes the state from."""


@dataclass(frozen=True)
class Question:
    """What is asked. Raises ConfigError, with the limits, for numbers that no training has."""

    state_bytes: float
    """One node's checkpoint: its share, if the state is sharded."""
    iteration_s: float
    mtbf_s: float
    """Mean time between failures of one node."""
    nodes: int
    hide_s: float | None = None
    restart_s: float = 0.0
    """From a failure to the begin of loading: noticing it, starting processes."""
    job_s: float = 7 * _DAY_S
    """Length of the job: what is lost when no copy of its state is left, half of it in the mean. 0 leaves that out."""
    max_in_flight: int = 2
    """N of PCcheck."""

    def __post_init__(self) -> None:
        for name, value, least, most, unit in (
            ("the state", self.state_bytes, 1.0, MAX_STATE_BYTES, " bytes"),
            ("the iteration time", self.iteration_s, MIN_SECONDS, MAX_ITERATION_S, " seconds"),
            ("the number of nodes", self.nodes, 1, MAX_NODES, ""),
            ("the MTBF of a node", self.mtbf_s, MIN_SECONDS * self.nodes, MAX_MTBF_S, " seconds"),
            ("the number of checkpoints in flight", self.max_in_flight, 1, 64, ""),
            ("the restart time", self.restart_s, 0.0, _DAY_S, " seconds"),
            ("the length of the job", self.job_s, 0.0, MAX_MTBF_S, " seconds"),
            ("the time that a copy can hide behind", self.hide_s or 0.0, 0.0, self.iteration_s, " seconds"),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} must be {least:g} to {most:g}{unit}, not {value:g}")

    @property
    def job_mtbf_s(self) -> float:
        """Mean time between failures of the job: any node ends it."""
        return self.mtbf_s / self.nodes

    def hidden_s(self, rates: Rates) -> float:
        """h, given or assumed."""
        if self.hide_s is not None:
            return self.hide_s
        return HIDE_SHARE * self.iteration_s if rates.device == "cuda" else 0.0


@dataclass(frozen=True)
class Costs:
    """What a checkpoint of one system costs, in seconds per byte."""

    system: str
    stall: float
    """a of this module's formula."""
    busy: float
    """b of this module's formula."""
    durable: float
    """From the call of `save` to durability."""
    load: float
    max_in_flight: int
    source: str
    """``model``, or ``records`` with how many cells."""
    measured: tuple[int, int] | None = None
    """The shortest and the longest interval that was measured; None for the model."""
    ends: tuple[Costs, Costs] | None = None
    """Costs fitted to the ends of the cells' intervals, the lower ones first; None if a cell has none."""


@dataclass(frozen=True)
class Cell:
    """Repetitions of one measured run: medians."""

    workload: str
    setting: str
    """What tells runs of one workload apart: its options, scale, threads and data."""
    system: str
    interval_steps: int
    state_bytes: float
    iteration_s: float
    hide_s: float
    ratio: float
    """t_c / t: what an iteration takes with checkpoints, the drain included, over its `none` run."""
    durable_s: float | None
    load_s: float | None
    max_in_flight: int
    ends: tuple[float, float] | None = None
    """Ends of the interval of `ratio`, of pairs of blocks or of repetitions; None if one run without pairs says all."""


@dataclass(frozen=True)
class Advice:
    """One system at one interval."""

    system: str
    interval_steps: int
    period_s: float
    """Seconds between two checkpoints."""
    slowdown: float
    """t_c / t."""
    lost_s: float
    """Mean time that a failure costs."""
    goodput: float
    """Useful iterations over those of a training without failures and checkpoints, 0 to 1."""
    useful_hours_per_day: float
    source: str
    goodput_interval: Interval | None = None
    """What `goodput` is if the measured ratios are at the ends of their intervals; None if there are none."""
    of_one_run: bool = False
    """Whether a cell behind it was measured by one run without pairs: nothing says how far off it is."""


def undecided(found: Sequence[Advice]) -> list[Advice]:
    """Of other systems, those of which nothing says that the first of `found` is better.

    Their intervals overlap, or one of the two rests on a single run without pairs, which has none.
    """
    best = found[0]
    return [row for row in found if row.system != best.system and _may_be_as_good(best, row)]


def _may_be_as_good(one: Advice, other: Advice) -> bool:
    if one.of_one_run or other.of_one_run:
        return True
    if one.goodput_interval is None or other.goodput_interval is None:
        return False  # of the model, which has no noise
    return one.goodput_interval.overlaps(other.goodput_interval)


def hide_share(cells: Sequence[Cell]) -> float:
    """The median of h / t over `cells`, at most 1."""
    return min(1.0, statistics.median(cell.hide_s / cell.iteration_s for cell in cells))


def copies_in_peers(system: str) -> bool:
    """Whether the only copies of the state are in the memory of two nodes, so that it needs two."""
    cost = system_traits(system).cost
    return cost is not None and cost.over is Sink.LINK


def model_costs(rates: Rates, question: Question) -> tuple[dict[str, Costs], list[str]]:
    """Each system that declares what it costs, on a machine that reaches its ceilings, and why others are left out.

    ``sync``: training waits for the write. ``gpm``: it waits for stores into mapped storage, at the slower of copy and
    disk (ASPLOS'22). ``checkfreq``: one checkpoint at a time, first copied, then written (FAST'21). ``pccheck``: copy
    and write overlap, several in flight, so only the disk's rate limits (ASPLOS'25). ``gemini``: the peer's memory in
    place of the disk (SOSP'23).
    """
    copy, network = 1 / rates.copy, None if rates.network is None else 1 / rates.network
    declared, reasons = all_traits()
    found, notes = {}, [f"{name} is left out: {reason}" for name, reason in reasons.items()]
    for name, traits in declared.items():
        model = traits.cost
        if model is None:
            continue
        write, load = 1 / rates.write, 1 / (rates.read or rates.write)
        if model.over is Sink.LINK:
            if question.nodes < 2:
                notes.append(f"{name} is left out: {ONE_NODE}")
                continue
            if network is None:
                notes.append(f"{name} is left out: no network to a peer was measured (`lastgood ceilings --peer`)")
                continue
            write = load = network
        taken = {"write": write, "slower": max(copy, write), "both": copy + write}[model.takes]
        stall, busy = (taken, 0.0) if model.waits else (0.0, taken)
        found[name] = Costs(name, stall, busy, taken, load, question.max_in_flight, "model")
    return found, notes


def fit_costs(cells: Sequence[Cell], rates: Rates, question: Question) -> dict[str, Costs]:
    """The costs of every system of `cells`, fitted to their ratios: least squares of log(t_c/t), over all workloads.

    a and b of systems in the model are never below the ceilings'. If cells do not tell a from b, b is the smallest.
    """
    floors, _ = model_costs(rates, question)
    by_system: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.system != BASELINE:
            by_system[cell.system].append(cell)
    found = {}
    for system, own in sorted(by_system.items()):
        floor = floors.get(system)
        stall, busy = _fit(own, rates, (floor.stall, floor.busy) if floor else (0.0, 0.0))
        durable = [cell.durable_s / cell.state_bytes for cell in own if cell.durable_s is not None]
        loads = [cell.load_s / cell.state_bytes for cell in own if cell.load_s is not None]
        intervals = [cell.interval_steps for cell in own]
        found[system] = Costs(
            system,
            stall,
            busy,
            statistics.median(durable) if durable else max(stall, busy),
            statistics.median(loads) if loads else 1 / (rates.read or rates.write),
            statistics.mode(cell.max_in_flight for cell in own),
            f"records, {len(own)} cells",
            (min(intervals), max(intervals)),
        )
        low, high = ([replace(cell, ratio=cell.ends[end]) for cell in own if cell.ends] for end in (0, 1))
        if len(low) == len(own):
            fitted = [_fit(cells, rates, (floor.stall, floor.busy) if floor else (0.0, 0.0)) for cells in (low, high)]
            better, worse = (replace(found[system], stall=stall, busy=busy) for stall, busy in fitted)
            found[system] = replace(found[system], ends=(better, worse))
    return found


def _fit(cells: Sequence[Cell], rates: Rates, floors: tuple[float, float]) -> tuple[float, float]:
    """The pair a, b: on a grid, then on finer ones round the best, since the function has kinks."""
    state, t, f, ratio = (
        np.array([getattr(cell, name) for cell in cells], dtype=np.float64)
        for name in ("state_bytes", "iteration_s", "interval_steps", "ratio")
    )
    exposed = np.array(
        [_exposed_s(c.system, c.state_bytes, c.hide_s if rates.device == "cuda" else 0.0, rates) for c in cells]
    )
    # From 10 TB/s to 1 MB/s, and nothing at all.
    coarse = np.concatenate(([0.0], np.geomspace(1e-13, 1e-6, 141)))
    stalls, busies = (np.unique(np.maximum(coarse, floor)) for floor in floors)
    best = (0.0, 0.0)
    for _ in range(14):
        a, b = stalls[:, None, None], busies[None, :, None]
        taken_s = np.maximum(t + (a * state + exposed) / f, b * state / f)
        error = np.square(np.log(taken_s / t) - np.log(ratio)).sum(axis=-1)
        # Among equals the smallest b, then the smallest a: the first in this order.
        limit = error.min() * (1 + 1e-9) + 1e-12
        busy_index, stall_index = np.argwhere((error <= limit).T)[0]
        best = float(stalls[stall_index]), float(busies[busy_index])
        stalls, busies = (_finer(axis, int(at)) for axis, at in ((stalls, stall_index), (busies, busy_index)))
    return best


def _finer(axis: np.ndarray, at: int) -> np.ndarray:
    """Ten steps each way, half as wide: while one number is still coarse, the other may be far from its best."""
    low, high = axis[max(0, at - 10)], axis[min(len(axis) - 1, at + 10)]
    return np.unique(np.concatenate((np.linspace(low, high, 41), axis[at : at + 1])))


def _exposed_s(system: str, state_bytes: float, hide_s: float, rates: Rates) -> float:
    return max(0.0, state_bytes / rates.copy - hide_s) if system_traits(system).hides_copy else 0.0


def iteration_with_s(costs: Costs, question: Question, interval_steps: int, rates: Rates) -> float:
    """t_c, in seconds: this module's formula."""
    exposed_s = _exposed_s(costs.system, question.state_bytes, question.hidden_s(rates), rates)
    stalled_s = question.iteration_s + (costs.stall * question.state_bytes + exposed_s) / interval_steps
    return max(stalled_s, costs.busy * question.state_bytes / interval_steps)


def goodput_fraction(
    system: str,
    interval_steps: int,
    question: Question,
    taken_s: float,
    *,
    durable_s: float,
    load_s: float,
    max_in_flight: int,
) -> tuple[float, float]:
    """Goodput, as a share of a training without failures and checkpoints, and the seconds that a failure costs.

    The artefact's formula over one day, with the failures that the MTBF gives in the mean. Copies in peers' memory
    have a term more: if the partner fails too before a new pair of copies is there, the job begins again.
    """
    begin_s = load_s + question.restart_s
    cost_s = lost_s(
        system,
        interval_steps,
        question.iteration_s,
        begin_s,
        durable_s,
        max_in_flight,
    )
    if copies_in_peers(system):
        exposed_s = begin_s + interval_steps * taken_s + durable_s
        cost_s += -math.expm1(-exposed_s / question.mtbf_s) * question.job_s / 2
    per_s = goodput(_DAY_S, _DAY_S / question.job_mtbf_s, cost_s, taken_s)
    return per_s * question.iteration_s, cost_s


def advise(
    question: Question, costs: Mapping[str, Costs], rates: Rates, intervals: Iterable[int] | None = None
) -> list[Advice]:
    """The best interval of every system, best goodput first; with `intervals`, every system at each of them.

    Ties go to the longer interval, which writes less.
    """
    asked = None if intervals is None else sorted(set(intervals))
    for interval in asked or ():
        if not 1 <= interval <= MAX_INTERVAL:
            raise ConfigError(f"an interval must be 1 to {MAX_INTERVAL} iterations, not {interval}")
    found = []
    for system, cost in costs.items():
        # The best one is often exactly where saves stop waiting for the one before, and that is no round number.
        tried = asked or {*default_intervals(question), _free_interval(cost, question, rates)}
        rows = [_advice(system, interval, question, cost, rates) for interval in tried]
        rows.sort(key=_order)
        found += rows if asked else rows[:1]
    return sorted(found, key=_order)


def _free_interval(costs: Costs, question: Question, rates: Rates) -> int:
    """The shortest interval at which a checkpoint is through before the next one: where both terms of t_c are equal."""
    exposed_s = _exposed_s(costs.system, question.state_bytes, question.hidden_s(rates), rates)
    waiting_s = (costs.busy - costs.stall) * question.state_bytes - exposed_s
    return min(MAX_INTERVAL, max(1, math.ceil(waiting_s / question.iteration_s)))


def _order(advice: Advice) -> tuple[float, int, str]:
    return (-advice.goodput, -advice.interval_steps, advice.system)


def _advice(system: str, interval_steps: int, question: Question, costs: Costs, rates: Rates) -> Advice:
    taken_s = iteration_with_s(costs, question, interval_steps, rates)
    share, cost_s = goodput_fraction(
        system,
        interval_steps,
        question,
        taken_s,
        durable_s=costs.durable * question.state_bytes,
        load_s=costs.load * question.state_bytes,
        max_in_flight=costs.max_in_flight,
    )
    shares = [_advice(system, interval_steps, question, end, rates).goodput for end in costs.ends or ()]
    outside = costs.measured is not None and not costs.measured[0] <= interval_steps <= costs.measured[1]
    return Advice(
        system,
        interval_steps,
        interval_steps * taken_s,
        taken_s / question.iteration_s,
        cost_s,
        share,
        24 * share,
        f"{costs.source}, extrapolated" if outside else costs.source,
        Interval(min(share, *shares), share, max(share, *shares)) if shares else None,
        of_one_run=costs.measured is not None and costs.ends is None,
    )


def default_intervals(question: Question) -> list[int]:
    """Round numbers from 1 up to the job's mean time between failures, in which no longer interval can be best."""
    most = min(MAX_INTERVAL, max(1, int(question.job_mtbf_s / question.iteration_s)))
    steps = (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.2, 2.5, 2.8, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9)
    found = {round(step * 10**power) for power in range(8) for step in steps} | set(range(1, 21))
    return sorted(interval for interval in found if interval <= most)
