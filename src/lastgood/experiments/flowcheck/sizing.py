"""Measures the rates from which the needs of a mirror node follow: one core's, of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from lastgood.experiments.flowcheck.lossy_ring import ring_iterations
from lastgood.experiments.machine.lock import machine_turn
from lastgood.experiments.optbench.bench import BenchOrder, run_bench
from lastgood.experiments.records.flowcheck import MeasuredRate, SizingResult, SizingSettings
from lastgood.mirror.streams.roce import RoceParser
from lastgood.units import format_bytes

__all__ = ["measure_sizing"]

Report = Callable[[str], None]
_PARSINGS: Final = 5


def measure_sizing(settings: SizingSettings, _seed: int, _scratch: Path, _logs: Path, report: Report) -> SizingResult:
    """Rates of updates and of parsing. Waits for this machine's turn to measure."""
    update = _update_rate(settings, report)
    with machine_turn(report):
        return SizingResult(rates=[_parse_rate(settings, report), update])


def _parse_rate(settings: SizingSettings, report: Report) -> MeasuredRate:
    """RoCEv2 as one watched rank of two shows it, from memory: parsed, and as many bytes copied once."""
    report(f"parsing {format_bytes(settings.traffic_bytes)} of RoCEv2 on one core")
    traffic = ring_iterations(2, (0,), settings.traffic_bytes, settings.payload_bytes, 1, 0)
    batch = next(traffic).batch
    frame_bytes = int(batch.table["captured"].sum())
    target = np.empty(settings.traffic_bytes, np.uint8)
    source = np.frombuffer(batch.data, np.uint8)[: settings.traffic_bytes]
    seconds = []
    for number in range(_PARSINGS + 1):
        parser = RoceParser(protocol="simple")
        began = time.perf_counter()
        parser.feed(batch)
        parser.finish()
        np.copyto(target[: len(source)], source)
        if number:  # the first one touches the memory
            seconds.append(time.perf_counter() - began)
    return MeasuredRate(
        name="parse",
        per_core_s=frame_bytes / statistics.median(seconds),
        how=f"RoCEv2 with {settings.payload_bytes} B a packet, its checksums, and a copy of the gradient",
        seconds=seconds,
    )


def _update_rate(settings: SizingSettings, report: Report) -> MeasuredRate:
    report(f"{settings.updates} updates of {settings.update_shape} by {settings.optimizer} on one core")
    order = BenchOrder(model=settings.update_shape, optimizer=settings.optimizer, threads=(1,), steps=settings.updates)
    result = run_bench(order, report)
    assert result is not None  # of the only rank
    (row,) = result.rows
    return MeasuredRate(
        name="update",
        per_core_s=row.parameters_per_s,
        how=f"{settings.optimizer} on {settings.update_shape}",
        seconds=row.update_s,
    )
