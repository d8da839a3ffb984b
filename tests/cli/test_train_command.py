"""`lastgood train` beside `lastgood shadow serve`: real processes, started by environment variables alone."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.gradients.shadow.launch_env import TrainerPlace, find_trainer
from lastgood.ports import free_ports
from lastgood.state import seed_everything
from lastgood.training.loop import configure_compute
from lastgood.workloads.data.prepare import prepare_dataset
from lastgood.workloads.registry import build_workload, workload_options_class
from tests.experiments.support.warm_runs import WarmRun

SIZE = {"batch_size": 2, "image_size": 32, "classes": 10}
CPUS = sorted(os.sched_getaffinity(0))
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NUM_TRAINING")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_dataset("images", folder)
    return folder


def affinities(pid: int) -> list[set[int]]:
    """CPUs of each thread of a process, without those that end meanwhile."""
    found = []
    for one in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(one.name)))
    return found


class Job:
    """Two trainers and one shadow; every process gets its place from its environment."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        self.folder = folder
        self.data_dir = data_dir
        self.started: list[WarmRun] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()
        for process in self.started:
            process.wait(timeout=60)

    def start(self, words: list[str], **environment: object) -> WarmRun:
        """A process whose standard error goes to a file, which `said` reads."""
        kept = {name: value for name, value in os.environ.items() if name not in (*LAUNCHERS, "NUM_STORAGE")}
        given = {name: str(value) for name, value in environment.items()}
        env = {**kept, "OMP_NUM_THREADS": "1", "NUM_TRAINING": "2", "MASTER_ADDR": "127.0.0.1", **given}
        with self._errors(len(self.started)).open("wb") as errors:
            self.started.append(WarmRun(words, stderr=errors, env=env))
        return self.started[-1]

    def _errors(self, number: int) -> Path:
        return self.folder / f"errors-{number}"

    def said(self, process: WarmRun) -> str:
        return self._errors(self.started.index(process)).read_text()

    def shadow(self, *words: str, **environment: object) -> tuple[WarmRun, Path]:
        address = self.folder / "address.json"
        common = ["shadow", "serve", "--token-file", str(self.folder / "token"), "--rendezvous"]
        return self.start([*common, "--address-file", str(address), *words], **environment), address

    def trainers(self, steps: int, *words: str, ranks: int = 2, **environment: object) -> list[dict[str, Any]]:
        common = ["train", "--model", "resnet18", "--steps", str(steps), "--json", "--timeout-s", "120"]
        common += ["--token-file", str(self.folder / "token"), "--directory", str(self.folder / "job")]
        config = [
            f"workloads={json.dumps({'resnet18': SIZE})}",
            f"data_dir={self.data_dir}",
            "machine=testbox",
            "threads=1",
        ]
        common += [word for entry in config for word in ("--config", entry)]
        local = {"LOCAL_WORLD_SIZE": ranks, **environment}
        processes = [
            self.start([*common, *words], RANK=rank, LOCAL_RANK=rank, **local) for rank in reversed(range(ranks))
        ]
        found = []
        for process in reversed(processes):
            out, _ = process.communicate(timeout=200)
            err = self.said(process)
            assert process.returncode == 0, err
            found.append({**json.loads(out), "said": err})
        return found


def wait_for(path: Path, process: WarmRun) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"{path} did not come within 120 s"
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def losses_without_lastgood(data_dir: Path, steps: int) -> list[list[float]]:
    """Both ranks' losses, from gradients that are averaged by hand in one process."""
    configure_compute(1, deterministic=True)
    seed_everything(0)
    options = workload_options_class("resnet18").model_validate(SIZE)
    workload = build_workload("resnet18", options, data_dir=data_dir, data_path=None, seed=0, device="cpu")
    parameters = list(workload.model.parameters())
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        found = []
        for rank in range(2):
            loss = workload.loss(workload.data.batch(2 * step + rank))
            losses[rank].append(loss.item())
            found.append(torch.autograd.grad(loss, parameters))
        for parameter, first, second in zip(parameters, *found, strict=True):
            parameter.grad = first / 2 + second / 2
        workload.optimizer.step()
    return losses


