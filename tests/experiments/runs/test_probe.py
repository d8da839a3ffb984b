"""A look at this machine for plans: what it finds, where it is kept, and when it is taken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.experiments.machine.facts import machine_label
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.runs import probe as probe_module
from lastgood.experiments.runs.probe import Probe, load_probe, with_probe
from lastgood.locks import FileLock
from tests.experiments.support import staged_probe
from tests.experiments.support.run_specs import spec_of
from tests.experiments.support.warm_runs import WarmRun
from tests.suggestions.following import advice, follows, hear
from tests.support.patience import wait_until

ROOT = Path(__file__).resolve().parents[3]


def probe_of(scratch: Path, **changes: Any) -> Probe:
    """A probe of this machine."""
    found = {"options": {}, "build_s": {"vgg16": 1.0}, "step_s": {"vgg16": 0.5}, "persist_bytes_per_s": 1e9}
    where = {"machine": machine_label(), "scratch": str(scratch.absolute()), "device": "cpu", "threads": 1}
    return Probe.model_validate({**found, **where, "disturbed": False, **changes})


SMALL = "workloads={vgg16: {batch_size: 1, image_size: 32, classes: 10, classifier_width: 8}}"


def plan(folder: Path, *more: str) -> tuple[str, float]:
    """What it says, and its minutes."""
    places = [f"results_dir={folder}/results", f"data_dir={folder}/data", f"scratch={folder}/scratch"]
    few = ["models=vgg16", "systems=none,sync", "intervals=10", "threads=1", SMALL]
    words = [
        "plan",
        "fig8",
        "--configfile",
        ROOT / "config" / "laptop.yaml",
        "--json",
        "--config",
        *few,
        *places,
        *more,
    ]
    process = WarmRun(words)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    said, _, document = f"\n{output}".partition("\n{\n")
    return said, json.loads("{" + document)["minutes_left"]


def plan_in_turn(folder: Path) -> tuple[str, float]:
    """The same when nobody measures on this machine."""
    said = [("", 0.0)]

    def looked() -> bool:
        said[0] = plan(folder)
        return "no probe of this machine" not in said[0][0]

    wait_until(looked, "the machine's turn", 240)
    return said[0]


@pytest.mark.slow
def test_a_machine_is_looked_at_once_and_predicts_by_what_was_found(tmp_path: Path) -> None:
    kept = tmp_path / "results" / machine_label() / "laptop" / "probe.json"
    said, _ = plan(tmp_path, "machine=another")
    assert "probing" not in said
    said, minutes = plan_in_turn(tmp_path)
    assert "probing this machine with vgg16" in said
    found = Probe.model_validate_json(kept.read_bytes())
    assert found.step_s.keys() == {"vgg16"} and found.persist_bytes_per_s > 0
    said, again = plan(tmp_path)
    assert ("probing" in said, again) == (False, minutes)
    # A machine that is ten times as slow.
    slow = found.model_copy(update={"step_s": {"vgg16": 10 + found.step_s["vgg16"]}})
    kept.write_text(slow.model_dump_json())
    assert plan(tmp_path)[1] > minutes
    kept.write_text('{"step_s": [')
    assert "probing this machine" in plan_in_turn(tmp_path)[0]


def test_a_busy_machine_is_not_looked_at(tmp_path: Path) -> None:
    lock = machine_lock()
    lock.acquire(240)
    try:
        said, minutes = plan(tmp_path)
    finally:
        lock.release()
    assert "no probe of this machine: " in said and minutes > 0


def test_other_options_of_a_workload_are_another_probe(tmp_path: Path) -> None:
    spec = spec_of("none", interval=0)
    other = {**spec.workload_options, "batch_size": 9}
    probe = probe_of(tmp_path, options={"vgg16": spec.workload_options}, step_s={"vgg16": 0.5})
    path = tmp_path / "probe.json"
    assert load_probe(path, [spec], tmp_path) is None
    path.write_text(probe.model_dump_json())
    assert load_probe(path, [spec], tmp_path) == probe
    for changes in ({"workload_options": other}, {"threads": spec.threads + 1}, {"device": "cuda"}):
        assert load_probe(path, [spec.model_copy(update=changes)], tmp_path) is None
    # Another disk, and a results folder that came from another machine.
    assert load_probe(path, [spec], tmp_path / "elsewhere") is None
    path.write_text(probe.model_copy(update={"machine": "another-64c"}).model_dump_json())
    assert load_probe(path, [spec], tmp_path) is None


@pytest.mark.parametrize(
    "there",
    ["a folder", "a link to nowhere", "a pipe", "a device", "no text", "too much", "half of it", "of before"],
)
def test_a_file_that_is_no_probe_counts_as_none(tmp_path: Path, there: str) -> None:
    path, text = tmp_path / "probe.json", probe_of(tmp_path).model_dump_json()
    if there == "a folder":
        path.mkdir()
    elif there == "a pipe":
        os.mkfifo(path)  # which nobody writes to
    elif there == "a device":
        path.symlink_to("/dev/zero")
    elif there in ("no text", "too much"):
        path.write_bytes(b"\xff\0{" if there == "no text" else text.encode() + b" " * (1 << 20))
    elif there == "a link to nowhere":
        path.symlink_to(tmp_path / "nowhere" / "probe.json")
    else:
        kept = {**json.loads(text)} if there == "of before" else {}
        kept.pop("machine", None)
        path.write_text(json.dumps(kept) if kept else text[: len(text) // 2])
    assert load_probe(path, [], tmp_path) is None


@pytest.mark.parametrize(
    "values",
    [
        {"step_s": {}},
        {"build_s": {}},
        {"step_s": {"vgg16": 0.0}},
        {"step_s": {"vgg16": -1.0}},
        {"step_s": {"vgg16": float("nan")}},
        {"step_s": {"vgg16": 1e300}},
        {"build_s": {"vgg16": float("inf")}},
        {"persist_bytes_per_s": 0.0},
        {"persist_bytes_per_s": float("nan")},
        {"step_s": [["vgg16", 1.0]]},
        {"options": None},
        {"disturbed": None},
    ],
)
def test_numbers_that_no_machine_has_count_as_none(tmp_path: Path, values: dict[str, Any]) -> None:
    """A plan would divide by them, or have no median."""
    path, found = tmp_path / "probe.json", probe_of(tmp_path)
    kept = {**found.model_dump(mode="json"), **values}
    path.write_text(json.dumps(kept))
    assert load_probe(path, [], tmp_path) is None
    path.write_text(found.model_dump_json())
    assert load_probe(path, [], tmp_path) == found


class StagedPlan:
    """`lastgood plan` whose look at the machine stands still in its middle, in a session of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "results" / machine_label() / "laptop" / "probe.json"

    def start(self) -> subprocess.Popen[str]:
        places = [
            f"results_dir={self.folder}/results",
            f"data_dir={self.folder}/data",
            f"scratch={self.folder}/scratch",
        ]
        words = ["plan", "fig8", "--configfile", str(ROOT / "config" / "laptop.yaml"), "--json", "--config", *places]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.experiments.support.staged_probe", *words, "models=vgg16", SMALL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, staged_probe.FOLDER: str(self.folder)},
            start_new_session=True,
        )

    def looking(self, plan: subprocess.Popen[str]) -> psutil.Process:
        """The process that looks, when it is in the middle."""
        begun = self.folder / staged_probe.BEGUN

        def there() -> bool:
            assert plan.poll() is None, plan.communicate()
            return begun.exists()

        wait_until(there, "the middle of the look", 120)
        found = psutil.Process(int(begun.read_text()))
        begun.unlink()
        return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_plan_that_is_ended_in_the_middle_of_its_look_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    """The look ends with it, nothing of it is kept, and the next plan looks again."""
    staged = StagedPlan(tmp_path)
    plan = staged.start()
    try:
        looking = staged.looking(plan)
        if how == signal.SIGINT:
            os.killpg(plan.pid, how)  # as a terminal does
        else:
            plan.send_signal(how)
        said, errors = plan.communicate(timeout=60)
        assert plan.returncode in (-how, 130), errors
        assert said == "" and "Traceback" not in errors
        looking.wait(60)
    finally:
        plan.kill()
        plan.communicate(timeout=60)
    assert not staged.kept.exists() and not list(tmp_path.glob("results/**/*.*"))
    with FileLock(tmp_path / staged_probe.TURN, "the test's turn"):
        pass  # nobody holds the machine
    (tmp_path / staged_probe.GOES_ON).touch()
    again = staged.start()
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0 and "probing this machine with vgg16" in errors, errors
    assert Probe.model_validate_json(staged.kept.read_bytes()).step_s == {"vgg16": 0.5}
    assert [path.name for path in staged.kept.parent.iterdir()] == ["probe.json"]


