"""Tuning: the rule against hand-worked cases, real measurements of a small state, what a kill leaves, the file."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.pccheck.system import PCcheck, PCcheckOptions
from lastgood.checkpointers.pccheck.tuning_file import (
    TUNING_FILE,
    SlowdownCheck,
    Tuning,
    WritePoint,
    choose,
    read_tuning,
    shortest_interval,
    write_tuning,
)
from lastgood.errors import ConfigError, LockHeld, StorageError
from lastgood.locks import FileLock
from lastgood.storage import SlotStore
from lastgood.training import tuning as module
from lastgood.training import write_curve
from lastgood.training.tuning import Limits, tune, tune_training
from lastgood.training.write_curve import PROBE_FOLDER, grid
from tests.checkpointers.support.small_training import SmallTraining

MIB = 1 << 20
SHORT = Limits(seconds=1.0, cores=2)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def point(n=1, p=1, b=MIB, write_s=(1.0,), stream_bytes=100):
    return WritePoint(max_in_flight=n, writer_threads=p, chunk_bytes=b, stream_bytes=stream_bytes, write_s=write_s)


def tuning(**changes):
    values = {
        "interval_steps": 7,
        "options": PCcheckOptions(max_in_flight=2, writer_threads=1, chunk_bytes=MIB, pool_bytes=3 * MIB, keep=1),
        "slowdown": 1.05,
        "iteration_s": 0.1,
        "state_bytes": 1000,
        "curve": [point(n=2, write_s=[1.0, 1.4])],
        "machine": "box",
        "measured_at": "2026-01-01T00:00:00+00:00",
        "direct_io": True,
    }
    return Tuning(**{**values, **changes})


# -- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worst_write_s", "n", "slowdown", "iteration_s", "steps"),
    [
        (2.0, 1, 2.0, 0.5, 2),  # 2 / (1 x 2 x 0.5) = 2 exactly
        (2.0, 2, 2.0, 0.5, 1),  # twice as many in flight, half the interval
        (2.25, 1, 2.0, 0.5, 3),  # 2.25 steps: the next whole number
        (7.2, 4, 1.05, 0.075, 23),  # OPT-1.3B of the facts: 7.2 / 0.315 = 22.9
        (0.001, 1, 1.05, 10.0, 1),  # never less than one step
    ],
)
def test_the_rule_by_hand(worst_write_s, n, slowdown, iteration_s, steps):
    assert shortest_interval(worst_write_s, n, slowdown, iteration_s) == steps


seconds = st.floats(1e-4, 1e4)
slowdowns = st.floats(1.001, 10)


@given(seconds, st.integers(1, 64), slowdowns, seconds)
def test_the_rule_holds_and_one_step_less_would_break_it(worst_write_s, n, slowdown, iteration_s):
    steps = shortest_interval(worst_write_s, n, slowdown, iteration_s)
    pace = n * Fraction(slowdown) * Fraction(iteration_s)
    assert steps * pace >= Fraction(worst_write_s)
    assert steps == 1 or (steps - 1) * pace < Fraction(worst_write_s)


@given(seconds, st.integers(1, 63), slowdowns, seconds, st.floats(1, 100))
def test_more_to_write_never_shortens_the_interval(worst_write_s, n, slowdown, iteration_s, growth):
    steps = shortest_interval(worst_write_s, n, slowdown, iteration_s)
    assert shortest_interval(worst_write_s * growth, n, slowdown, iteration_s) >= steps
    assert shortest_interval(worst_write_s, n + 1, slowdown, iteration_s) <= steps
    assert shortest_interval(worst_write_s, n, slowdown, iteration_s * growth) <= steps


@pytest.mark.parametrize(
    ("terms", "part"),
    [
        ((1.0, 1, 1.0, 1.0), "slowdown must be a number above 1"),
        ((1.0, 1, float("nan"), 1.0), "slowdown"),
        ((1.0, 1, 1.05, 0.0), "iteration_s must be a number above 0"),
        ((1.0, 1, 1.05, float("inf")), "iteration_s"),
        ((0.0, 1, 1.05, 1.0), "worst_write_s"),
        ((1.0, 0, 1.05, 1.0), "max_in_flight"),
        ((1e6, 1, 1.05, 1e-6), "is the iteration time in seconds"),
    ],
)
def test_nonsense_is_refused(terms, part):
    with pytest.raises(ConfigError, match=part):
        shortest_interval(*terms)


def test_the_shortest_interval_is_chosen_by_the_worst_write():
    lucky = point(n=1, write_s=[1.0, 1.0, 9.0])
    steady = point(n=2, write_s=[4.0, 4.0, 4.0])
    assert choose([lucky, steady], 1.05, 0.1) == steady


def test_among_equals_fewer_in_flight_then_fewer_threads_then_smaller_chunks():
    same = [point(n=n, p=p, b=b, write_s=[0.1]) for n in (2, 1) for p in (2, 1) for b in (4 * MIB, MIB)]
    assert choose(same, 1.05, 1.0) == point(n=1, p=1, b=MIB, write_s=[0.1])
    assert choose([same[0], same[2]], 1.05, 1.0) == same[2]  # N and chunk alike
    assert choose([same[0], same[4]], 1.05, 1.0) == same[4]  # threads and chunk alike
    disk, threads = point(n=1, p=2, b=4 * MIB, write_s=[0.1]), point(n=2, p=1, b=MIB, write_s=[0.1])
    assert choose([threads, disk], 1.05, 1.0) == disk


@given(st.integers(1, 100 * MIB), st.integers(1, 4), st.integers(1, 200))
def test_the_grid_holds_only_what_can_work(state_bytes, most, cores):
    keys = grid(state_bytes, most, cores)
    assert len(set(keys)) == len(keys)
    assert {n for n, _, _ in keys} == set(range(1, most + 1))
    for _, p, b in keys:
        PCcheckOptions(writer_threads=p, chunk_bytes=b)
        assert p <= cores
        assert p == 1 or (p - 1) * b < state_bytes


# -- measuring -----------------------------------------------------------------------------------------------------


def test_a_small_state_is_tuned_for_real_and_nothing_is_left(tmp_path):
    stages = []
    found = tune(tmp_path / "job", iteration_s=0.01, state_bytes=3 * MIB + 5, limits=SHORT, report=stages.append)
    assert list((tmp_path / "job").iterdir()) == []
    assert found.curve
    assert stages
    assert found.chosen == choose(found.curve, 1.05, 0.01)
    assert found.interval_steps == found.chosen.interval_steps(1.05, 0.01)
    assert found.kept is None
    for measured in found.curve:
        assert len(measured.write_s) >= 3 * measured.max_in_flight
        assert all(0 < value < 60 for value in measured.write_s)
        assert measured.stream_bytes == 3 * MIB + 5
    tried = {(p.max_in_flight, p.writer_threads, p.chunk_bytes) for p in found.curve}
    assert tried | set(found.not_tried) == set(grid(3 * MIB + 5, 4, 2))
    assert not tried & set(found.not_tried)


def test_what_is_written_less_than_whole_is_scaled_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(write_curve, "_SAMPLE_BYTES", 4 * MIB)
    monkeypatch.setattr(write_curve, "_LEAST_SAMPLE_BYTES", 4 * MIB)
    monkeypatch.setattr(write_curve, "_CONFIRMATIONS", 0)
    asked = []

    def write(self, key, stream_bytes, rounds, *, slots):
        asked.append(stream_bytes)
        self.folder.mkdir(exist_ok=True)
        return [0.25] * rounds * key[0]

    monkeypatch.setattr(write_curve.WriteCurve, "_write", write)
    found = tune(tmp_path, iteration_s=1.0, state_bytes=40 * MIB, limits=Limits(seconds=60, cores=1))
    assert set(asked[1:]) == {4 * MIB}
    assert {value for measured in found.curve for value in measured.write_s} == {2.5}
    assert any("scaled to" in warning for warning in found.warnings)


def test_a_budget_too_short_for_all_says_what_was_not_tried(tmp_path):
    found = tune(tmp_path, iteration_s=0.01, state_bytes=20 * MIB, limits=Limits(seconds=0.001, cores=2))
    assert len(found.curve) == 1
    assert len(found.not_tried) == len(grid(20 * MIB, 4, 2)) - 1


def test_a_training_is_measured_and_the_choice_tried_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHECK_S", 0.2)  # a long budget must not make the test long
    training = SmallTraining(width=256)
    found = tune_training(tmp_path, training.step, training.state, slowdown=1000.0, limits=Limits(seconds=60, cores=2))
    assert list(tmp_path.iterdir()) == []
    assert found.kept, "a slowdown of 1000 is more than any checkpoint of this size costs, on a busy disk as well"
    assert found.checks[-1].interval_steps == found.interval_steps
    assert found.checks[-1].checkpoints > found.options.max_in_flight
    assert found.iteration_s > 0
    moments_and_weights = 3 * 4 * 256 * 256
    assert moments_and_weights < found.state_bytes < 2 * moments_and_weights
    assert not training.optimizer._optimizer_step_pre_hooks, "no hook is left on the training"


def test_the_interval_is_raised_until_the_measured_slowdown_is_kept(tmp_path, monkeypatch):
    training = SmallTraining()
    tried = []

    def check(training, checkpointer, found, interval, saves):
        tried.append(interval)
        # Each checkpoint costs half an iteration.
        return SlowdownCheck(
            interval_steps=interval,
            checkpoints=saves,
            plain_iteration_s=1.0,
            iteration_s=1.0 + 0.5 / interval,
            predicted=1.0,
        )

    monkeypatch.setattr(module, "_check", check)
    monkeypatch.setattr(module, "_saves_in_time", lambda found, interval, seconds: 2)
    found = tune_training(tmp_path, training.step, training.state, slowdown=1.05, limits=SHORT)
    assert tried == sorted(set(tried))
    assert found.kept
    assert found.interval_steps == tried[-1] >= 10, "0.5 / f <= 0.05"
    assert [measured.measured <= 1.05 for measured in found.checks[:-1]] == [False] * (len(tried) - 1)


def test_a_slowdown_that_no_interval_keeps_is_said(tmp_path, monkeypatch):
    training = SmallTraining()

    def check(training, checkpointer, found, interval, saves):
        return SlowdownCheck(
            interval_steps=interval, checkpoints=saves, plain_iteration_s=1.0, iteration_s=2.0, predicted=1.0
        )

    monkeypatch.setattr(module, "_check", check)
    monkeypatch.setattr(module, "_saves_in_time", lambda found, interval, seconds: 2)
    found = tune_training(tmp_path, training.step, training.state, limits=SHORT)
    assert found.kept is False
    assert len(found.checks) == 6
    assert "kept the slowdown under" in found.warnings[-1]


def test_without_time_to_try_it_out_that_is_said(tmp_path):
    training = SmallTraining()

    def slow_step():
        training.step()
        time.sleep(0.02)

    found = tune_training(tmp_path, slow_step, training.state, limits=Limits(seconds=0.01, cores=1))
    assert found.kept is None
    assert "was not measured" in found.warnings[-1]


def test_a_failed_step_passes_through_and_leaves_nothing(tmp_path):
    training = SmallTraining()

    def step():
        raise FileNotFoundError("the data went away")

    with pytest.raises(FileNotFoundError, match="the data went away"):
        tune_training(tmp_path, step, training.state, limits=SHORT)
    assert list(tmp_path.iterdir()) == []


# -- place ---------------------------------------------------------------------------------------------------------


def test_a_disk_too_small_is_refused_with_bytes(tmp_path):
    with pytest.raises(StorageError, match=r"need \d{9} bytes .* and 200000000 are there"):
        tune(tmp_path, iteration_s=1, state_bytes=100 * MIB, limits=Limits(seconds=1, disk_bytes=200_000_000))
    assert list(tmp_path.iterdir()) == []


def tried_or_not(found):
    """Checkpoints in flight that there was room for."""
    return [measured.max_in_flight for measured in found.curve] + [n for n, _, _ in found.not_tried]


def test_free_disk_bounds_the_checkpoints_in_flight(tmp_path):
    # Slots of 4 MiB of state and 1 MiB of head: 21 MiB hold four, of which two are kept.
    found = tune(tmp_path, iteration_s=1, state_bytes=4 * MIB, limits=Limits(1.0, cores=1, disk_bytes=21 * MIB))
    assert max(tried_or_not(found)) == 2, "whatever the time sufficed for"


def test_slots_that_the_job_has_already_count_as_free(tmp_path):
    with SlotStore(tmp_path, slots=4, pool_bytes=8 * MIB) as store:
        store.reserve(4 * MIB)
    before = sorted(tmp_path.iterdir())
    found = tune(tmp_path, iteration_s=1, state_bytes=4 * MIB, limits=Limits(1.0, cores=1, disk_bytes=0))
    assert max(tried_or_not(found)) == 2
    assert sorted(tmp_path.iterdir()) == before


def test_little_memory_bounds_pool_and_chunks(tmp_path):
    limits = Limits(seconds=1, cores=1, memory_bytes=16 * MIB)
    found = tune(tmp_path, iteration_s=1, state_bytes=20 * MIB, limits=limits)
    assert {measured.chunk_bytes for measured in found.curve} == {MIB}
    assert found.options.pool_bytes == 8 * MIB
    assert any("pool" in warning for warning in found.warnings)
    with pytest.raises(ConfigError, match="at least 8388608"):
        tune(tmp_path, iteration_s=1, state_bytes=20 * MIB, limits=Limits(seconds=1, memory_bytes=MIB))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"state_bytes": 0}, "state_bytes"),
        ({"iteration_s": -1.0}, "iteration_s"),
        ({"slowdown": 0.9}, "slowdown"),
        ({"keep": 0}, "keep"),
        ({"limits": Limits(seconds=0)}, "budget"),
        ({"limits": Limits(cores=0)}, "cores"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_made(tmp_path, changes, part):
    with pytest.raises(ConfigError, match=part):
        tune(tmp_path / "job", **{"iteration_s": 1.0, "state_bytes": MIB, "limits": SHORT, **changes})
    assert not (tmp_path / "job").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    with SlotStore(tmp_path, slots=3, pool_bytes=8 * MIB), pytest.raises(LockHeld, match="a training has this folder"):
        tune(tmp_path, iteration_s=1, state_bytes=MIB, limits=SHORT)
    with FileLock(tmp_path, "another", on_directory=True), pytest.raises(LockHeld, match="tuning in"):
        tune(tmp_path, iteration_s=1, state_bytes=MIB, limits=SHORT)


def test_a_folder_of_the_name_that_a_user_made_stays(tmp_path):
    (tmp_path / PROBE_FOLDER).mkdir()
    (tmp_path / PROBE_FOLDER / "thesis").write_text("years of work")
    with pytest.raises(ConfigError, match="was not made by a tuning"):
        tune(tmp_path, iteration_s=1, state_bytes=MIB, limits=SHORT)
    assert (tmp_path / PROBE_FOLDER / "thesis").exists()


def test_memory_is_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "lies_in_memory", lambda path: True)
    assert "lies in memory" in tune(tmp_path, iteration_s=1, state_bytes=MIB, limits=SHORT).warnings[0]


def test_what_a_killed_tuning_leaves_is_removed_by_the_next(tmp_path):
    program = (
        "import sys; from lastgood.training.tuning import *\n"
        "tune(sys.argv[1], iteration_s=1, state_bytes=64 << 20, limits=Limits(seconds=600, cores=2))"
    )
    child = subprocess.Popen([sys.executable, "-c", program, tmp_path])
    try:
        deadline = time.monotonic() + 150
        while not list((tmp_path / PROBE_FOLDER / "curve").glob("*.lgs")):
            assert child.poll() is None, "the tuning ended before it was killed"
            assert time.monotonic() < deadline, "no slot file appeared within 150 s"
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    assert [path.name for path in tmp_path.iterdir()] == [PROBE_FOLDER]
    tune(tmp_path, iteration_s=1, state_bytes=MIB, limits=SHORT)
    assert list(tmp_path.iterdir()) == []


# -- the file ------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 10**6),
    st.builds(
        PCcheckOptions,
        max_in_flight=st.integers(1, 64),
        writer_threads=st.integers(1, 64),
        chunk_bytes=st.integers(1, 1 << 18).map(lambda blocks: blocks * 4096),
        pool_bytes=st.none() | st.integers(8192, 1 << 40),
        keep=st.integers(1, 64),
    ),
)
def test_what_is_written_is_read(tmp_path_factory, interval, options):
    path = tmp_path_factory.mktemp("file") / TUNING_FILE
    row = point(n=options.max_in_flight, p=options.writer_threads, b=options.chunk_bytes)
    write_tuning(path, tuning(interval_steps=interval, options=options, curve=[row]))
    assert read_tuning(path) == (interval, options)
    assert [left.name for left in path.parent.iterdir()] == [TUNING_FILE]


def test_the_file_says_what_it_was_chosen_from(tmp_path):
    import yaml

    check = SlowdownCheck(interval_steps=7, checkpoints=3, plain_iteration_s=0.1, iteration_s=0.104, predicted=1.0)
    write_tuning(tmp_path / TUNING_FILE, tuning(checks=[check], warnings=["careful"], not_tried=[(4, 1, MIB)]))
    text = (tmp_path / TUNING_FILE).read_text()
    measured = yaml.safe_load(text)["measured"]
    assert text.startswith("# PCcheck's settings")
    assert measured["worst_write_s"] == 1.4
    assert measured["curve"][0]["interval_steps"] == 7  # 1.4 / (2 x 1.05 x 0.1) = 6.7
    assert measured["checks"][0]["measured"] == pytest.approx(1.04)
    assert measured["warnings"] == ["careful"]
    assert measured["not_tried"] == [[4, 1, MIB]]


GOOD = "tuning_version: 1\ninterval_steps: 5\nmax_in_flight: 3\n"


def test_a_file_made_by_hand_takes_the_defaults(tmp_path):
    path = tmp_path / TUNING_FILE
    path.write_text(GOOD)
    assert read_tuning(str(path)) == (5, PCcheckOptions(max_in_flight=3))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (GOOD + "writers: 2\n", "writers: unknown key; known: tuning_version, interval_steps, measured, max_in_flight"),
        (GOOD + "writer_threads: two\n", "writer_threads: 'two'"),
        (GOOD + "writer_threads: true\n", "writer_threads: True"),
        (GOOD + "chunk_bytes: 5000\n", "chunk_bytes: 5000: input should be a multiple of 4096"),
        (GOOD + "keep: 2\nkeep: 3\n", "key 'keep' is given twice"),
        (GOOD + "3: 4\n", "the key '3' is not text"),
        (GOOD.replace("interval_steps: 5", "interval_steps: 0"), "interval_steps: 0"),
        (GOOD.replace("interval_steps: 5", "interval_steps: '5'"), "interval_steps: '5'"),
        (GOOD.replace("interval_steps: 5\n", ""), "interval_steps: is missing"),
        (GOOD.replace("tuning_version: 1", "tuning_version: 2"), "tuning_version: 2"),
        (GOOD + "measured: [1]\n", "measured"),
        ("[1, 2]", "holds list"),
        ("", "holds NoneType"),
        ("a: [", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        (GOOD + "#" * (1 << 20), "longer than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_file_and_key(tmp_path, text, part):
    path = tmp_path / TUNING_FILE
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tuning(path)
    assert str(caught.value).startswith((f"{path}: ", f"{path}, line "))
    assert part in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="lastgood tune"):
        read_tuning(tmp_path / TUNING_FILE)


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(StorageError, match="writing the settings"):
        write_tuning(tmp_path / "nowhere" / TUNING_FILE, tuning())


def test_what_was_tuned_runs(tmp_path):
    training = SmallTraining()
    training.step()
    write_tuning(tmp_path / TUNING_FILE, tune(tmp_path, iteration_s=0.01, state_bytes=MIB, limits=SHORT))
    interval, options = read_tuning(tmp_path / TUNING_FILE)
    checkpointer = PCcheck(tmp_path, options)
    checkpointer.start(training.state)
    for _ in range(2 * interval):
        training.step()
        if training.step_number % interval == 0:
            checkpointer.save(training.step_number)
    checkpointer.drain()
    assert checkpointer.latest() is not None
    checkpointer.close()
    assert (tmp_path / TUNING_FILE).exists()


def test_a_checkpointer_takes_what_was_tuned(tmp_path: Path) -> None:
    (tmp_path / TUNING_FILE).write_text("tuning_version: 1\ninterval_steps: 7\nmax_in_flight: 3\nwriter_threads: 1\n")
    tuned = PCcheck.tuned(tmp_path)
    assert (tuned.interval_steps, tuned.options.max_in_flight, tuned.options.writer_threads) == (7, 3, 1)
    assert PCcheck.tuned(tmp_path / "other", tmp_path / TUNING_FILE).directory == tmp_path / "other"
