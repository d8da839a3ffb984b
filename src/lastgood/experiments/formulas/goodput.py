"""Goodput by formula: what failures leave of a training's throughput. Pure arithmetic.

The formulas are those of PCcheck's public artefact for its figure 9 (ASPLOS 2025; github.com/eth-easl/pccheck, the
goodput script), with f the interval in iterations, t the time of an iteration without checkpoints, t_c with them, L the
load time, Tw the median time until a checkpoint is written, N the checkpoints in flight, and F failures in T seconds::

    lost by a failure = f*t + L                               CheckFreq, Gemini
                        f*t/2 + L                             GPM, Ideal
                        L + f*t/2 + t * min(Tw/t, f*N) / 2    PCcheck
    goodput           = max(0, (T - F * lost) / t_c / T)      Ideal takes t for t_c

A failure meets the interval half-way in the mean, hence f*t/2; a checkpoint that persists in the background loses up to
as much again, since the newest durable one is older by the time that writing takes. The formula knows no other cost of
a failure: training goes on at once on a new machine, and what is lost is counted in iterations of t, not of t_c.
"""

from __future__ import annotations

import math

from lastgood.checkpointers.registry import BASELINE, system_traits
from lastgood.checkpointers.traits import LossFormula

__all__ = ["IDEAL", "formula_of", "goodput", "lost_s"]

IDEAL = "ideal"
"""The formula's name for a system whose checkpoints cost nothing."""


def formula_of(system: str) -> LossFormula:
    """What a failure costs under `system`, as it declares; Ideal is durable when `save` returns.

    The artefact has no formula for systems beside PCcheck's, CheckFreq's, Gemini's and GPM's. What is durable when
    save() returns loses what GPM loses; what persists in the background, one checkpoint at a time, what CheckFreq
    loses. Raises ValueError for the baseline, which has no checkpoint to go back to.
    """
    if system == BASELINE:
        raise ValueError(f"system {BASELINE!r} has no checkpoint to go back to, so no formula holds for it")
    return "half_interval" if system == IDEAL else system_traits(system).loss


def lost_s(
    system: str, interval_steps: int, iteration_s: float, load_s: float, write_s: float, max_in_flight: int
) -> float:
    """Seconds of work that a failure costs in the mean under `system` (f, t, L, Tw and N of the module's formulas).

    `write_s` and `max_in_flight` matter for PCcheck only. Raises ValueError if a term is outside its range.
    """
    formula = formula_of(system)
    _check("interval_steps", interval_steps, least=1)
    _check("iteration_s", iteration_s, above=0)
    _check("load_s", load_s, least=0)
    interval_s = interval_steps * iteration_s
    if formula == "interval":
        return interval_s + load_s
    if formula == "half_interval":
        return interval_s / 2 + load_s
    _check("write_s", write_s, least=0)
    _check("max_in_flight", max_in_flight, least=1)
    late_s = iteration_s * min(write_s / iteration_s, interval_steps * max_in_flight) / 2
    return load_s + interval_s / 2 + late_s


def goodput(trace_s: float, failures: float, lost_s: float, iteration_with_s: float) -> float:
    """Useful iterations per second over a trace of `trace_s` seconds with `failures` failures of `lost_s` seconds each.

    `iteration_with_s` is the time of an iteration with its share of the checkpoints; Ideal takes it without. A mean
    number of failures may be a fraction. Raises ValueError if a term is outside its range.
    """
    _check("trace_s", trace_s, above=0)
    _check("failures", failures, least=0)
    _check("lost_s", lost_s, least=0)
    _check("iteration_with_s", iteration_with_s, above=0)
    return max(0.0, (trace_s - failures * lost_s) / iteration_with_s / trace_s)


def _check(name: str, value: float, *, least: float | None = None, above: float | None = None) -> None:
    if not math.isfinite(value) or (least is not None and value < least) or (above is not None and value <= above):
        limit = f"at least {least}" if least is not None else f"above {above}"
        raise ValueError(f"{name} must be a finite number {limit}, not {value!r}")
