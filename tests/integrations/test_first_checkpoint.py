"""Weights of other programs, imported, come back to the bit in a model; what cannot be imported is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from lastgood import PCcheck
from lastgood.cli import app
from lastgood.errors import ConfigError, LastgoodError
from lastgood.integrations.first_checkpoint import import_checkpoint


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def write(kind: str, model: torch.nn.Module, folder: Path) -> Path:
    """What another program leaves of a model's weights."""
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    names = sorted(weights)
    first, rest = dict.fromkeys(names[:3]), dict.fromkeys(names[3:])
    place = folder / "source"
    if kind == "torch":
        torch.save(model.state_dict(), folder / "model.pt")
        return folder / "model.pt"
    if kind == "torch of a state":
        torch.save({"model": model.state_dict(), "epoch": 3}, folder / "state.pt")
        return folder / "state.pt"
    if kind == "safetensors":
        safetensors.torch.save_file(weights, folder / "model.safetensors")
        return folder / "model.safetensors"
    place.mkdir()
    if kind == "shards of safetensors":
        for number, part in enumerate((first, rest)):
            safetensors.torch.save_file({name: weights[name] for name in part}, place / f"{number}.safetensors")
        where = {**dict.fromkeys(first, "0.safetensors"), **dict.fromkeys(rest, "1.safetensors")}
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    elif kind == "shards of torch":
        for number, part in enumerate((first, rest)):
            torch.save({name: weights[name] for name in part}, place / f"{number}.bin")
        where = {**dict.fromkeys(first, "0.bin"), **dict.fromkeys(rest, "1.bin")}
        (place / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    elif kind == "DCP":
        dcp.save({"model": model.state_dict(), "other": {"x": torch.ones(2)}}, checkpoint_id=place, no_dist=True)
    elif kind == "DCP of a bare model":
        dcp.save(model.state_dict(), checkpoint_id=place, no_dist=True)
    elif kind == "DeepSpeed":
        (place / "latest").write_text("global_step7")
        (place / "global_step7").mkdir()
        states = {"module": model.state_dict(), "global_steps": 7, "ds_version": "0.19", "param_shapes": None}
        torch.save(states, place / "global_step7" / "mp_rank_00_model_states.pt")
    return place


KINDS = (
    "torch",
    "torch of a state",
    "safetensors",
    "shards of safetensors",
    "shards of torch",
    "DCP",
    "DCP of a bare model",
    "DeepSpeed",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_weights_come_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    model = made(0)
    model(torch.randn(4, 8))  # the running mean
    source = write(kind, model, tmp_path)
    step = 7 if kind == "DeepSpeed" else 0
    done = CliRunner().invoke(app, ["import", str(source), str(tmp_path / "job"), "--json"])
    assert done.exit_code == 0, done.exception
    said = json.loads(done.stdout)
    assert said["step"] == step and said["entries"]["model"] == len(model.state_dict())
    fresh = made(1)
    state: dict[str, object] = {"model": fresh}
    if kind == "torch of a state":
        state["epoch"] = 0
    assert PCcheck(tmp_path / "job").restore(state) == step
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
    again = CliRunner().invoke(app, ["import", str(source), str(tmp_path / "job")])
    assert isinstance(again.exception, ConfigError) and "must be the first one" in str(again.exception)


def test_a_state_that_lastgood_exported_goes_on_to_the_bit(tmp_path: Path) -> None:
    model = made(0)
    first = PCcheck(tmp_path / "first")
    first.start({"model": model, "plain": {"step": 4}})
    first.save(4)
    first.close()
    out = tmp_path / "state.safetensors"
    assert CliRunner().invoke(app, ["export", str(tmp_path / "first"), str(out)]).exit_code == 0
    import_checkpoint(out, tmp_path / "second", step=4)
    fresh, plain = made(1), {"step": 0}
    assert PCcheck(tmp_path / "second").restore({"model": fresh, "plain": plain}) == 4
    assert plain == {"step": 4}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("__import__('pathlib').Path('ran').touch()",)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nothing", "there is no such file or folder"),
        ("empty folder", "holds none of .metadata"),
        ("code", "eval"),
        ("cut safetensors", "model.safetensors"),
        ("a shard that lacks a tensor", "lacks 'b'"),
        ("an index that leads elsewhere", "names no files of this folder"),
        ("stage 3", "zero_to_fp32.py"),
    ],
)
def test_what_cannot_be_imported_is_named_and_makes_nothing(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    if kind == "code":
        torch.save({"model": Evil()}, source)
    elif kind == "cut safetensors":
        source = tmp_path / "model.safetensors"
        safetensors.torch.save_file({"a": torch.ones(100)}, source)
        source.write_bytes(source.read_bytes()[:-40])
    elif kind != "nothing":
        source.mkdir()
    if kind == "a shard that lacks a tensor":
        safetensors.torch.save_file({"a": torch.ones(2)}, source / "1.safetensors")
        index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "an index that leads elsewhere":
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x"}}))
    elif kind == "stage 3":
        for rank in (0, 1):
            torch.save({}, source / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    with pytest.raises(LastgoodError) as raised:
        import_checkpoint(source, tmp_path / "job")
    assert said in str(raised.value)
    assert not (tmp_path / "job").exists() and not (tmp_path / "ran").exists()
