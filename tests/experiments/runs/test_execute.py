"""One run, from its spec to its record, and the bad days of it. Real processes, real checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from lastgood.errors import LastgoodError
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.runs.children import hear_child, import_before_fork, start_child
from lastgood.experiments.runs.measure import prove_restore, train_and_measure, train_and_prove
from lastgood.workloads.data.prepare import prepare_dataset
from tests.checkpointers.support.peer_processes import wait_for_no_peer
from tests.experiments.support.run_specs import COMMAND, spec_of
from tests.experiments.support.warm_runs import WarmRun
from tests.suggestions.following import advice, follows, refusal
from tests.support.patience import wait_until
from tests.support.warm import WarmProcess


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare_dataset("images", folder)
    return folder


class Job:
    def __init__(self, folder: Path, data_dir: Path) -> None:
        self.out = folder / "records" / "r0.json"
        self.scratch = folder / "scratch of runs"
        self.data_dir = data_dir

    def arguments(self, spec, *more):
        found = ["--spec", spec.canonical_json(), "--out", str(self.out)]
        return [*found, "--data-dir", str(self.data_dir), "--scratch", str(self.scratch), *more]

    def start(self, spec, *more):
        return WarmRun(["run", *self.arguments(spec, *more)])

    def finish(self, spec, *more):
        process = self.start(spec, *more)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def left(self):
        return list(self.scratch.glob("*")) if self.scratch.exists() else []


@pytest.fixture
def job(tmp_path, data_dir):
    return Job(tmp_path, data_dir)


@pytest.mark.parametrize("system", [pytest.param("sync", marks=pytest.mark.slow), "pccheck"])
def test_one_checkpoint_at_a_time_of_a_blob(system, job):
    options = {"workload": "blob", "workload_options": {"megabytes": 3}, "drain_each": True}
    trace = job.out.with_name("trace.json")
    code, output = job.finish(spec_of(system, interval=1, **options), "--timeline", str(trace))
    assert code == 0, output
    record = RunRecord.load(job.out)
    assert record.spec.drain_each
    assert record.proof.equal
    assert (record.counts.started, record.counts.durable) == (4, 4)
    assert len(record.clocks.persist_s) == 4
    assert 3_000_000 <= record.workload.state_bytes < 3_050_000
    assert record.workload.data_name == "points"
    # Each is over before the next step, nothing is left to drain, and the waits are no stall of save or update.
    spans = {event["name"]: event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    for step in range(2, 6):
        whole, within = spans[f"checkpoint of step {step}"], spans[f"step {step}"]
        assert within["ts"] <= whole["ts"] and whole["ts"] + whole["dur"] <= within["ts"] + within["dur"]
    assert sum(record.clocks.persist_s) < record.clocks.elapsed_s


@pytest.mark.parametrize(
    "system",
    [
        pytest.param("none", marks=pytest.mark.slow),
        pytest.param("sync", marks=pytest.mark.slow),
        pytest.param("checkfreq", marks=pytest.mark.slow),
        pytest.param("gpm", marks=pytest.mark.slow),
        "gemini",
        "pccheck",
    ],
)
def test_a_run_gives_a_whole_record_with_its_proof(system, job):
    spec = spec_of(system, interval=0 if system == "none" else 2)
    code, output = job.finish(spec)
    assert code == 0, output
    assert output.splitlines()[0].startswith("lastgood run --spec '{")
    record = RunRecord.load(job.out)
    assert record.spec == spec
    clocks = record.clocks
    assert len(clocks.step_s) == len(record.workload.losses) == 4
    assert clocks.iterations_per_s == pytest.approx(4 / clocks.elapsed_s)
    assert clocks.durable_iterations_per_s <= clocks.iterations_per_s
    assert record.workload.parameters * 8 <= record.workload.state_bytes < record.workload.parameters * 8 + 100_000
    if system == "none":
        assert record.proof is None
        assert record.counts.started == clocks.drain_s == record.resources.bytes_written == 0
    else:
        assert record.counts.started == 2
        assert record.counts.durable + record.counts.superseded == 2 == len(clocks.persist_s)
        assert record.resources.bytes_written >= 2 * record.workload.state_bytes
        assert record.faults(min_durable=1) == []
        assert len(record.proof.next_losses_restored) == 2
    assert job.left() == []
    assert not wait_for_no_peer(job.scratch, 60.0), "a peer outlives the trainer, but not the run"


def lie(name, job):
    script = Path(__file__).parents[1] / "support" / "lying_systems.py"
    process = WarmRun([name, spec_of(name).canonical_json(), job.out, job.data_dir, job.scratch], script)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def test_a_system_that_gives_back_an_old_state_is_found_out(job):
    code, output = lie("stale", job)
    assert code == 0, output
    record = RunRecord.load(job.out)
    assert not record.proof.equal
    assert record.proof.digest_live != record.proof.digest_restored
    assert "the restored state differs" in " ".join(record.faults())


@pytest.mark.parametrize(
    ("name", "words"), [("late", "no complete checkpoint"), ("unfinished", "after drain() steps [1] are pending")]
)
def test_a_system_that_is_durable_in_words_only_is_found_out(job, name, words):
    code, output = lie(name, job)
    assert code != 0
    assert words in output
    assert not job.out.exists()


def test_a_verdict_can_be_had_at_once(job):
    # One at a time: of two under way the newer may be durable first, and a run with one durable checkpoint fails.
    code, output = job.finish(spec_of(system_options={"max_in_flight": 1}), "--check")
    assert code == 0, output
    assert "passed: " in output
    code, output = job.finish(spec_of("none", 0), "--check")
    assert code == 1
    assert "fault: " in output


def test_a_terminal_that_shows_colours_changes_nothing(job, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, output = job.finish(spec_of("none", 0))
    assert code == 0, output


def test_a_killed_run_leaves_no_record_no_child_and_its_scratch_goes_next_time(job):
    process = job.start(spec_of(measured_steps=100_000))
    children = []
    for line in process.stdout:
        if "measuring" in line:
            children = [
                int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            ]
            break
    assert children
    process.kill()
    process.wait()
    wait_until(
        lambda: not any(running(pid) for pid in children),
        lambda: f"the ends of children {children} of the run",
        60,
        every_s=0.05,
    )
    assert not job.out.exists()
    assert len(job.left()) == 1
    code, output = job.finish(spec_of("none", 0))
    assert code == 0, output
    assert job.left() == []


def half_a_word(pipe):
    os.write(pipe.fileno(), (1000).to_bytes(4, "big") + b"and then")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_child_that_dies_in_the_midst_of_a_word_is_named_as_any_other():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=half_a_word, args=(theirs,))
    process.start()
    theirs.close()
    with pytest.raises(LastgoodError, match=r"^the trainer died while measuring, exit code -9$"):
        hear_child("the trainer", process, ours, "measuring")
    ours.close()


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_ends_everything_at_once(job):
    process = job.start(spec_of(measured_steps=100_000))
    for line in process.stdout:
        if "measuring" in line:
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert not job.out.exists()
    assert job.left() == []


def test_a_child_that_dies_is_named_with_its_stage(job):
    process = job.start(spec_of(measured_steps=100_000))
    for line in process.stdout:
        if "measuring" in line:
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            break
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "the trainer of vgg16 pccheck f2 r0 died while measuring, 100000 steps, exit code -9" in output
    assert not job.out.exists()


@pytest.mark.parametrize(
    "system", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("sync", "checkfreq")), "pccheck"]
)
def test_a_full_disk_fails_the_run_with_path_and_bytes(system, job):
    process = WarmRun(["run", *job.arguments(spec_of(system))], file_bytes=20_000 << 10)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert str(job.scratch) in output
    assert "bytes" in output
    assert "checkpoints failed" in output
    assert not job.out.exists()
    assert job.left() == []


def test_waits_its_turn_and_says_for_whom(job):
    lock = machine_lock()
    lock.acquire(timeout_s=200)
    process = job.start(spec_of("none", 0))
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "waiting" in line:
                break
        assert "this machine's turn to measure" in lines[-1]
    finally:
        lock.release()
    assert process.wait(timeout=200) == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [("{}", "--spec: not a run"), ("nonsense", "--spec: not a run")],
)
def test_a_spec_that_is_none_is_refused(spec, words, tmp_path):
    done = subprocess.run([*COMMAND, "--spec", spec, "--out", str(tmp_path / "r.json")], capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr


@follows("cannot fork: threads are running already ({}); start runs through `lastgood run`")
def test_threads_that_a_fork_would_lose(job, tmp_path):
    spec, end = spec_of("sync"), threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,))
    thread.start()
    try:
        message = refusal(lambda: import_before_fork(spec.workload))
    finally:
        end.set()
        thread.join()
    assert advice(message, r"`lastgood (run)`") == "run"  # which `finish` calls
    job.data_dir = tmp_path / "none"
    _, output = job.finish(spec)
    assert "cannot fork" not in output and "run `lastgood data prepare`" in " ".join(output.split())


def test_missing_data_names_the_command_that_makes_it(job, tmp_path):
    job.data_dir = tmp_path / "nothing"
    code, output = job.finish(spec_of("none", 0))
    assert code == 1
    assert "lastgood data prepare" in " ".join(output.split())
    assert "all logs of this attempt" not in output


def test_logs_of_shadows_outlive_a_run_that_fails(job, tmp_path):
    job.data_dir = tmp_path / "nothing"
    code, output = job.finish(spec_of("checkmate", 1, shadows=1))
    assert code == 1 and "lastgood data prepare" in " ".join(output.split())
    kept = job.out.with_suffix(".logs")
    assert f"all logs of this attempt are kept until the next one: {kept}" in output
    assert [path.name for path in kept.rglob("*.log")] == ["shadow-0.log"] and job.left() == []


def test_scratch_in_memory_is_refused(job):
    job.scratch = Path("/dev/shm/lastgood-test-scratch")
    code, output = job.finish(spec_of())
    assert code == 2
    assert "tmpfs" in output
    assert not job.scratch.exists()


def test_a_scratch_that_cannot_be_made_is_named(job, tmp_path):
    (tmp_path / "file").write_text("")
    job.scratch = tmp_path / "file" / "scratch"
    code, output = job.finish(spec_of())
    assert code == 1
    assert "set `scratch`" in " ".join(output.split())


@pytest.mark.parametrize("system", [pytest.param("sync", marks=pytest.mark.slow), "pccheck"])
def test_the_live_half_of_the_proof_in_a_process_of_its_own(system, job):
    """As on CUDA, where what the proof needs would slow down the measurement."""
    spec = spec_of(system)
    checkpoints = job.scratch / "checkpoints"
    checkpoints.mkdir(parents=True)

    def call(function, *arguments):
        process, pipe = start_child(function.__name__, function, arguments)
        while True:
            kind, found = hear_child(function.__name__, process, pipe, "testing")
            assert kind != "error", found
            if kind == "result":
                process.join(60)
                return found

    measured = call(train_and_measure, spec.model_copy(update={"proof": False}), checkpoints, job.data_dir, False)
    assert measured.proof is None
    live = call(train_and_prove, spec, checkpoints, job.data_dir)
    assert live.step == 1 + 4 + 2
    restored = call(prove_restore, spec, checkpoints, job.data_dir)
    assert (restored.step, restored.digest, restored.next_losses) == (live.step, live.digest, live.next_losses)


def test_what_makes_cublas_deterministic_is_set_for_proofs_only(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "before")  # put back at the end
    program = "import os, sys; from lastgood.training.loop import configure_compute\n"
    program += "configure_compute(1, sys.argv[1] == 'proof', later=sys.argv[1] == 'later')\n"
    program += "print(os.environ.get('CUBLAS_WORKSPACE_CONFIG'))"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for when, expected in (("measurement", "None"), ("proof", ":4096:8"), ("later", ":4096:8")):
        output, _ = WarmProcess(["-c", program, when]).communicate()
        assert output.split() == [expected]
