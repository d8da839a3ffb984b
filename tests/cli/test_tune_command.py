"""`lastgood tune`: the table, the file, the refusals, and a workload for real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.checkpointers.pccheck.tuning_file import TUNING_FILE, read_tuning
from lastgood.cli import app
from lastgood.errors import ConfigError, LockHeld
from lastgood.experiments.machine import lock as lock_module
from lastgood.experiments.machine.facts import usable_cores
from lastgood.locks import FileLock

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ("--iteration-s", "0.05", "--state-bytes", "1.5MB", "--budget-s", "1")


@pytest.fixture(autouse=True)
def _own_lock(tmp_path, monkeypatch):
    """Tests must neither wait for a measurement on this machine nor hold one up."""
    path = tmp_path / "machine.lock"
    monkeypatch.setattr(lock_module, "machine_lock", lambda: FileLock(path, "the test's turn"))


def tune(*arguments, code=0):
    done = CliRunner().invoke(app, ["tune", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def test_numbers_give_a_table_with_the_choice_marked_and_a_file(tmp_path):
    done = tune(tmp_path / "job", *NUMBERS)
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    threads = 1 if usable_cores() == 1 else 2  # 1.5 MB are two chunks of 1 MiB
    left_out = re.search(r"not tried, for lack of time or memory: (\d+) combinations", " ".join(done.output.split()))
    assert rows  # a busy machine does not come to all of them within the budget, and then says so
    assert len(rows) + (int(left_out[1]) if left_out else 0) == 4 * threads
    (chosen,) = [row for row in rows if "*" in row]
    interval, options = read_tuning(tmp_path / "job" / TUNING_FILE)
    cells = [cell.strip() for cell in chosen.strip("│").split("│")]
    assert cells[1:3] == [str(options.max_in_flight), str(options.writer_threads)]
    assert cells[-1] == str(interval)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [TUNING_FILE]


def test_json_holds_everything_and_the_file_goes_where_it_is_asked_for(tmp_path):
    found = json.loads(tune(tmp_path / "job", *NUMBERS, "--json", "--out", tmp_path / "mine.yaml").stdout)
    assert found["state_bytes"] == 1_500_000
    assert found["kept"] is None
    assert found["curve"][0]["write_s"]
    assert read_tuning(tmp_path / "mine.yaml")[0] == found["interval_steps"]
    assert list((tmp_path / "job").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "either --workload NAME"),
        (("--workload", "vgg16", *NUMBERS), "either --workload NAME"),
        (("--iteration-s", "1"), "belong together"),
        ((*NUMBERS, "--config", "seed=1"), "mean nothing without it"),
        (("--iteration-s", "1", "--state-bytes", "many"), "--state-bytes: not a size"),
        (("--iteration-s", "1", "--state-bytes", "0"), "state_bytes must be at least 1"),
        ((*NUMBERS, "--slowdown", "0.5"), "slowdown"),
        (("--workload", "alexnet"), "known: vgg16"),
        (("--workload", "vgg16", "--config", "no_such=1"), "no_such"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        tune(tmp_path / "job", *arguments)
    assert part in str(caught.value)
    assert not (tmp_path / "job").exists()


def test_it_waits_for_its_turn(tmp_path, monkeypatch):

    monkeypatch.setattr("lastgood.experiments.machine.lock.TURN_S", 1.0)
    with FileLock(tmp_path / "machine.lock", "another run"), pytest.raises(LockHeld, match="waited 1 s"):
        tune(tmp_path / "job", *NUMBERS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_workload_is_trained_with_and_without_checkpoints(tmp_path):
    """In a process of its own: it sets threads and kernels for all of torch."""
    program = (
        "import sys; from pathlib import Path; from lastgood.experiments.machine import lock as machine_lock\n"
        "from lastgood.locks import FileLock\n"
        "from lastgood.workloads.data.prepare import prepare_dataset\n"
        "from lastgood.cli import main\n"
        "data, lock = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))\n"
        "machine_lock.machine_lock = lambda: FileLock(lock, 'the test')\n"
        "prepare_dataset('images', data); main()"
    )
    data = tmp_path / "data"
    small = "workloads={vgg16: {batch_size: 2, image_size: 32, classes: 10, classifier_width: 8}}"
    overrides = ["--config", f"data_dir={data}", "--config", small, "--config", "threads=1"]
    arguments = ["tune", tmp_path / "job", "--workload", "vgg16", *overrides, "--slowdown", "100"]
    for budget_s in (15, 100):  # a busy machine may not come to the trial within the first
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                program,
                data,
                tmp_path / "machine.lock",
                *arguments,
                f"--budget-s={budget_s}",
                "--json",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        if found["kept"] is not None:
            break
        assert found["checks"] == [] and "give a longer budget" in found["warnings"][-1]
    assert found["kept"] is True
    assert found["checks"][-1]["interval_steps"] == found["interval_steps"]
    assert found["state_bytes"] > 2 * 4 * 14_000_000, "VGG's convolutions alone, with their momentum"
    assert read_tuning(tmp_path / "job" / TUNING_FILE)[0] == found["interval_steps"]


def test_a_slowdown_that_cannot_be_kept_writes_nothing_and_exits_1(tmp_path, monkeypatch):
    from lastgood.training import tuning

    really = tuning.tune

    def over(*arguments, **options):
        check = tuning.SlowdownCheck(
            interval_steps=9, checkpoints=3, plain_iteration_s=1.0, iteration_s=3.0, predicted=1.0
        )
        return really(*arguments, **options).model_copy(update={"checks": [check]})

    monkeypatch.setattr(tuning, "tune", over)
    done = tune(tmp_path / "job", *NUMBERS, code=1)
    assert "over" in done.stdout
    assert not (tmp_path / "job" / TUNING_FILE).exists()
