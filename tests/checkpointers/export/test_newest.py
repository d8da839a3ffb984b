"""The newest checkpoint of a folder as a tree, whoever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.baselines.sync import SyncCheckpointer
from lastgood.checkpointers.checkfreq.system import CheckFreq
from lastgood.checkpointers.export.newest import read_newest
from lastgood.errors import CheckpointError
from tests.checkpointers.support.small_training import SmallTraining

SYSTEMS = pytest.mark.parametrize("system", [SyncCheckpointer, CheckFreq, PCcheck])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def saved(system: Any, folder: Path, steps: int = 3) -> tuple[SmallTraining, Any]:
    training = SmallTraining(16)
    checkpointer = system(folder)
    checkpointer.start(training.state)
    for step in range(1, steps + 1):
        training.step()
        checkpointer.save(step)
        checkpointer.before_update()
        checkpointer.drain()
    checkpointer.close()
    return training, checkpointer


@SYSTEMS
def test_the_newest_is_read_without_the_models_code(system: Any, tmp_path: Path) -> None:
    training, _ = saved(system, tmp_path / "job")
    found = read_newest(tmp_path / "job", None)
    assert found is not None
    step, tree = found
    assert step == 3
    model = training.state["model"].state_dict()
    assert tree["model"].keys() == model.keys()
    assert all(torch.equal(tree["model"][name], one) for name, one in model.items())
    states = training.state["optimizer"].state_dict()["state"]
    for index, state in tree["optimizer"]["state"].items():
        assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(states[index][key])) for key, one in state.items())


@SYSTEMS
def test_what_is_known_is_not_read_again_and_an_empty_folder_has_none(system: Any, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    assert read_newest(tmp_path / "job", None) is None
    saved(system, tmp_path / "job")
    assert read_newest(tmp_path / "job", 3) is None
    assert read_newest(tmp_path / "job", 2) is not None


def test_a_damaged_file_leaves_the_one_before_it(tmp_path: Path) -> None:
    saved(SyncCheckpointer, tmp_path / "job")
    files = sorted((tmp_path / "job").glob("checkpoint-*.pt"))
    assert len(files) > 1
    files[-1].write_bytes(files[-1].read_bytes()[:-200])
    found = read_newest(tmp_path / "job", None)
    assert found is not None and found[0] == 2
    assert read_newest(tmp_path / "job", 2) is None
    for path in files:
        path.write_bytes(b"none")
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        read_newest(tmp_path / "job", None)
