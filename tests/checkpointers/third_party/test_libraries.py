"""Optional third parties: what is said where they are missing, and what their libraries get wrong on their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class, why_unavailable
from lastgood.errors import ConfigError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.workflow_plan import left_out, plan_figure
from lastgood.experiments.plan.load import load_config, parse_config
from tests.checkpointers.support.small_training import SmallTraining

LAPTOP = Path(__file__).resolve().parents[3] / "config" / "laptop.yaml"


@pytest.fixture
def no_dcp(monkeypatch):
    monkeypatch.setattr(
        checkpointer_class("dcp"), "unavailable", classmethod(lambda kind: "it was put away; bring it back")
    )


def test_a_figure_leaves_out_what_the_machine_lacks_and_names_it(no_dcp):
    config, _ = parse_config(LAPTOP, parse_overrides(["systems=none,sync,dcp", "machine=testbox"]))
    assert left_out(config) == {"dcp": "it was put away; bring it back"}
    assert {spec.system for spec in plan_figure(config, "fig8")} == {"none", "sync"}


def test_the_smoke_test_of_a_system_that_the_machine_lacks_is_refused(no_dcp, tmp_path):
    entries = ["simple={system: dcp}", f"scratch={tmp_path}"]
    with pytest.raises(ConfigError, match=r"simple.system: 'dcp' cannot run here: it was put away"):
        load_config(LAPTOP, parse_overrides(entries))


def test_a_plan_on_the_command_line_says_what_it_leaves_out(tmp_path):
    missing = why_unavailable(["torchsnapshot"])
    if not missing:
        pytest.skip("torchsnapshot is installed")
    command = [sys.executable, "-c", "from lastgood.cli import main; main()", "plan", "fig8", "--no-probe"]
    done = subprocess.run(
        [*command, "systems=sync,torchsnapshot", f"scratch={tmp_path}", f"results_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=LAPTOP.parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert f"torchsnapshot is left out: {missing['torchsnapshot']}" in done.stderr


def test_every_system_of_the_house_is_available():
    assert why_unavailable(["none", "sync", "checkfreq", "pccheck", "dcp"]) == {}
    assert Checkpointer.unavailable() is None


@pytest.fixture
def worker_system(tmp_path):
    kind = checkpointer_class("nvrx")
    if kind.unavailable():
        pytest.skip(kind.unavailable())
    training = SmallTraining()
    checkpointer = kind(tmp_path)
    checkpointer.start(training.state)
    yield checkpointer, training
    checkpointer.close()


def save_one(checkpointer, training):
    training.step()
    checkpointer.save(training.step_number)
    checkpointer.drain(60)
    return checkpointer.events[-1]


def test_a_dead_worker_fails_one_save_and_the_next_starts_another(worker_system):
    checkpointer, training = worker_system
    assert save_one(checkpointer, training).outcome is Outcome.DURABLE
    worker = checkpointer._queue.persistent_caller.process
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)
    event = save_one(checkpointer, training)
    assert event.outcome is Outcome.FAILED
    assert "is dead" in event.error
    assert save_one(checkpointer, training).outcome is Outcome.DURABLE


def test_the_worker_ends_at_close(worker_system):
    checkpointer, training = worker_system
    save_one(checkpointer, training)
    worker = psutil.Process(checkpointer._queue.persistent_caller.process.pid)
    checkpointer.close()
    worker.wait(60)