@pytest.mark.parametrize(
    ("what", "reason"), [("killed", "it ended with exit code -9"), ("full", "No space left on device")]
)
def test_a_look_that_fails_leaves_a_plan_without_it(tmp_path: Path, what: str, reason: str) -> None:
    """As by a killer that looks for memory, or on a full disk."""
    staged = StagedPlan(tmp_path)
    if what == "full":
        (tmp_path / staged_probe.FULL).touch()
    plan = staged.start()
    try:
        if what == "killed":
            staged.looking(plan).kill()
        said, errors = plan.communicate(timeout=60)
    finally:
        plan.kill()
        plan.communicate(timeout=60)
    assert plan.returncode == 0, errors
    assert "no probe of this machine: " in errors and reason in " ".join(errors.split()), errors
    assert "Traceback" not in errors
    assert json.loads(said)["minutes_left"] > 0 and not staged.kept.exists()


def found_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, probe: Probe) -> list[str]:
    """What a probe that finds this reports."""
    monkeypatch.setattr(probe_module, "machine_lock", lambda: FileLock(tmp_path / "turn", "the test's turn"))
    done = subprocess.CompletedProcess([], 0, probe.model_dump_json().encode(), b"")
    monkeypatch.setattr(probe_module.subprocess, "run", lambda *_, **__: done)
    said: list[str] = []
    arguments = ([spec_of("none", interval=0)], tmp_path / "data", tmp_path, tmp_path / "kept" / "probe.json")
    assert probe_module.probe_machine(*arguments, said.append) == probe
    return said