@pytest.mark.slow
def test_the_artefacts_variables_start_a_training_that_goes_on_behind_its_end(tmp_path: Path, data_dir: Path) -> None:
    (shadows_port, *life_ports), cpu = free_ports(3), CPUS[-1]
    with Job(tmp_path, data_dir) as job:
        serve = {"NUM_STORAGE": 1, "RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": shadows_port}
        shadow, path = job.shadow("--cpus", str(cpu), **serve)
        address = "{host}:{port}".format(**wait_for(path, shadow))
        pinned = ["--cpus", ",".join(map(str, CPUS))] if len(CPUS) > 1 else []
        where = ["--shadows-at", f"127.0.0.1:{shadows_port}", *pinned, "--threads", "1"]
        lives = [
            job.trainers(steps, *where, WORLD_SIZE=2, MASTER_PORT=port)
            for steps, port in zip((3, 5), life_ports, strict=True)
        ]
        status = CliRunner().invoke(app, ["shadow", "status", address, "--token-file", f"{tmp_path}/token", "--json"])
        pinned_threads = affinities(shadow.pid)
    assert json.loads(status.stdout)["step"] == 5
    assert {cpu} in pinned_threads
    for life, first, last in ((lives[0], 0, 3), (lives[1], 3, 5)):
        for rank, one in enumerate(life):
            assert (one["rank"], one["first_step"], one["last_step"]) == (rank, first, last)
            assert (one["durable"], one["failed"]) == (last - first, 0)
            assert "cut off" not in one["said"]  # nobody was: a tidy end is no lost shadow
            if pinned:
                assert one["cpus"] == CPUS[len(CPUS) * rank // 2 : len(CPUS) * (rank + 1) // 2]
    assert "begins again: " in lives[0][0]["said"]
    assert "restored step 3 from the shadows" in lives[1][0]["said"] and not lives[1][1]["said"].count("restored")
    expected = losses_without_lastgood(data_dir, 5)
    assert [lives[0][rank]["losses"] + lives[1][rank]["losses"] for rank in range(2)] == expected


def test_one_launcher_starts_trainers_and_shadows_as_one_world(tmp_path: Path, data_dir: Path) -> None:
    world = {"NUM_TRAINING": 1, "NUM_STORAGE": 1, "WORLD_SIZE": 2, "MASTER_PORT": free_ports()[0]}
    with Job(tmp_path, data_dir) as job:
        (tmp_path / "token").touch(mode=0o600)
        (tmp_path / "token").write_text("a secret of this test\n")
        job.shadow(RANK=1, **world)
        found = job.trainers(1, ranks=1, **world)
    assert [(one["rank"], one["last_step"], one["durable"]) for one in found] == [(0, 1, 1)]


@pytest.mark.parametrize(("words", "why"), [(["--policy", "wait"], "policy"), (["--shadow", "here"], "no HOST:PORT")])
def test_what_checkmate_cannot_be_is_refused_before_anybody_is_waited_for(
    tmp_path: Path, words: list[str], why: str
) -> None:
    common = [
        "train",
        "--model",
        "resnet18",
        "--steps",
        "1",
        "--token-file",
        f"{tmp_path}/t",
        "--directory",
        f"{tmp_path}",
    ]
    found = CliRunner().invoke(app, [*common, *words])
    assert isinstance(found.exception, ConfigError) and why in str(found.exception)


def test_places_of_trainers() -> None:
    assert find_trainer({}) == TrainerPlace(0, 1, 1)
    assert find_trainer({"RANK": "1", "WORLD_SIZE": "4"}) == TrainerPlace(1, 4, 1)
    together = {"RANK": "3", "WORLD_SIZE": "6", "NUM_TRAINING": "4", "NUM_STORAGE": "2"}
    assert find_trainer(together) == TrainerPlace(3, 4, 2)
    for wrong, message in (
        ({**together, "RANK": "4"}, "RANK 4 does not train: ranks 0 to 3 do"),
        ({**together, "WORLD_SIZE": "5"}, "neither the 4 ranks that train"),
        ({"NUM_TRAINING": "0"}, "at least 1"),
        ({"RANK": "x"}, "no number"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_trainer(wrong)
