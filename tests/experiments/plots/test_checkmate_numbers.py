"""What Checkmate's figure shows, against a plain count over the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import LastgoodError
from lastgood.experiments.plots.checkmate_numbers import (
    costs,
    lost_work,
    others_of,
    published_ranges,
    reaches,
)


def frame_of(*rows: dict[str, Any]) -> pd.DataFrame:
    plain = {
        "interval_steps": 1,
        "repetition": 0,
        "iterations_per_s": 5.0,
        "lost_steps": None,
        "measured_steps": 10,
        "cpu_s": 1.0,
        "shadow_cpu_s": None,
        "bytes_written": 100,
        "paper_ranges": None,
    }
    return pd.DataFrame([{**plain, **row} for row in rows])


def row(system: str, interval: int, rate: float, **more: Any) -> dict[str, Any]:
    return {"system": system, "interval_steps": interval, "iterations_per_s": rate, **more}


def test_the_interval_at_checkmates_throughput_is_the_shortest_that_has_it() -> None:
    frame = frame_of(
        row("none", 0, 9),
        row("checkmate", 1, 6),
        *(row("checkfreq", interval, rate) for interval, rate in ((1, 2), (5, 6), (20, 8))),
        *(row("pccheck", interval, rate) for interval, rate in ((1, 6.5), (5, 7))),
        *(row("dcp", interval, rate) for interval, rate in ((1, 1), (20, 5.9))),
    )
    found = reaches(frame)
    assert others_of(frame) == ["checkfreq", "dcp", "pccheck"] == list(found)
    assert found["checkfreq"].interval_steps == 5
    assert found["pccheck"].interval_steps == 1
    # Not reached is not made up.
    assert (found["dcp"].interval_steps, found["dcp"].longest_steps) == (None, 20)


def test_medians_over_repetitions_are_compared() -> None:
    frame = frame_of(
        *(row("checkmate", 1, rate) for rate in (5, 6, 90)),
        *(row("gemini", 2, rate) for rate in (1, 6, 7)),
    )
    assert reaches(frame)["gemini"].interval_steps == 2


@given(st.data())
def test_a_reach_is_the_least_of_all_that_are_fast_enough(data: st.DataObject) -> None:
    rates = data.draw(st.dictionaries(st.integers(1, 50), st.floats(0.1, 10), min_size=1, max_size=6))
    own = data.draw(st.sampled_from([0.05, 3.0, *rates.values(), 11.0]))
    frame = frame_of(row("checkmate", 1, own), *(row("sync", interval, rate) for interval, rate in rates.items()))
    fast = sorted(interval for interval, rate in rates.items() if rate >= own)
    assert reaches(frame)["sync"].interval_steps == (fast[0] if fast else None)


def test_without_checkmate_there_is_nothing_to_reach() -> None:
    frame = frame_of(row("none", 0, 9), row("sync", 5, 3, lost_steps="4"))
    assert reaches(frame) == {}
    assert lost_work(frame)["sync"].steps == [4]


def test_lost_work_is_taken_at_the_interval_of_equal_throughput() -> None:
    frame = frame_of(
        row("checkmate", 1, 6, lost_steps="0;1"),
        row("checkmate", 1, 6, lost_steps="1"),
        row("checkfreq", 1, 2, lost_steps="1"),
        row("checkfreq", 5, 7, lost_steps="3;6"),
        row("checkfreq", 20, 8, lost_steps="12"),
        row("dcp", 1, 1, lost_steps="2"),
        row("dcp", 20, 2, lost_steps="19"),
        row("pccheck", 1, 9),
    )
    found = lost_work(frame)
    assert list(found) == ["checkfreq", "dcp", "checkmate"]
    assert (found["checkfreq"].interval_steps, found["checkfreq"].steps, found["checkfreq"].mean) == (5, [3, 6], 4.5)
    # It is never as fast: the longest measured.
    assert (found["dcp"].interval_steps, found["dcp"].steps) == (20, [19])
    assert found["checkmate"].steps == [0, 1, 1]


def test_lost_steps_that_are_none_are_refused() -> None:
    with pytest.raises(LastgoodError, match="'3,4': not whole numbers"):
        lost_work(frame_of(row("checkmate", 1, 6, lost_steps="3,4")))


def test_costs_are_per_iteration_at_the_shortest_interval() -> None:
    frame = frame_of(
        row("none", 0, 9, cpu_s=20.0, bytes_written=0),
        row("checkmate", 1, 6, cpu_s=30.0, shadow_cpu_s=15.0, bytes_written=2000),
        row("sync", 1, 1, cpu_s=25.0, bytes_written=1000),
        row("sync", 5, 1, cpu_s=99.0, bytes_written=1),
    )
    found = costs(frame)
    assert (found["checkmate"].trainer_cpu_s, found["checkmate"].shadow_cpu_s) == (3.0, 1.5)
    assert (found["sync"].interval_steps, found["sync"].handed_bytes, found["sync"].shadow_cpu_s) == (1, 100.0, 0.0)
    assert found["none"].trainer_cpu_s == 2.0


def test_published_ranges_are_read_back() -> None:
    frame = frame_of(row("none", 0, 9), row("checkmate", 1, 6, paper_ranges="a:5:34.5;b:80:97.1"))
    assert published_ranges(frame) == {"a": (5.0, 34.5), "b": (80.0, 97.1)}
    assert published_ranges(frame_of(row("none", 0, 9))) == {}
    with pytest.raises(LastgoodError, match="'a:5': not METRIC:LOW:HIGH"):
        published_ranges(frame_of(row("checkmate", 1, 6, paper_ranges="a:5")))


def test_the_checkouts_reference_holds_the_papers_three_ranges() -> None:
    from lastgood.experiments.tables.published import load_ranges

    path = Path(__file__).resolve().parents[3] / "figures" / "reference" / "checkmate.csv"
    values = sorted((metric, value) for metric, value, _ in load_ranges(path))
    assert values == [
        ("frequency_gain", 5.0),
        ("frequency_gain", 34.5),
        ("repeated_work_less", 80.0),
        ("repeated_work_less", 97.1),
        ("throughput_gain", 1.3),
        ("throughput_gain", 6.5),
    ]