def test_what_others_disturbed_is_used_once_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = found_by(monkeypatch, tmp_path, probe_of(tmp_path, disturbed=True))
    assert "others had much of this machine" in said[-1] and not (tmp_path / "kept").exists()
    found_by(monkeypatch, tmp_path, probe_of(tmp_path))
    assert (tmp_path / "kept" / "probe.json").exists()


def test_a_probe_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk."""
    (tmp_path / "kept").write_text("a file where the folder goes")
    assert "the probe is not kept: " in found_by(monkeypatch, tmp_path, probe_of(tmp_path))[-1]


def test_what_was_not_looked_at_is_scaled_as_what_was() -> None:
    grid = load_grid(ROOT, "fig8")
    known = grid.prediction["laptop"]
    step_s = 3 * known.step_s["vgg16"]
    probe = probe_of(Path(), step_s={"vgg16": step_s}, persist_bytes_per_s=5e8)
    found = with_probe(grid, probe, "laptop").prediction["laptop"]
    assert found.step_s["vgg16"] == step_s
    assert found.step_s["opt"] == pytest.approx(3 * known.step_s["opt"])
    assert found.other_step_s == pytest.approx(3 * known.other_step_s)
    assert found.persist_bytes_per_s == 5e8
    assert with_probe(grid, probe, "laptop").prediction["gpu"] == grid.prediction["gpu"]


@follows("`--no-probe` predicts without it")
def test_a_probe_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_MOST_S", 0.01)
    monkeypatch.setattr(probe_module, "machine_lock", lambda: FileLock(tmp_path / "turn", "the test's turn"))
    places = [f"results_dir={tmp_path}/results", f"data_dir={tmp_path}/data", f"scratch={tmp_path}/scratch"]

    def planned(*more: str) -> str:
        words = ["plan", "fig8", "--configfile", str(ROOT / "config" / "laptop.yaml"), *more, "--config", *places]
        done = CliRunner().invoke(app, [*words, "models=vgg16", SMALL], catch_exceptions=False)
        assert done.exit_code == 0
        return " ".join(done.stderr.split())

    message = hear(planned())
    assert "no probe of this machine: it was not done within" in message
    assert "no probe" not in planned(advice(message, r"`(--no-probe)` predicts"))
