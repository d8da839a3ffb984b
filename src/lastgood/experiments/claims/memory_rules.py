"""The rules for published memory and storage, in sizes of the state."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lastgood.checkpointers.registry import system_traits
from lastgood.experiments.claims.evidence import Evidence
from lastgood.experiments.claims.outcome import Accepted, Outcome, Published, judge, not_testable
from lastgood.experiments.systems.labels import system_label
from lastgood.sinks import Sink
from lastgood.units import MIB, format_bytes

__all__ = ["device_memory", "host_memory", "storage"]

_HOST_STATES = 0.5
_DEVICE_STATES = 0.1
_SMALLEST_STATE = 64 * MIB

_WHY_HOST = f"{_HOST_STATES:g} states either way: the peak of the process holds the allocator's slack and buffers too"
_WHY_DEVICE = f"{_DEVICE_STATES:g} states either way: what an allocator's rounding differs by"


def host_memory(published: Published, others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """Host memory in states: what the process needs beyond the `none` run."""
    if published.qualifier == "up to":
        return  # the upper end of a range; the row of the lower end tests both
    tops = [
        row.value
        for row in others
        if (row.metric, row.system, row.qualifier) == (published.metric, published.system, "up to")
    ]
    top = max([published.value, *tops])
    span = f"{published.value:g} to {top:g}" if top > published.value else f"{published.value:g}"
    statement = f"{published.name} needs {span} state{'' if span == '1' else 's'} of host memory"
    low, high = published.value - _HOST_STATES, top + _HOST_STATES
    accepted = f"{max(low, 0):g} to {high:g} states"
    workload, problem = _largest(evidence, published.system)
    devices = set(evidence.runs["device"]) if "device" in evidence.runs.columns else set()
    if system_traits(published.system).safe_in is Sink.MEMORY:
        problem = "the copy is in another process, and peak_rss_bytes is of the training process"
    elif system_traits(published.system).maps_storage and devices == {"cpu"}:
        problem = "on the CPU the mapped file itself is resident memory of the process"
    if problem:
        yield not_testable(statement, workload or "any", problem, accepted, _WHY_HOST)
        return
    sample = evidence.memory(workload, published.system, "peak_rss_bytes")
    yield judge(statement, workload, sample, Accepted(low, high), accepted, _WHY_HOST)


def device_memory(published: Published, _others: list[Published], evidence: Evidence) -> Iterator[Outcome]:
    """Device memory in states: the training's own, and what the system adds to it."""
    statement = f"{published.name} needs {published.value:g} state of device memory, the training's own"
    low = published.value - _DEVICE_STATES
    high = math.inf if published.qualifier == "at least" else published.value + _DEVICE_STATES
    accepted = f"{low:g} to {high:g} states" if math.isfinite(high) else f"at least {low:g} states"
    workload, problem = _largest(evidence, published.system)
    if "device" not in evidence.runs.columns or "cuda" not in set(evidence.runs["device"]):
        problem = "no run on a device"
    if problem:
        yield not_testable(statement, workload or "any", problem, accepted, _WHY_DEVICE)
        return
    sample = evidence.memory(workload, published.system, "peak_device_bytes").map(lambda extra: 1 + extra)
    yield judge(statement, workload, sample, Accepted(low, high), accepted, _WHY_DEVICE)


def storage(published: Published, _others: list[Published], _evidence: Evidence) -> Iterator[Outcome]:
    """Space on storage: the CSV files do not hold it."""
    amount = (
        "one more state than are in flight" if published.metric.endswith("in_flight") else f"{published.value:g} states"
    )
    statement = f"{published.name} needs {amount} of storage"
    yield not_testable(statement, "any", "the CSV files hold what was written, not the space that files take")


def _largest(evidence: Evidence, system: str) -> tuple[str, str]:
    """The workload with the largest state that `system` was measured with, or why there is none."""
    runs = evidence.runs
    if not len(runs) or "state_bytes" not in runs.columns or system not in set(runs["system"]):
        return "", f"no run of {system_label(system)}"
    chosen = runs[runs["system"] == system]
    sizes = chosen.groupby("workload")["state_bytes"].max()
    size = float(sizes.max())
    if size < _SMALLEST_STATE:
        return str(sizes.idxmax()), f"states of {format_bytes(size)} are lost in the noise of a process's memory"
    return str(sizes.idxmax()), ""
