"""What `lastgood dcp` and Lastgood behind DCP advise, followed."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from lastgood.checkpointers.dcp.torch_io import first_cause
from lastgood.cli import app
from lastgood.cli import dcp as command
from lastgood.experiments.dcp.storages import storage_named
from lastgood.experiments.dcp_runs.execute import new_suffix
from lastgood.experiments.dcp_runs.order import check_suffix
from lastgood.experiments.dcp_runs.sweep import read_sweep
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter
from tests.suggestions.following import advice, follows, hear, refusal

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Own:
    """A value that is neither plain nor a tensor."""

    def __init__(self, number: int = 0) -> None:
        self.number = number


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `lastgood dcp save` with these options; returns what it would measure."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    specs: list[Any] = []
    monkeypatch.setattr(command, "_run", lambda _command, spec, _flags: specs.append(spec))

    def call(*options: str) -> Any:
        words = ["dcp", "save", "--uri", "/nvme", "--model", "L7b-2MB", *options]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return specs.pop()

    return call


@follows("keeps tensors only, no hyperparameters; use --state model")
def test_a_storage_of_tensors_saves_the_model(asked: Any) -> None:
    said = refusal(lambda: asked("--storage", "hf", "--state", "full"))
    assert asked("--storage", "hf", *advice(said, r"use (--state \w+)").split()).state == "model"


@follows("leave it out, and LastgoodReader reads what a bucket holds")
def test_a_bucket_takes_the_layout_that_it_has() -> None:
    hear(refusal(lambda: LastgoodWriter("s3://bucket/run", layout="dcp")))
    assert LastgoodWriter("s3://bucket/run").layout == "lastgood"


@follows("--ddp and --fsdp: give one of them")
def test_either_way_to_spread_is_taken_alone(asked: Any) -> None:
    refusal(lambda: asked("--ddp", "--fsdp", "1"))
    assert asked("--ddp").spread == "ddp"
    assert asked("--fsdp", "1").spread == "fsdp1"


@follows(
    "--replicas is for --sharding hybrid", "sharding=hybrid is for FSDP; with DDP every rank holds all of the model"
)
def test_replicas_go_with_hybrid_sharding_under_fsdp(asked: Any) -> None:
    option = advice(refusal(lambda: asked("--replicas", "2")), r"is for (--sharding \w+)").split()
    refusal(lambda: asked("--replicas", "2", *option, "--ddp", "--world-size", "4"))
    spec = asked("--replicas", "2", *option, "--world-size", "4")
    assert (spec.sharding, spec.replicas, spec.spread) == ("hybrid", 2, "fsdp2")


@follows("--suffix {}: a name of letters, digits, dots, lines and underscores")
def test_what_save_prints_is_a_suffix() -> None:
    refusal(lambda: check_suffix("../up"))
    printed = new_suffix()
    assert check_suffix(printed) == printed


@follows("storage {} needs {}, which is not installed: pip install {}")
def test_a_storage_is_there_once_its_package_is(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(storage_named("fsspec"), needs=("a_package_that_is_new",))
    name = advice(hear(absent.missing() or ""), r"pip install (\w+)")
    # In place of an index that has it.
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.path_importer_cache.pop(str(tmp_path), None)
    assert absent.missing() is None


@follows(
    "checkpoint.storage is disk: say where, with path=FOLDER after the file's name",
    "is not KEY=VALUE, for instance epochs=1 or +path=/nvme",
)
def test_a_sweep_takes_what_its_refusals_say(tmp_path: Any) -> None:
    path = tmp_path / "dcp_fsdp.yaml"
    path.write_text("hydra: {sweeper: {params: {+checkpoint.storage: disk, +model: L7b}}}\n")
    key = advice(refusal(lambda: read_sweep(path)), r"with (path)=FOLDER")
    said = refusal(lambda: read_sweep(path, [key]))
    (run,) = read_sweep(path, advice(said, r"for instance (.*)").split(" or ")).runs
    assert (run["uri"], run["iterations"]) == ("/nvme", 1)
    (run,) = read_sweep(path, [f"{key}=/other"]).runs
    assert run["uri"] == "/other"


def dcp_refusal(call: Any) -> str:
    """The text of what went wrong inside DCP."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        call()
    return hear(str(first_cause(caught.value)))


@follows(
    "Lastgood would not load this value again: {}; keep it as plain values and tensors",
    "if it is yours, name it: LastgoodReader(..., allow=[...])",
)
def test_a_class_is_loaded_once_it_is_named(tmp_path: Any) -> None:
    state = {"own": Own(7)}
    path = tmp_path / "step-1"
    said = dcp_refusal(lambda: dcp.save(state, storage_writer=LastgoodWriter(path)))
    name = advice(said, r"(allow)=\[\.\.\.\]")
    plain = {"own": {"number": 7}}
    dcp.save(plain, storage_writer=LastgoodWriter(tmp_path / "plain"))
    dcp.save(state, storage_writer=LastgoodWriter(path, **{name: [Own]}))
    said = dcp_refusal(lambda: dcp.load({"own": Own()}, storage_reader=LastgoodReader(path)))
    name = advice(said, r"LastgoodReader\(\.\.\., (allow)=")
    into = {"own": Own()}
    dcp.load(into, storage_reader=LastgoodReader(path, **{name: [Own]}))
    assert into["own"].number == 7


@follows("load with cast=True to convert it", "which the state lacks; load with strict=False to leave them out")
def test_another_dtype_is_converted_and_more_entries_are_left_out_if_asked(tmp_path: Any) -> None:
    path = tmp_path / "step-1"
    dcp.save({"a": torch.arange(4.0), "b": torch.ones(3)}, storage_writer=LastgoodWriter(path))
    into = {"a": torch.zeros(4, dtype=torch.float64)}
    said = dcp_refusal(lambda: dcp.load(into, storage_reader=LastgoodReader(path, strict=True)))
    leave: Any = {advice(said, r"load with (strict)=False"): False}
    said = dcp_refusal(lambda: dcp.load(into, storage_reader=LastgoodReader(path, **leave)))
    convert: Any = {advice(said, r"load with (cast)=True"): True}
    dcp.load(into, storage_reader=LastgoodReader(path, **leave, **convert))
    assert torch.equal(into["a"], torch.arange(4.0, dtype=torch.float64))


@follows("a tensor of {} and {} has no plain bytes; save it with layout=")
def test_a_sparse_tensor_is_saved_as_torch_does(tmp_path: Any) -> None:
    state = {"a": torch.eye(3).to_sparse()}
    said = dcp_refusal(lambda: dcp.save(state, storage_writer=LastgoodWriter(tmp_path / "step-1")))
    layout: Any = {"layout": advice(said, r'layout="(\w+)"')}
    dcp.save(state, storage_writer=LastgoodWriter(tmp_path / "step-1", **layout))
    assert (tmp_path / "step-1" / ".metadata").exists()
