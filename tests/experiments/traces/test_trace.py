"""Traces: the file format to and fro, what counts as a failure, the stretch to live through, and traces by chance."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.experiments.machine.facts import checkout_root
from lastgood.experiments.traces.synthetic import bursts_trace, poisson_trace, weibull_trace
from lastgood.experiments.traces.trace import MAX_SAMPLES, SpotTrace, load_trace, parse_trace

TRACES = st.builds(
    SpotTrace,
    period_s=st.floats(0.1, 1e4),
    gpus=st.lists(st.integers(0, 64), min_size=2, max_size=80).map(tuple),
    comments=st.lists(st.from_regex(r"[a-z][a-z #]{0,18}[a-z]", fullmatch=True), max_size=3).map(tuple),
)


def public_trace() -> Path:
    root = checkout_root()
    assert root is not None
    return root / "evaluation" / "fig9" / "traces" / "a100-spot-64.trace"


def test_the_public_trace_has_the_samples_and_failures_that_one_counts_by_hand() -> None:
    trace = load_trace(public_trace())
    assert trace.period_s == 63
    assert len(trace.gpus) == 215
    assert trace.duration_s == 13545
    # Nineteen of its changes are of four GPUs or more.
    changes = [abs(after - before) for before, after in pairwise(trace.gpus)]
    assert [change for change in changes if change >= 4] == [
        *(20, 5, 8, 11, 5, 4, 4, 4, 8, 8, 8, 6, 4, 4, 4, 4, 4, 33, 15)
    ]
    assert trace.failures == 5 + 1 + 2 + 2 + 1 + 3 * 1 + 3 * 2 + 1 + 5 * 1 + 8 + 3 == 37
    assert len(trace.failure_times_s()) == trace.failures


def test_a_loss_of_several_machines_is_spread_over_the_period_before_its_sample() -> None:
    trace = parse_trace("period_s 10\n3x16 2x8 1x11 1x15", "t")
    assert trace.failure_times_s() == (25.0, 30.0, 60.0)


@given(TRACES)
def test_a_trace_reads_back_as_it_was_written(trace: SpotTrace) -> None:
    assert parse_trace(trace.text(), "t") == trace


@given(TRACES)
def test_a_digest_is_of_the_samples_alone(trace: SpotTrace) -> None:
    assert SpotTrace(trace.period_s, trace.gpus, ("another comment",)).digest == trace.digest
    changed = (trace.gpus[0] + 1, *trace.gpus[1:])
    assert SpotTrace(trace.period_s, changed, trace.comments).digest != trace.digest


@given(TRACES, st.integers(1, 6), st.floats(0.5, 100))
def test_a_stretch_is_a_part_of_the_trace_with_no_more_failures_than_asked_for(
    trace: SpotTrace, most: int, window_s: float
) -> None:
    found = trace.stretch(window_s, most)
    times = found.failures_s
    assert len(times) <= most
    assert list(times) == sorted(times)
    assert all(0 < time < window_s for time in times)
    assert found.start_s + found.length_s <= trace.duration_s * (1 + 1e-9)
    # Each is a failure of the trace, at its place.
    real = trace.failure_times_s()
    for time in times:
        there = found.start_s + time * found.factor
        assert any(math.isclose(there, known, rel_tol=1e-6, abs_tol=1e-6) for known in real)
    if trace.failures <= most:
        assert found.length_s == pytest.approx(trace.duration_s)


def test_a_stretch_of_the_public_trace_keeps_its_rate_and_avoids_bursts() -> None:
    trace = load_trace(public_trace())
    found = trace.stretch(30.0, 5)
    assert len(found.failures_s) == 5
    assert 5 / found.length_s == pytest.approx(trace.failures / trace.duration_s, rel=0.05)
    # By hand, from the failure times of the trace: no other stretch of 29 samples keeps five so far apart.
    gaps = [after - before for before, after in pairwise((0.0, *found.failures_s, 30.0))]
    assert min(gaps) > 0.4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("period_s 63\n10x56 5y3\n", ["line 2", "'5y3'", "COUNTxGPUS"]),
        ("period_s 63\n10x56\n\n3x-4\n", ["line 4", "'3x-4'"]),
        ("period_s 63\n10x56 -3x4\n", ["line 2", "'-3x4'"]),
        ("period_s 63\n0x56 3x4\n", ["line 2", "count of 0"]),
        ("period_s 63\n1.5x56\n", ["line 2", "'1.5x56'"]),
        ("period_s -1\n10x56\n", ["line 1", "period_s", "above 0"]),
        ("period_s nan\n10x56\n", ["line 1", "period_s"]),
        ("period_s\n10x56\n", ["line 1", "period_s"]),
        ("period_s 63\nperiod_s 63\n10x56\n", ["line 2", "twice"]),
        ("10x56 3x4\n", ["period_s SECONDS"]),
        ("", ["period_s SECONDS"]),
        ("period_s 63\n", ["0 samples"]),
        ("period_s 63\n1x4\n", ["1 samples"]),
        ("period_s 63\n10x5 1000001x4\n", ["line 2", "longer than 1000000"]),
        ("period_s 63\n600000x5\n600000x4\n", ["line 3", "longer than 1000000"]),
        ("period_s 63\n10x1000001\n", ["line 2", "more than 1000000 GPUs"]),
        ("period_s 63\n" + "9" * 5000 + "x4\n", ["line 2", "COUNTxGPUS"]),
    ],
)
def test_bad_traces_are_refused_with_the_file_and_the_line(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_trace(path)
    message = str(caught.value)
    assert str(path) in message
    assert all(word in message for word in words), message
    assert len(message) < 500


def test_files_that_are_no_text_or_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "absent"):
        with pytest.raises(ConfigError, match=name):
            load_trace(tmp_path / name)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="longer than"):
        load_trace(tmp_path / "huge")


# -- by chance -----------------------------------------------------------------------------------------------------

LONG = {"hours": 5000.0, "period_s": 60.0, "gpus": 64}


def in_band(failures: float, expected: float, spread: float) -> bool:
    """Within four standard deviations; seeds are fixed, so a test holds always or never."""
    return abs(failures - expected) <= 4 * spread


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mtbf_h", [2.0, 5.0])
def test_poisson_failures_come_as_often_as_asked_for(seed: int, mtbf_h: float) -> None:
    trace = poisson_trace(mtbf_h=mtbf_h, seed=seed, **LONG)
    expected = 5000 / mtbf_h
    assert in_band(trace.failures, expected, math.sqrt(expected))
    gaps = [after - before for before, after in pairwise(trace.failure_times_s())]
    # Gaps of a Poisson process spread as much as their mean.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_weibull_gaps_have_the_mean_and_the_spread_of_their_shape(seed: int, shape: float) -> None:
    trace = weibull_trace(shape=shape, scale_h=4.0, seed=seed, **LONG)
    mean_h = 4.0 * math.gamma(1 + 1 / shape)
    spread = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    expected = 5000 / mean_h
    assert in_band(trace.failures, expected, max(1.0, spread) * math.sqrt(expected))
    gaps = [after - before for before, after in pairwise(trace.failure_times_s())]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_bursts_are_as_many_and_as_large_as_asked_for(seed: int) -> None:
    trace = bursts_trace(mtbf_h=10.0, burst=2.0, seed=seed, **LONG)
    moved = [abs(after - before) // 4 for before, after in pairwise(trace.gpus) if after != before]
    assert in_band(len(moved), 500, math.sqrt(500))
    # Geometric with mean 2: variance 2.
    assert in_band(statistics.mean(moved), 2.0, math.sqrt(2 / 500))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1 << 40))
def test_a_seed_makes_a_trace(seed: int) -> None:
    arguments = {"mtbf_h": 1.0, "hours": 50.0, "period_s": 60.0, "gpus": 64}
    one, two = poisson_trace(seed=seed, **arguments), poisson_trace(seed=seed, **arguments)
    assert one == two
    assert parse_trace(one.text(), "t") == one
    assert poisson_trace(seed=seed + 1, **arguments).gpus != one.gpus
    assert all(0 <= count <= 64 for count in one.gpus)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mtbf_h": 0.0}, "mtbf_h"),
        ({"mtbf_h": math.nan}, "mtbf_h"),
        ({"hours": -1.0}, "hours"),
        ({"hours": 1e6, "period_s": 1.0}, str(MAX_SAMPLES)),
        ({"period_s": 0.0}, "period_s"),
        ({"gpus": 6}, "gpus"),
        ({"gpus": 4}, "gpus"),
        ({"mtbf_h": 1e-9}, "failures"),
        ({"mtbf_h": 0.001}, "at once"),
    ],
)
def test_what_a_trace_cannot_be_made_from_is_named(change: dict[str, float], word: str) -> None:
    arguments = {"mtbf_h": 1.0, "hours": 50.0, "period_s": 60.0, "gpus": 64, "seed": 0, **change}
    with pytest.raises(ConfigError, match=word):
        poisson_trace(**arguments)
