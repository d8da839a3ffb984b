"""A part of a checkpoint for other programs: names, dtypes and shards are those that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lastgood import PCcheck
from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint
from lastgood.checkpointers.export.selected import INDEX, Selection
from lastgood.cli import app
from lastgood.errors import ConfigError, LastgoodError
from lastgood.storage import SlotView
from tests.checkpointers.support.small_training import SmallTraining
from tests.storage.support.craft import dense, entries, put, record


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SmallTraining]:
    """A directory with one checkpoint, and the training as it is in it."""
    directory = tmp_path_factory.mktemp("saved")
    training = SmallTraining(24)
    checkpointer = PCcheck(directory, max_in_flight=1, keep=1)
    checkpointer.start(training.state)
    training.step()
    checkpointer.save(1)
    checkpointer.close()
    return directory, training


def call(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception is not None and not isinstance(done.exception, (SystemExit, LastgoodError)):
        raise done.exception
    return done.exit_code, done.stdout + str(done.exception or "")


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: safetensors.torch.load_file(folder / name) for name in set(index.values())}
    assert {path.name for path in folder.iterdir()} == {INDEX, *files}
    assert {name: file for file, tensors in files.items() for name in tensors} == index
    return {name: files[file][name] for name, file in index.items()}


def weights(training: SmallTraining) -> dict[str, torch.Tensor]:
    """What a model's file holds: tied weights once."""
    found = {name: value for name, value in training.model.state_dict().items() if name != "3.weight"}
    return {name: value.detach() for name, value in found.items()}


def test_a_model_in_shards_of_another_dtype(saved: tuple[Path, SmallTraining], tmp_path: Path) -> None:
    directory, training = saved
    out = tmp_path / "model"
    words = ("--part", "model", "--prefix", "model.", "--dtype", "bfloat16", "--shard-size", "1300B")
    code, said = call("export", directory, out, *words, "--json")
    assert code == 0, said
    found = read_folder(out)
    expected = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in weights(training).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}
    assert len(list(out.glob("*.safetensors"))) >= 2
    assert json.loads(said)["aliases"] == {"3.weight": "0.weight"}
    total = json.loads((out / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(value.numel() * value.itemsize for value in found.values())
    assert call("export", directory, out, *words)[0] != 0, "what is there is not replaced"
    assert call("export", directory, out, *words, "--force")[0] == 0


def test_one_file_of_a_part(saved: tuple[Path, SmallTraining], tmp_path: Path) -> None:
    directory, training = saved
    assert call("export", directory, tmp_path / "model.safetensors", "--part", "model")[0] == 0
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    expected = {f"model.{name}": value for name, value in weights(training).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 20_000))
def test_shards_hold_everything_once_and_are_as_small_as_asked(
    saved: tuple[Path, SmallTraining], tmp_path_factory: pytest.TempPathFactory, shard_bytes: int
) -> None:
    directory, training = saved
    out = tmp_path_factory.mktemp("shards") / "out"
    view = SlotView(directory)
    selection = Selection(parts=("model",), prefix="model.", shard_bytes=shard_bytes)
    export_checkpoint(view, view.newest(), out, ExportFormat.SAFETENSORS, selection=selection)
    found, expected = read_folder(out), weights(training)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for path in out.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path).values()
        assert len(tensors) == 1 or sum(one.numel() * one.itemsize for one in tensors) <= shard_bytes


def test_several_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        tree = entries(model=["o", [[["s", "w"], dense([4])]]], own=["i", rank])
        put(tmp_path / "job" / f"rank-{rank:05d}", tree, [bytes(range(16))], record(rank=rank, world_size=2))
    assert call("export", tmp_path / "job", tmp_path / "m.safetensors", "--part", "model")[0] == 0
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert {name: value.numpy().tobytes() for name, value in found.items()} == {"model.w": bytes(range(16))}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--part", "modle"], "no part 'modle' (did you mean model?); it has model, optimizer"),
        (["--prefix", "nothing."], "no tensor's name begins with 'nothing.'; there are model."),
        (["--dtype", "bfloat"], "--dtype bfloat (did you mean bfloat16"),
        (["--shard-size", "0"], "--shard-size must be at least one byte"),
        (["--shard-size", "many"], "--shard-size: not a size"),
        (["--to", "pt", "--part", "model"], "pt holds all of a checkpoint as it is"),
        (["--prefix", "model.0.weight"], "choose other parts or another prefix"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_and_writes_nothing(
    saved: tuple[Path, SmallTraining], tmp_path: Path, words: list[str], said: str
) -> None:
    code, message = call("export", saved[0], tmp_path / "out", *words)
    assert code != 0 and said in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_not_replaced(saved: tuple[Path, SmallTraining], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    code, message = call("export", saved[0], tmp_path / "out", "--shard-size", "1GB", "--force")
    assert code != 0 and "is no folder of shards" in message
    assert (tmp_path / "out" / "mine").read_text() == "mine"
    with pytest.raises(ConfigError, match="there is no directory"):
        view = SlotView(saved[0])
        out = tmp_path / "none" / "out"
        export_checkpoint(view, view.newest(), out, ExportFormat.SAFETENSORS, selection=Selection(shard_bytes=1 << 30))
