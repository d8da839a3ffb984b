"""The replay of traces: what is read, that it repeats, and that the controller keeps up with links that change."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.sparse.control.controller import ControllerSettings
from lastgood.sparse.control.replay import ASSUMED_SURFACE, Plant, Trace, read_surface, read_trace, replay

VALUES = {"elements": 11_181_642, "samples": 64, "starts": 4}


def steady(mbit, length_s=60.0, nodes=2):
    return Trace(((0.0,),) * nodes, ((mbit * 1e6,),) * nodes, length_s)


def run(trace, *, alphas=(0.01, 0.02), noise=0.05, seed=0, surface=ASSUMED_SURFACE, **more):
    return replay(
        trace, Plant(alphas, (0.05,) * len(alphas), noise), ControllerSettings(**VALUES, **more), surface, seed=seed
    )


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(1e6, 1e9)), min_size=1, max_size=6),
    st.floats(0, 20),
    st.floats(1, 1e10),
)
def test_an_exchange_ends_when_all_its_bits_have_passed(steps, begin, bits):
    seconds = [sum(width for width, _ in steps[:count]) for count in range(len(steps))]
    rates = [rate for _, rate in steps]
    trace = Trace((tuple(seconds),), (tuple(rates),), seconds[-1] + 1)
    end = trace.sent_at(begin, bits)
    passed = 0.0
    for number, rate in enumerate(rates):
        until = seconds[number + 1] if number + 1 < len(seconds) else math.inf
        passed += max(0.0, min(until, end) - max(seconds[number], begin)) * rate
    assert passed == pytest.approx(bits, rel=1e-6, abs=1e-3 * max(rates) * 1e-6)


def test_a_replay_repeats_with_its_seed_and_not_with_another():
    assert run(steady(100), seed=3) == run(steady(100), seed=3)
    assert run(steady(100), seed=3)[0] != run(steady(100), seed=4)[0]


@pytest.mark.parametrize("mbit", [5, 100, 1000])
def test_on_a_steady_link_it_comes_near_the_best_fixed_setting(mbit):
    controlled, fixed = run(steady(mbit, 300.0))
    assert controlled.useful_per_s >= 0.95 * fixed[0].useful_per_s
    assert all(sum(one.samples) == 64 for one in controlled.settings)


def test_it_follows_a_link_and_beats_every_fixed_setting():
    marks = tuple(float(60 * number) for number in range(12))
    rates = tuple(mbit * 1e6 for mbit in (100, 40, 100, 400, 40, 20, 10, 30, 200, 1000, 200, 50))
    trace = Trace((marks, marks), (rates, rates), 720.0)
    controlled, fixed = run(trace, noise=0.02)
    assert controlled.useful_per_s > fixed[0].useful_per_s
    assert len({one.compression for one in controlled.settings}) > 4


def test_a_link_that_all_but_ends_and_comes_back_stops_nothing():
    marks, rates = (0.0, 60.0, 120.0), (100e6, 1e6, 100e6)
    controlled, _ = run(Trace((marks, marks), (rates, rates), 300.0))
    assert controlled.settings[-1].compression < 0.9
    assert max(one.compression for one in controlled.settings[1:]) > 0.99
    assert controlled.seconds < 400


def test_half_as_fast_a_worker_gets_half_the_samples():
    controlled, _ = run(steady(100, 200.0), noise=0.0)
    first, second = controlled.settings[-1].samples
    assert first + second == 64 and abs(first - 2 * second) <= 8


def test_a_trace_is_read(tmp_path):
    path = written(tmp_path, "second,mbit_per_s,node\n0,100,\n10,50,1\n20.5,8,\n")
    trace = read_trace(path, 2)
    assert trace.seconds == ((0.0, 20.5), (0.0, 10.0, 20.5)) and trace.length_s == 31.0
    assert trace.slowest(5) == (100e6, 10.0) and trace.slowest(12) == (50e6, 20.5)
    assert trace.slowest(25) == (8e6, math.inf)
    assert read_trace(written(tmp_path, "second,mbit_per_s\n0,1\n"), 1).length_s == 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("second\n0\n", "columns are missing: mbit_per_s"),
        ("second,mbit_per_s\n1,100\n", "the link of node 0 has no rate at second 0"),
        ("second,mbit_per_s\n0,100\n0,100\n", "line 3: 0 s does not come after 0 s"),
        ("second,mbit_per_s\n0,inf\n", "line 2: 'inf' is no number"),
        ("second,mbit_per_s\n0,0\n", "line 2: '0' is no number from 0.001"),
        ("second,mbit_per_s,node\n0,1,2\n", "line 2: node '2' is none of 0 to 1"),
        ("second,mbit_per_s,node\n0,1,0\n", "the link of node 1 has no rate at second 0"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path, text, said):
    with pytest.raises(ConfigError, match=r"trace\.csv") as error:
        read_trace(written(tmp_path, text), 2)
    assert said in str(error.value)


def test_a_surface_is_read_or_refused(tmp_path):
    good = {"samples": [8, 64], "compressions": [0, 0.9], "lags": [[0, 0.1], [0.1, 0.2]]}
    assert read_surface(written(tmp_path, json.dumps(good), "s.json")).lag(8, 0.9) == 0.1
    for wrong in ({**good, "lags": [[0, 0.1]]}, {**good, "samples": [64, 8]}, {**good, "more": 1}, []):
        with pytest.raises(ConfigError, match=r"s\.json"):
            read_surface(written(tmp_path, json.dumps(wrong), "s.json"))


def test_the_command_prints_a_table_and_json(tmp_path):
    path = written(tmp_path, "second,mbit_per_s\n0,100\n20,10\n")
    table = CliRunner().invoke(app, ["stellatrain", "replay", str(path)])
    assert table.exit_code == 0, table.output
    assert "controller" in table.output and "equal batches" in table.output
    found = CliRunner().invoke(app, ["stellatrain", "replay", str(path), "--json", "--alpha-ms", "10,30"])
    content = json.loads(found.stdout)
    assert content["surface"] == "assumed" and len(content["fixed"]) == 14
    assert content["controller"]["settings"][0]["samples"] == [32, 32]
    assert content["gain_over_best_fixed"] == pytest.approx(
        content["controller"]["useful_samples_per_s"] / content["fixed"][0]["useful_samples_per_s"]
    )


@pytest.mark.parametrize(
    "options", [["--alpha-ms", "1,2,3"], ["--beta-ms", "x"], ["--noise", "2"], ["--every", "0"], ["--samples", "0"]]
)
def test_options_that_cannot_be_are_refused(tmp_path, options):
    path = written(tmp_path, "second,mbit_per_s\n0,100\n")
    found = CliRunner().invoke(app, ["stellatrain", "replay", str(path), *options])
    assert isinstance(found.exception, ConfigError), found.output
