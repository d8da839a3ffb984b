"""`lastgood inspect`, `verify` and `export`: on whole directories, damaged ones, and beside a living training."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lastgood.checkpointers.export.formats import load_exported
from lastgood.checkpointers.recovery.checkmate_job import Promises, note_job
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.slots import contents as stored
from lastgood.cli import app
from lastgood.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    NoCheckpoint,
    NoGoodCheckpoint,
    StorageError,
)
from lastgood.files import ReadableBy
from lastgood.state import state_digest
from lastgood.storage import SlotView, Verdict, VerdictBook
from lastgood.storage import format as fmt
from tests.checkpointers.support.stored_helpers import hard_tensors, open_store, plain_values, put

COMMAND = [sys.executable, "-c", "from lastgood.cli import main; main()"]


def state_of(step: int) -> dict:
    tied = torch.full((50, 40), float(step))
    return {
        "model": {"a.weight": tied, "b.weight": tied, "bias": torch.zeros(3).bfloat16()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(50, 40)}}, "param_groups": [{"lr": 0.5, "params": [0]}]},
        "step": step,
    }


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    torch.set_num_threads(1)


@pytest.fixture
def directory(tmp_path):
    """Steps 3 and 4 are whole, the write of step 5 never finished."""
    with open_store(tmp_path / "job") as store:
        for step in (1, 2, 3, 4):
            put(store, step, state_of(step))
        # With a place for one more, step 1's slot is taken.
        store.begin(5, 1000, 20)
    return tmp_path / "job"


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def slot_of(directory: Path, step: int) -> Path:
    return next(info.path for info in SlotView(directory).committed() if info.step == step)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_shows_tensors_values_and_sums(directory):
    found = json.loads(run("inspect", directory, "--layout", "--json"))
    assert found["layout"]["step"] == 4
    tensors = {tensor["name"]: tensor for tensor in found["layout"]["tensors"]}
    assert list(tensors) == ["model.a.weight", "model.b.weight", "model.bias", "optimizer.state.0.exp_avg"]
    assert tensors["model.b.weight"]["shares_with"] == "model.a.weight"
    assert tensors["model.bias"] | {"block": 0, "offset": 0} == {
        "name": "model.bias",
        "kind": "tensor",
        "dtype": "bfloat16",
        "shape": [3],
        "stride": [1],
        "bytes": 6,
        "block": 0,
        "offset": 0,
        "shares_with": None,
    }
    assert {"name": "optimizer.param_groups.0.lr", "value": "0.5"} in found["layout"]["values"]
    assert found["layout"]["parts"] == {
        "model": {"tensors": 3, "bytes": 8006},
        "optimizer": {"tensors": 1, "bytes": 8000},
    }
    text = run("inspect", directory, "--step", 3)
    assert "step 3, " in text
    lines = [line.split() for line in text.splitlines()]
    assert ["model.b.weight", "float32", "50x40", "7.81", "KiB", "shares", "with", "model.a.weight"] in lines
    assert ["step", "3"] in lines
    assert "layout" not in json.loads(run("inspect", directory, "--json"))


def test_inspect_shows_every_kind_of_value(tmp_path):
    with open_store(tmp_path, slots=2, keep=1) as store:
        put(store, 1, {"hard": hard_tensors(), "plain": plain_values(), "long" * 50: torch.ones(1)})
        text = run("inspect", tmp_path, "--layout")
    assert "(in use)" in text
    assert "long" * 50 in text, "names are never cut"
    assert "<i2 (numpy)" in text


@pytest.mark.parametrize(
    ("system", "what"),
    [
        ("sync", "files of sync or checkfreq (checkpoint-*.pt)"),
        ("checkfreq", "files of sync or checkfreq (checkpoint-*.pt)"),
        ("dcp", "folders of dcp (checkpoint-*-step-*/)"),
        ("checkmate", "the job of shadows of checkmate or flowcheck (checkmate.json)"),
    ],
)
def test_inspect_says_what_lies_there_of_systems_without_slots(system, what, directory, tmp_path):
    for rank in range(2):
        other = tmp_path / "other" / f"rank-0000{rank}"
        if system == "checkmate":
            note_job(other, "ab" * 16)
            assert run("inspect", other) == f"{other}: there is no checkpoint here\n"
            promises = Promises(other, "ab" * 16, ReadableBy.OWNER)
            promises.made(2)
            continue
        checkpointer = checkpointer_class(system)(other, interval_steps=1)
        checkpointer.start(state_of(0))
        for step in (1, 2):
            checkpointer.save(step)
            checkpointer.drain(60)
        checkpointer.close()
    steps = [2] if system == "checkmate" else [2, 1]
    told = f"{other} holds {what} of steps {', '.join(map(str, steps))}; that system restores them"
    assert told in run("inspect", other)
    assert json.loads(run("inspect", other, "--json"))["other_checkpoints"] == [{"what": what, "steps": steps}]
    with pytest.raises(NoCheckpoint, match=re.escape(told)):
        run("verify", other)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run("inspect", other, "--layout")
    assert f"{tmp_path}: there is no checkpoint here, but in " in run("inspect", tmp_path)
    found = json.loads(run("inspect", other.parent, "--json"))
    assert [one["other_checkpoints"][0]["steps"] for one in found["ranks"]] == [steps, steps]
    assert run("inspect", other.parent).count(what) == 2
    for path in other.iterdir():
        path.rename(directory / path.name)
    found = json.loads(run("inspect", directory, "--json"))
    assert found["slots"] and found["other_checkpoints"] == [{"what": what, "steps": steps}]
    assert what in run("inspect", directory)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_layout_that_cannot_be_read_does_not_hide_the_slots(directory, as_json):
    newest = slot_of(directory, 4)
    record = next(info.record for info in SlotView(directory).committed() if info.step == 4)
    flip(newest, record.data_offset + record.meta_offset + 5)
    runner = CliRunner().invoke(app, ["inspect", str(directory), "--layout", *["--json"] * as_json])
    assert isinstance(runner.exception, CheckpointError)
    assert "checksum" in str(runner.exception)
    if as_json:
        found = json.loads(runner.stdout)
        assert found["layout"] is None
        assert [slot["step"] for slot in found["slots"] if slot["newest"]] == [4]
        assert "checksum" in found["trouble"][0]
    else:
        assert newest.name in runner.stdout
    run("inspect", directory, "--step", 3)


def test_inspect_of_a_directory_with_an_unreadable_file(directory, tmp_path):
    (directory / "slot-0009.lgs").mkdir()
    found = json.loads(run("inspect", directory, "--layout", "--json"))
    assert found["layout"]["step"] == 4, "what cannot be read hides no other slot"
    assert "directory" in found["slots"][-1]["detail"]
    with pytest.raises(StorageError):
        run("inspect", tmp_path / "missing", "--layout")
    done = subprocess.run([*COMMAND, "inspect", tmp_path / "missing"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("lastgood: ")
    assert "Traceback" not in done.stderr


def test_inspect_of_a_step_that_is_not_there(directory):
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 77; steps \[4, 3"):
        run("inspect", directory, "--step", 77)


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_directory(directory):
    found = {slot["step"]: slot for slot in json.loads(run("verify", directory, "--json"))["slots"]}
    assert [found[step]["result"] for step in (3, 4, 5)] == ["whole", "whole", "unfinished"]
    assert found[4]["bytes_per_s"] > 0
    text = run("verify", directory, "--threads", 1)
    assert "unfinished" in text and "never" in text
    assert [slot["step"] for slot in json.loads(run("verify", directory, "--step", 3, "--json"))["slots"]] == [3]


@pytest.mark.parametrize("place", ["data", "table", "record", "length"])
def test_verify_finds_damage(directory, place):
    info = next(info for info in SlotView(directory).committed() if info.step == 3)
    if place == "length":
        with info.path.open("r+b") as file:
            file.truncate(info.record.table_offset)
    else:
        record = info.record
        flip(info.path, {"data": record.data_offset + 100, "table": record.table_offset, "record": 65536 + 45}[place])
    slots = json.loads(run("verify", directory, "--json", code=1))["slots"]
    damaged = [slot for slot in slots if slot["damaged"]]
    assert [slot["file"] for slot in damaged] == [info.path.name]
    assert damaged[0]["result"] == "damaged" and damaged[0]["detail"]
    assert "whole" in [slot["result"] for slot in slots]
    assert "damaged" in run("verify", directory, code=1)


def test_verify_without_a_checkpoint(directory, tmp_path):
    (tmp_path / "empty").mkdir()
    for step, words in (([], "there is no checkpoint here$"), (["--step", 3], "no complete checkpoint of step 3")):
        with pytest.raises(NoCheckpoint, match=words):
            run("verify", tmp_path / "empty", *step)
    with pytest.raises(NoCheckpoint, match=r"of step 77; .*\[.*3, 4\]"):
        run("verify", directory, "--step", 77)
    with pytest.raises(StorageError, match="missing"):
        run("verify", tmp_path / "missing")


def test_a_file_of_another_job_is_a_fault(directory, tmp_path):
    with open_store(tmp_path / "other") as store:
        path = put(store, 9, state_of(9)).path
    path.rename(directory / "slot-0077.lgs")
    slots = json.loads(run("verify", directory, "--json", code=1))["slots"]
    assert slots[-1]["result"] == "foreign"


def test_verify_beside_a_training_that_overwrites(tmp_path, monkeypatch):
    real = SlotView.verify
    with open_store(tmp_path, slots=2, keep=1) as store:
        put(store, 1, state_of(1))

        def verify(view, info, *arguments):
            for step in (2, 3):
                put(store, step, state_of(step))
            real(view, info, *arguments)

        monkeypatch.setattr(SlotView, "verify", verify)
        runner = CliRunner().invoke(app, ["verify", str(tmp_path), "--json"])
    assert [slot["result"] for slot in json.loads(runner.stdout)["slots"]][:1] == ["overwritten meanwhile"]
    assert isinstance(runner.exception, NoCheckpoint)


@pytest.mark.slow
def test_verify_and_inspect_beside_a_busy_training(tmp_path):
    stop, asked = threading.Event(), queue.Queue(maxsize=2)
    trouble = []
    with open_store(tmp_path, slots=4, keep=2) as store:
        put(store, 1, state_of(1))
        put(store, 2, state_of(2))

        def save_as_asked():
            try:
                step = 2
                while not stop.is_set():
                    with contextlib.suppress(queue.Empty):
                        asked.get(timeout=0.05)
                        step += 1
                        put(store, step, state_of(step))
            except Exception as error:
                trouble.append(error)

        def ask_for_saves():
            # Three beside one look at most, so that a look that is held up does not lose the newest each time it tries.
            with contextlib.suppress(queue.Full):
                asked.put_nowait(None)
                asked.put_nowait(None)

        thread = threading.Thread(target=save_as_asked)
        thread.start()
        try:
            results = set()
            for _ in range(15):
                ask_for_saves()
                done = CliRunner().invoke(app, ["verify", str(tmp_path), "--json"])
                assert done.exit_code == 0 or isinstance(done.exception, NoCheckpoint), done.output
                results |= {slot["result"] for slot in json.loads(done.stdout)["slots"]}
                ask_for_saves()
                assert json.loads(run("inspect", tmp_path, "--layout", "--json"))["layout"]["step"] >= 2
        finally:
            stop.set()
            thread.join(60)
        assert not thread.is_alive()
        results |= {slot["result"] for slot in json.loads(run("verify", tmp_path, "--json"))["slots"]}
    assert not trouble
    assert "whole" in results
    assert results <= {"whole", "void", "being written", "overwritten meanwhile"}


# -- export ------------------------------------------------------------------------------------------------------------


def test_export_takes_the_newest_or_a_step(directory, tmp_path):
    found = json.loads(run("export", directory, tmp_path / "newest", "--json"))
    assert found["step"] == 4
    assert found["aliases"] == {"model.b.weight": "model.a.weight"}
    run("export", directory, tmp_path / "third", "--step", 3, "--to", "pt")
    for path, step in (("newest", 4), ("third", 3)):
        assert state_digest(load_exported(tmp_path / path)) == state_digest(state_of(step))


def test_export_says_what_it_wrote(directory, tmp_path):
    done = CliRunner().invoke(app, ["export", str(directory), str(tmp_path / "out")], catch_exceptions=False)
    assert "step 4, 4 tensors" in done.stderr
    assert "model.b.weight is model.a.weight" in done.stderr


def test_export_refuses(directory, tmp_path):
    with pytest.raises(ConfigError, match="known are safetensors, pt, dcp"):
        run("export", directory, tmp_path / "out", "--to", "onnx")
    with pytest.raises(NoCheckpoint, match="step 77"):
        run("export", directory, tmp_path / "out", "--step", 77)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCheckpoint):
        run("export", tmp_path / "empty", tmp_path / "out")
    flip(slot_of(directory, 4), fmt.DATA_OFFSET + 100)
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        run("export", directory, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "job"]


@pytest.mark.parametrize(("step", "outcome"), [(None, 3), (1, None)])
def test_export_beside_a_training_that_overwrites(tmp_path, monkeypatch, step, outcome):
    real = stored.read_layout
    with open_store(tmp_path / "job", slots=2, keep=1) as store:
        put(store, 1, state_of(1))

        def read_layout(view, info):
            if info.step == 1:
                for number in (2, 3):
                    put(store, number, state_of(number))
            return real(view, info)

        monkeypatch.setattr("lastgood.checkpointers.export.formats.read_layout", read_layout)
        arguments = ["export", tmp_path / "job", tmp_path / "out", *([] if step is None else ["--step", step])]
        if outcome is None:
            with pytest.raises(CorruptCheckpoint, match="step 1 cannot be exported any more: a training has reused"):
                run(*arguments)
            assert not (tmp_path / "out").exists()
        else:
            run(*arguments)
            assert state_digest(load_exported(tmp_path / "out")) == state_digest(state_of(outcome))


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_help_is_quick(command):
    code = f"import sys; sys.argv = ['lastgood', '{command}', '--help']\nfrom lastgood.cli import main\n"
    code += "try:\n    main()\nfinally:\n    sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Usage" in done.stdout
    assert not {"torch", "numpy", "lastgood._native", "safetensors"} & set(done.stderr.split())


def test_verdicts_are_shown_and_heeded(directory, tmp_path):
    newest, older = SlotView(directory).committed()[:2]
    VerdictBook(directory).judge(newest.sequence, Verdict(newest.step, ok=False, reason="evaluation fell"))
    assert "whole, newest, bad" in run("inspect", directory)
    assert "evaluation fell" in run("inspect", directory)
    found = json.loads(run("inspect", directory, "--json"))["slots"]
    assert {slot["step"]: slot["good"] for slot in found if slot["state"] == "whole"}[newest.step] is False
    done = json.loads(run("export", directory, tmp_path / "good.safetensors", "--to", "safetensors", "--json"))
    assert done["step"] == older.step
    for info in SlotView(directory).committed():
        VerdictBook(directory).judge(info.sequence, Verdict(info.step, ok=False))
    with pytest.raises(NoGoodCheckpoint, match=f"--step {newest.step} takes one"):
        run("export", directory, tmp_path / "none.safetensors", "--to", "safetensors")
