"""examples/gpt_ddp: losses follow from seed and step, across a stop too, and a job description takes its factory."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lastgood.ports import free_ports
from tests.support.warm import WarmProcess

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gpt_ddp"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt_ddp_train", FOLDER / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(*arguments: str, ranks: int = 2) -> None:
    (port,) = free_ports()
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(WarmProcess([FOLDER / "train.py", *arguments], env=env))
    try:
        for process in processes:
            said, _ = process.communicate(TIMEOUT_S)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_nothing_of_lastgood_is_in_it() -> None:
    assert "lastgood" not in [
        line.split()[1].partition(".")[0]
        for line in (FOLDER / "train.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]


def test_it_goes_on_with_the_losses_of_a_training_that_was_never_stopped(tmp_path: Path) -> None:
    run_ranks("--steps", "5", "--losses", str(tmp_path / "never"))
    lines = (tmp_path / "never").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(5))
    assert len({line.split()[1] for line in lines}) == 5
    run_ranks("--steps", "3", "--losses", str(tmp_path / "stopped"), "--save", str(tmp_path / "state.pt"))
    run_ranks("--steps", "5", "--losses", str(tmp_path / "stopped"), "--resume", str(tmp_path / "state.pt"))
    assert (tmp_path / "stopped").read_text().splitlines() == lines


def test_its_factory_is_one_that_a_job_description_takes(script: ModuleType) -> None:
    factory = pytest.importorskip("lastgood.mirror.job.factory")
    found = factory.training_of(script.make(), "train:make")
    assert (found.clip_norm, found.name) == (1.0, "gpt_ddp")
    made = script.make()
    same = zip(found.model.state_dict().values(), made["model"].state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
