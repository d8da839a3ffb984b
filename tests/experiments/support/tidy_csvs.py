"""Tidy CSV files made from made-up records, for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.tables.runs import collect
from tests.experiments.support.records import make_ceilings, make_record

STATE_BYTES = 200 << 20
NONE_RSS = 1 << 30


def runs(system: str, rates: dict[int, list[float]], *, persist_s: float = 0.25, **overrides: Any) -> list[RunRecord]:
    """Runs of one system: interval to throughputs by repetition; proved, and one state above `none` in memory."""
    values = {"proof": True, "peak_rss_bytes": NONE_RSS + STATE_BYTES, **overrides}
    return [
        make_record(
            system,
            interval,
            repetition,
            iterations_per_s=rate,
            measured_steps=4 * interval,
            state_bytes=STATE_BYTES,
            persist_s=[persist_s] * 4,
            **values,
        )
        for interval, found in rates.items()
        for repetition, rate in enumerate(found)
    ]


def none(rates: list[float], **overrides: Any) -> list[RunRecord]:
    """Runs without checkpoints."""
    return [
        make_record(
            "none", 0, repetition, iterations_per_s=rate, state_bytes=STATE_BYTES, peak_rss_bytes=NONE_RSS, **overrides
        )
        for repetition, rate in enumerate(rates)
    ]


def write_panel(folder: Path, records: list[RunRecord], workload: str = "vgg16", figure: str = "fig8") -> Path:
    """The tidy CSV of one panel."""
    path = folder / f"{figure}_{workload}.csv"
    collect(figure, workload, records, make_ceilings()).write(path, folder / f"{figure}_{workload}_wide.csv")
    return path
