"""Measured goodput: real processes, really killed, that really restart. Tiny models, a few seconds each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from lastgood.errors import LastgoodError
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.records.goodput import GoodputRecord, GoodputSpec
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.progress import Board
from lastgood.workloads.data.prepare import prepare_dataset
from tests.experiments.support.warm_runs import WarmRun

MAIN = [sys.executable, "-c", "from lastgood.cli import main; main()"]
SYSTEMS = ("sync", "checkfreq", "gpm", "gemini", "pccheck")
DRIVER = Path(__file__).parents[1] / "support" / "goodput_driver.py"


def spec_of(system="pccheck", interval=3, window_s=2.0, failures_s=(0.6, 1.3), **changed):
    run = RunSpec(
        machine="testbox",
        scale="laptop",
        workload="vgg16",
        workload_options={"batch_size": 1, "image_size": 32, "classes": 10, "classifier_width": 8},
        system=system,
        method=1,
        interval_steps=interval,
        warmup_steps=1,
        measured_steps=4,
        threads=1,
        seed=3,
        repetition=0,
        proof=False,
    )
    values = {
        "run": run,
        "window_s": window_s,
        "failures_s": list(failures_s),
        "trace_name": "made up",
        "trace_sha256": "0" * 64,
        "trace_s": 1000.0,
        "trace_failures": 20,
        "stretch_start_s": 0.0,
        "stretch_s": 100.0,
    }
    return GoodputSpec.model_validate({**values, **changed})


LONGER = 4
"""Times the window if an incarnation was too short for what a test looks at: on a busy machine a step takes seconds."""
MOST_LONGER = 3


def longer(spec):
    return spec.model_copy(
        update={"window_s": spec.window_s * LONGER, "failures_s": [at_s * LONGER for at_s in spec.failures_s]}
    )


def each_life_trained(record):
    return all(incarnation.steps > 0 for incarnation in record.lives)


def last_incarnation_trained(record):
    return record.lives[-1].steps > 0


def came_far(record):
    """Whether the first incarnation came beyond its second checkpoint, and some one beyond what is durable in the end.

    So each restore is followed by a step that is known.
    """
    first = record.first_step
    return (
        each_life_trained(record)
        and record.lives[0].reached_step > first + 2 * record.spec.run.interval_steps
        and max(incarnation.reached_step for incarnation in record.lives) > first + record.durable_steps
    )


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare_dataset("images", folder)
    return folder


class Job:
    def __init__(self, folder: Path, data_dir: Path) -> None:
        self.out = folder / "r0.json"
        self.scratch = folder / "scratch"
        self.data_dir = data_dir

    def arguments(self, spec):
        places = ["--out", str(self.out), "--data-dir", str(self.data_dir), "--scratch", str(self.scratch)]
        return ["run", "--spec", spec.canonical_json(), *places]

    def start_child(self, spec):
        """As a child of this process, with which it ends."""
        command = [*MAIN, *self.arguments(spec), "--end-with", str(os.getpid())]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, spec):
        process = WarmRun(self.arguments(spec))
        output, _ = process.communicate(timeout=400)
        return process.returncode, output

    def left(self):
        return list(self.scratch.glob("*")) if self.scratch.exists() else []


@pytest.fixture
def job(tmp_path, data_dir):
    return Job(tmp_path, data_dir)


class Driven:
    """Runs made in one process, by name."""

    def __init__(self, folder: Path, data_dir: Path, specs: dict[str, GoodputSpec]) -> None:
        self.folder = folder
        self.data_dir = data_dir
        self._drive(specs)

    def _drive(self, specs):
        jobs = json.dumps({str(self.folder / name): spec.model_dump(mode="json") for name, spec in specs.items()})
        driver = WarmRun([jobs, self.data_dir, self.folder / "scratch"], script=DRIVER)
        output, _ = driver.communicate(timeout=600)
        assert driver.returncode == 0, output

    def record(self, name, enough=each_life_trained):
        """Of the run itself, or of a longer one where it was not long enough."""
        record = self._load(name)
        for _ in range(MOST_LONGER):
            if enough(record):
                break
            name = f"{name}-longer"
            self._drive({name: longer(record.spec)})
            record = self._load(name)
        assert enough(record), record
        return record

    def _load(self, name):
        assert (self.folder / name).exists(), self.error(name)
        return GoodputRecord.load(self.folder / name)

    def error(self, name):
        assert not (self.folder / name).exists()
        return (self.folder / f"{name}.error").read_text()


@pytest.fixture(scope="module")
def driven(tmp_path_factory, data_dir):
    no_keep = spec_of("sync").run.model_copy(update={"system_options": {"keep": 0}})
    specs = {
        "quick": spec_of("sync", failures_s=[0.6, 0.601, 0.602], window_s=1.0),
        "fails": spec_of("sync", run=no_keep),
    }
    found = Driven(tmp_path_factory.mktemp("driven"), data_dir, specs)
    assert list((found.folder / "scratch").iterdir()) == []
    return found


@pytest.fixture(scope="module")
def driven_slowly(tmp_path_factory, data_dir):
    specs = {
        "none": spec_of("none", interval=0, failures_s=[0.8], window_s=1.3),
        **{system: spec_of(system, window_s=4.0, failures_s=[1.2, 2.6]) for system in SYSTEMS},
        **{liar: spec_of(liar, interval=2, window_s=1.5, failures_s=[1.0]) for liar in ("late", "forgets")},
        # The first incarnation must come well beyond its second checkpoint, on a busy machine as well.
        "rarely": spec_of("rarely", interval=2, window_s=4.0, failures_s=[2.5]),
        "oldweights": spec_of("oldweights", interval=2, window_s=4.0, failures_s=[2.5]),
        "stale": spec_of("stale", interval=2, window_s=1.2, failures_s=[0.8]),
    }
    return Driven(tmp_path_factory.mktemp("driven_slowly"), data_dir, specs)


def check_record(record):
    spec = record.spec
    assert record.faults == []
    first, last = record.lives[0], record.lives[-1]
    assert [incarnation.ended for incarnation in record.lives] == ["killed"] * len(spec.failures_s) + ["window"]
    check_uptimes(record)
    assert record.window_s == pytest.approx(sum(incarnation.uptime_s for incarnation in record.lives))
    # Restores go back to a checkpoint, no earlier than what was durable, and take the rest of the work back.
    assert first.restored_step == record.first_step == 1
    reached = first.reached_step
    for before, incarnation in pairwise(record.lives):
        assert (incarnation.restored_step - record.first_step) % spec.run.interval_steps == 0
        assert incarnation.restored_step >= (before.durable_step or record.first_step)
        assert incarnation.lost_steps == max(0, reached - incarnation.restored_step)
        assert incarnation.load_s > 0
        assert incarnation.start_up_s > 0
        reached = incarnation.reached_step
    assert record.useful_steps == last.reached_step - record.first_step > 0
    assert 0 <= record.durable_steps <= record.useful_steps + 1
    assert record.goodput_iterations_per_s == pytest.approx(record.useful_steps / record.window_s)
    assert record.start_up_s == pytest.approx(sum(incarnation.start_up_s for incarnation in record.lives[1:]))
    assert record.raw_goodput_iterations_per_s < record.goodput_iterations_per_s
    assert record.restores == len(record.lives)
    assert record.step_s * sum(incarnation.steps for incarnation in record.lives) < record.window_s


def check_uptimes(record):
    """Each incarnation had what the failures leave it: its kill may come late, and the next has less then."""
    clock_s = 0.0
    for incarnation, end_s in zip(record.lives, [*record.spec.failures_s, record.spec.window_s], strict=True):
        quota_s = max(0.0, end_s - clock_s)
        # How late is the machine's matter; a kill that does not look at the clock of uptime comes a start-up too early.
        # (An incarnation may be held up between the look at the clock and the note of its stage.)
        assert quota_s - 0.05 <= incarnation.uptime_s < quota_s + 30
        clock_s += incarnation.uptime_s


def test_a_training_that_is_killed_twice_counts_what_it_kept(job):
    spec = spec_of("pccheck")
    for _ in range(1 + MOST_LONGER):
        code, output = job.finish(spec)
        assert code == 0, output
        record = GoodputRecord.load(job.out)
        assert record.spec == spec
        if each_life_trained(record):
            break
        spec = longer(spec)
        job.out.unlink()
    check_record(record)
    assert job.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_keeps_what_it_called_durable(system, driven_slowly):
    check_record(driven_slowly.record(system))


@pytest.mark.slow
def test_without_checkpoints_every_failure_takes_everything(driven_slowly):
    record = driven_slowly.record("none", came_far)
    first, last = record.lives
    assert record.faults == []
    assert last.restored_step == 0
    assert last.lost_steps == first.reached_step > 0
    assert record.useful_steps == max(0, last.reached_step - record.first_step)
    assert record.durable_steps == 0


@pytest.mark.slow  # every day runs/test_execute finds systems out that do not keep what they promise
def test_a_system_that_restores_what_it_did_not_save_is_caught(driven_slowly):
    stale = driven_slowly.record("stale", came_far).faults
    assert any("restore() named step" in fault for fault in stale), stale
    assert any("had been called durable" in fault for fault in stale), stale
    # The step is right here, and only the loss gives it away; an honest twin shows that losses agree otherwise.
    honest = driven_slowly.record("rarely", came_far)
    assert honest.restores_checked == honest.restores == 2
    check_record(honest)
    old = driven_slowly.record("oldweights", came_far).faults
    assert old
    assert all("the loss of step" in fault for fault in old), old


@pytest.mark.slow
@pytest.mark.parametrize("liar", ["late", "forgets"])
def test_a_system_that_loses_what_it_called_durable_is_caught(liar, driven_slowly):
    record = driven_slowly.record(liar, came_far)
    assert any("had been called durable" in fault for fault in record.faults), record.faults
    if liar == "late":
        # It wrote nothing, so nothing is counted as kept.
        assert record.durable_steps == 0


def test_failures_in_quick_succession_kill_lives_that_have_not_begun(driven):
    record = driven.record("quick", last_incarnation_trained)  # two of its incarnations shall not begin
    assert len(record.lives) == 4
    check_uptimes(record)
    assert record.useful_steps == record.lives[-1].reached_step - record.first_step > 0
    assert record.faults == []


def test_a_life_that_fails_ends_the_run_without_a_record(driven):
    message = driven.error("fails")
    assert "incarnation 0" in message
    assert "keep" in message


@pytest.mark.parametrize("signal_number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_killed_run_leaves_no_process_no_lock_and_no_record(signal_number, job):
    process = job.start_child(spec_of("sync", window_s=600.0, failures_s=[0.3]))
    children = []
    try:
        said = ""
        for line in process.stdout:
            said += line
            if "incarnation 1" in line:
                break
        else:
            raise AssertionError(f"it ended before incarnation 1: {said}")
        deadline = time.monotonic() + 60
        while not children:
            assert time.monotonic() < deadline, "incarnation 1 did not begin within 60 s"
            children = psutil.Process(process.pid).children()
    finally:
        process.send_signal(signal_number)
        process.wait(200)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    lock = machine_lock()
    lock.acquire(200)
    lock.release()
    assert not job.out.exists()


# -- specs, records and the board ----------------------------------------------------------------------------------


def test_repetitions_share_a_cell_and_other_windows_do_not():
    spec = spec_of()
    again = spec.model_copy(update={"run": spec.run.model_copy(update={"repetition": 1, "seed": 9})})
    assert again.cell_hash == spec.cell_hash
    assert again.record_path().name == "r1.json"
    assert again.record_path().parent == spec.record_path().parent
    others = [
        spec_of(window_s=3.0),
        spec_of(failures_s=[0.6, 1.4]),
        spec_of(trace_sha256="1" * 64),
        spec_of(interval=4),
        spec_of("sync"),
    ]
    assert len({spec.cell_hash, *(other.cell_hash for other in others)}) == 6
    # What the throughput run of the cell measures is no matter here.
    longer = spec.model_copy(update={"run": spec.run.model_copy(update={"measured_steps": 99, "proof": True})})
    assert longer.cell_hash == spec.cell_hash
    assert spec.record_path().parts[:6] == ("testbox", "laptop", "goodput", "vgg16", "pccheck", "f3")


@pytest.mark.parametrize(
    "changed",
    [
        {"failures_s": [1.0, 0.5]},
        {"failures_s": [2.5]},
        {"failures_s": [0.0]},
        {"failures_s": [float("nan")]},
        {"window_s": 0.0},
        {"window_s": 1e9},
        {"trace_sha256": "x"},
        {"interval": 0},
    ],
)
def test_specs_that_cannot_be_are_refused(changed):
    with pytest.raises(ValidationError):
        spec_of(**changed)


def test_a_record_reads_back_and_refuses_another_place(driven, tmp_path):
    record = driven.record("quick", last_incarnation_trained)
    out = tmp_path / "r0.json"
    record.write(out)
    placed = tmp_path / record.spec.record_path()
    record.write(placed)
    assert GoodputRecord.load_placed(placed) == record
    with pytest.raises(LastgoodError, match="belong at"):
        GoodputRecord.load_placed(out)
    value = json.loads(out.read_text())
    del value["useful_steps"]
    out.write_text(json.dumps(value))
    with pytest.raises(LastgoodError, match="useful_steps"):
        GoodputRecord.load(out)


def test_a_board_keeps_losses_to_the_bit_and_forgets_a_life():
    board = Board()
    assert board.get("step") is None
    assert board.loss_of(7) is None
    for loss in (0.0, -0.0, 0.1, 1e-300):
        board.put_loss(7, loss)
        assert str(board.loss_of(7)) == str(loss)
    board.put(step=4, state_bytes=100)
    board.stamp("training_s")
    assert board.running
    board.begin_incarnation()
    assert board.get("step") is None
    assert board.get("state_bytes") == 100
    assert board.loss_of(7) == 1e-300
    assert not board.running


def test_uptime_is_the_time_of_restores_and_training():
    board = Board()
    assert board.uptime_s(100.0) == 0.0
    times = {"restoring_s": 10.0, "restored_s": 12.0, "training_s": 15.0}
    for name, time_s in times.items():
        board.stamp(name)
        board._times[list(times).index(name)] = time_s
        expected = {"restoring_s": 90.0, "restored_s": 2.0, "training_s": 87.0}[name]
        assert board.uptime_s(100.0) == expected
        assert board.running == (name != "restored_s")
