"""`lastgood inspect` and `verify` on files that stand alone: those of the DeepSpeed integration."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest
import torch
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import CheckpointError, ConfigError, MismatchError, NoCheckpoint, StorageError
from lastgood.files import TEMPORARY_SUFFIX
from lastgood.integrations.deepspeed import LastgoodFiles
from lastgood.integrations.deepspeed_saves import SaveOptions
from lastgood.storage import format as fmt


@dataclasses.dataclass
class Info:
    tag: str
    save_dir: str
    save_latest: bool = True


MODEL = {"module": {"a.weight": torch.arange(2_000_000.0), "tied": None}, "step": 7, "lr": 0.5}
MODEL["module"]["tied"] = MODEL["module"]["a.weight"]
OPTIMIZER = {"optimizer": {"moments": [torch.ones(3, 5, dtype=torch.bfloat16)]}, "step": 7}


@pytest.fixture
def tag(tmp_path, monkeypatch):
    """A tag with a file of each kind, as DeepSpeed lays them out."""
    monkeypatch.setenv("COLUMNS", "250")
    return save(tmp_path, "global_step7", 7)


def save(folder, name, step):
    files = LastgoodFiles(torch.device("cpu"), lambda: step, SaveOptions(timeout_s=30.0, pool_bytes=16 << 20), False)
    try:
        info = Info(name, str(folder))
        files.create(info)
        files.makedirs(str(folder / name))
        files.save(MODEL, str(folder / name / "mp_rank_00_model_states.pt"))
        files.save(OPTIMIZER, str(folder / name / "zero_pp_rank_0_mp_rank_00_optim_states.pt"))
        assert files.commit(info)
    finally:
        files.close()
    return folder / name


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def data_offset(path):
    from lastgood.storage.standalone_slot import look_at_standalone_slot

    return look_at_standalone_slot(path).record.data_offset


def test_inspect_shows_a_file_and_what_is_in_it(tag):
    model = tag / "mp_rank_00_model_states.pt"
    assert "whole" in run("inspect", model)
    found = json.loads(run("inspect", model, "--layout", "--json"))
    (file,) = found["files"]
    assert (file["file"], file["state"], file["step"]) == (model.name, "whole", 7)
    (contents,) = found["layouts"]
    first, tied = contents["tensors"]
    assert (first["dtype"], first["shape"], tied["shares_with"]) == ("float32", [2_000_000], first["name"])
    assert first["name"] == "module.a.weight"
    assert {"name": "step", "value": "7"} in contents["values"]
    assert contents["parts"] == {"module": {"tensors": 2, "bytes": 8_000_000}}
    shown = run("inspect", model, "--layout")
    assert "module.a.weight" in shown
    assert "shares with module.a.weight" in shown


def test_inspect_shows_all_files_of_a_tag(tag):
    (tag / "notes.txt").write_text("x")
    torch.save({"x": 1}, tag / "written_by_torch.pt")
    found = json.loads(run("inspect", tag, "--step", "7", "--json"))
    assert [(one["file"], one["state"]) for one in found["files"]] == [
        ("mp_rank_00_model_states.pt", "whole"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "whole"),
    ]
    assert found["other_files"] == ["notes.txt", "written_by_torch.pt"]
    assert [tensor["name"] for one in found["layouts"] for tensor in one["tensors"]][2:] == ["optimizer.moments.0"]
    assert "not in Lastgood's format: notes.txt, written_by_torch.pt" in run("inspect", tag)
    with pytest.raises(CheckpointError, match=r"no complete file of step 8; steps \[7\]"):
        run("inspect", tag, "--step", "8")


def test_verify_reads_every_byte(tag):
    (tag / "written_by_torch.pt").write_bytes(b"PK")
    found = json.loads(run("verify", tag, "--json"))
    assert [(one["result"], one["damaged"]) for one in found["slots"]] == [("whole", False)] * 2
    assert found["not_checked"] == ["written_by_torch.pt"]
    with pytest.raises(NoCheckpoint, match=r"no complete checkpoint of step 8; complete ones are there of steps \[7\]"):
        run("verify", tag, "--step", "8")
    model, optimizer = (tag / one["file"] for one in found["slots"])
    flip(model, data_offset(model) + 5_000_000)
    run("inspect", model)  # which reads no data
    assert "damaged" in run("verify", tag, code=1)
    found = json.loads(run("verify", tag, "--json", code=1))
    assert [one["result"] for one in found["slots"]] == ["damaged", "whole"]
    assert "checksum 0x" in found["slots"][0]["detail"]
    assert [one["result"] for one in json.loads(run("verify", optimizer, "--json"))["slots"]] == ["whole"]


def test_a_file_with_a_damaged_beginning_is_still_known(tag):
    model = tag / "mp_rank_00_model_states.pt"
    flip(model, 0)
    (found,) = json.loads(run("verify", model, "--json"))["slots"]
    assert found["result"] == "whole", "the commit record says all that a reader needs"
    flip(model, fmt.COMMIT_OFFSET + 20)
    with pytest.raises(MismatchError, match="not a checkpoint in Lastgood's format"):
        run("verify", model)
    found = json.loads(run("verify", tag, "--json"))
    assert found["not_checked"] == [model.name]
    flip(model, 0)
    (found,) = json.loads(run("verify", model, "--json", code=1))["slots"]
    assert (found["result"], found["damaged"]) == ("damaged", True)


def test_what_a_killed_save_left_is_no_damage(tag):
    model = tag / "mp_rank_00_model_states.pt"
    left = tag / f"layer_00.pt{TEMPORARY_SUFFIX}"
    shutil.copy(model, left)
    with left.open("r+b") as file:
        file.seek(fmt.COMMIT_OFFSET)
        file.write(bytes(fmt.BLOCK))
    found = {one["file"]: one for one in json.loads(run("verify", tag, "--json"))["slots"]}
    assert (found[left.name]["result"], found[left.name]["damaged"]) == ("void", False)
    model.unlink()
    (tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(NoCheckpoint, match="no complete checkpoint; complete ones are there of steps none"):
        run("verify", tag)


def test_files_of_two_saves_are_no_tag(tag, tmp_path):
    other = save(tmp_path / "again", tag.name, 7)
    name = "mp_rank_00_model_states.pt"
    shutil.copy(other / name, tag / name)
    with pytest.raises(CheckpointError, match="are from two saves"):
        run("inspect", tag)
    assert "are from two saves" in json.loads(run("verify", tag, "--json", code=1))["trouble"][0]


def test_the_folder_above_the_tags_is_told_from_one_without_checkpoints(tag, tmp_path):
    """DeepSpeed is given that folder; and a job's directory in another one is found by its ranks' and its slots."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("x")
    for number, name in enumerate(("global_step8", "global_step9", "global_step10")):
        shutil.copytree(tag, tmp_path / name)
        os.utime(tmp_path / name, (2e9 + number, 2e9 + number))
    words = "there is no checkpoint here, but in global_step10, global_step9, global_step8 and 1 more below; name that"
    assert words in run("inspect", tmp_path)
    with pytest.raises(NoCheckpoint, match=words):
        run("verify", tmp_path)
    assert run("inspect", tmp_path / "notes") == f"{tmp_path / 'notes'}: there is no checkpoint here\n"
    above = tmp_path / "above"
    (above / "job1" / "rank-00000").mkdir(parents=True)
    (above / "job2").mkdir()
    (above / "job2" / "slot-0000.lgs").write_bytes(b"")
    found = run("inspect", above)
    assert "but in job" in found
    assert "job1" in found
    assert "job2" in found


def test_export_names_what_exports_these_files(tag, tmp_path):
    for place in (tag, tag / "mp_rank_00_model_states.pt"):
        with pytest.raises(ConfigError, match=r"integrations\.deepspeed\.export_torch"):
            run("export", place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(MismatchError, match="not a checkpoint in Lastgood's format"):
        run("inspect", tmp_path / "x")
    with pytest.raises(StorageError):
        run("verify", tmp_path / "missing")
