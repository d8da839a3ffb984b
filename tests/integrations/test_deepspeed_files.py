"""The files of the DeepSpeed integration, in one process and without DeepSpeed."""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lastgood.checkpointers.events import Outcome
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, NoCheckpoint, StateError
from lastgood.files import TEMPORARY_SUFFIX
from lastgood.integrations import deepspeed_objects, deepspeed_saves
from lastgood.integrations.deepspeed import LastgoodFiles, export_torch, use_lastgood
from lastgood.integrations.deepspeed_objects import decode_objects, encode_objects
from lastgood.integrations.deepspeed_saves import SaveOptions
from lastgood.storage import format as fmt
from lastgood.storage.standalone_slot import is_standalone_slot
from lastgood.storage.write import SlotWrite
from tests.suggestions.following import advice, follows, hear


@dataclasses.dataclass
class Info:
    tag: str
    save_dir: str
    save_latest: bool = True


@pytest.fixture
def engine():
    made = []

    def make(**knobs):
        background = knobs.pop("background", False)
        options = SaveOptions(**{"timeout_s": 60.0, "pool_bytes": 16 << 20, **knobs})
        made.append(LastgoodFiles(torch.device("cpu"), lambda: 7, options, background))
        return made[-1]

    yield make
    for one in made:
        one.close()


def state_of(seed=0, size=100_000):
    random = torch.Generator().manual_seed(seed)
    flat = torch.randn(size, generator=random)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return {
        "module": model.state_dict(),
        "flat": flat,
        "views": [flat[:10], flat[5:50:3], flat.view(torch.int32)[:4]],
        "half": flat.to(torch.bfloat16),
        "step": 3,
        "lr": 0.1,
        "shape": torch.Size([1, 2]),
        "dtype": torch.float16,
        "args": argparse.Namespace(name="x", nested=argparse.Namespace(values=[1, 2.5, None], weights=flat[:3])),
    }


def save(engine, folder, tag, *files):
    """Each of `files` is a state; returns their paths."""
    info = Info(tag, str(folder))
    engine.makedirs(str(folder), exist_ok=True)
    engine.create(info)
    engine.makedirs(str(folder / tag), exist_ok=True)
    paths = [folder / tag / f"part-{number}.pt" for number in range(len(files))]
    for state, path in zip(files, paths, strict=True):
        engine.save(state, str(path))
    if engine.is_decoupled():
        return paths
    engine.commit(info)
    (folder / "latest").write_text(tag)  # as DeepSpeed does
    return paths


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, argparse.Namespace):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        versions = [getattr(item, "_metadata", None) for item in (one, other)]
        return list(one) == list(other) and versions[0] == versions[1] and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_state_comes_back_as_it_was(tmp_path, engine):
    state = state_of()
    (path,) = save(engine(), tmp_path, "a", state)
    found = engine().load(str(path), map_location=lambda storage, location: storage)
    assert same(found, state)
    assert found["views"][0].data_ptr() == found["flat"].data_ptr()  # aliases are aliases again
    assert is_standalone_slot(path)
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["part-0.pt"]


def test_what_changes_after_save_does_not_change_the_file(tmp_path, engine):
    """The pool is far smaller than the state: most of it goes to the disk before `save` returns."""
    one = engine(pool_bytes=1 << 20)
    state = {"weights": torch.arange(5_000_000)}
    one.create(Info("a", str(tmp_path)))
    one.makedirs(str(tmp_path / "a"))
    one.save(state, str(tmp_path / "a" / "x.pt"))
    state["weights"].zero_()
    one.commit(Info("a", str(tmp_path)))
    assert torch.equal(one.load(str(tmp_path / "a" / "x.pt"))["weights"], torch.arange(5_000_000))


@pytest.mark.parametrize("step", ["write", "commit"])
def test_nothing_has_its_name_before_all_is_durable(tmp_path, engine, monkeypatch, step):
    """A save that is interrupted anywhere leaves no name behind, and the next save cleans up."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    one = engine()
    (old,) = save(one, tmp_path, "old", state_of(1))
    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr(SlotWrite, "copy_host", interrupted)
        else:
            patch.setattr(deepspeed_saves.TagSaves, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(one, tmp_path, "new", state_of(2), state_of(3))
    assert not list((tmp_path / "new").glob("*.pt"))
    assert list((tmp_path / "new").glob(f"*{TEMPORARY_SUFFIX}"))
    other = engine()
    assert torch.equal(other.load(str(old))["flat"], state_of(1)["flat"])
    (path,) = save(other, tmp_path, "third", {"x": 1})
    assert other.load(str(path)) == {"x": 1}
    assert not list(tmp_path.rglob(f"*{TEMPORARY_SUFFIX}"))


def test_a_disk_error_fails_the_save_and_the_older_tag_stays(tmp_path, engine, monkeypatch):
    """The limit on file sizes refuses the writer threads' own writes, once the file is not made in full beforehand."""
    one = engine()
    (old,) = save(one, tmp_path, "old", state_of(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (fmt.DATA_OFFSET + (1 << 20), before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"new was not saved: rank 0: .*part-0.pt.*write of .* failed: File too"
        ):
            save(one, tmp_path, "new", {"weights": torch.ones(2_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "latest").read_text() == "old"
    assert not list((tmp_path / "new").iterdir())
    assert [event.outcome for event in one.events] == [Outcome.DURABLE, Outcome.FAILED]
    assert "File too large" in one.events[-1].error
    assert torch.equal(one.load(str(old))["flat"], state_of(1)["flat"])
    save(one, tmp_path, "new", {"weights": torch.ones(2_000_000)})  # with room, saving goes on


def test_no_room_is_refused_before_anything_is_written(tmp_path, engine):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"making the file of \d+ bytes.*ulimit"):
            save(engine(), tmp_path, "new", {"weights": torch.ones(2_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_cannot_be_made_fails_the_save(tmp_path, engine):
    (tmp_path / "new").write_text("in the way")
    with pytest.raises(CheckpointError, match="new was not saved"):
        save(engine(), tmp_path, "new", {"x": 1})


@follows("would come back as a dict; give its state_dict() instead, and load that")
def test_a_live_object(tmp_path, engine):
    one, model = engine(), torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError) as error:
        save(one, tmp_path, "new", {"mine": model})
    call = advice(hear(str(error.value)), r"give its (state_dict\(\)) instead")
    (path,) = save(one, tmp_path, "new", {"mine": eval(f"model.{call}", {"model": model})})
    other = torch.nn.Linear(1, 1)
    other.load_state_dict(one.load(str(path))["mine"])
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: None, r"part-0.pt: state.mine\[1\].deep: cannot store a builtins.function"),
        (
            torch.nn.Linear(1, 1),
            r"state.mine\[1\].deep: a live torch.nn.modules.linear.Linear would come back as a dict",
        ),
        ({"lastgood.object": "argparse.Namespace"}, r"state.mine\[1\].deep: the key 'lastgood.object' is kept"),
    ],
)
def test_a_foreign_object_is_refused_by_its_path(tmp_path, engine, value, words):
    one = engine()
    save(one, tmp_path, "old", {"x": 1})
    with pytest.raises(CheckpointError, match=words):
        save(one, tmp_path, "new", {"mine": [0, {"deep": value}]})
    assert not list((tmp_path / "new").iterdir())


def test_a_container_that_holds_itself_is_refused():
    ring = []
    ring.append({"again": ring})
    with pytest.raises(StateError, match=r"state\[0\].again: a container holds itself"):
        encode_objects(ring, "state")


def test_a_flipped_bit_is_named(tmp_path, engine):
    (path,) = save(engine(), tmp_path, "a", state_of(size=3_000_000))
    with path.open("r+b") as file:
        file.seek(fmt.DATA_OFFSET + (5 << 20))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(CorruptCheckpoint, match=r"part-0.pt: step 7, chunk 1 of \d+: checksum 0x"):
        engine().load(str(path))


@pytest.mark.parametrize("keep", [100, fmt.COMMIT_OFFSET + 100, fmt.DATA_OFFSET + 5000])
def test_a_cut_file_is_refused(tmp_path, engine, keep):
    (path,) = save(engine(), tmp_path, "a", state_of())
    os.truncate(path, keep)
    with pytest.raises(CorruptCheckpoint, match=r"part-0.pt: not a complete checkpoint"):
        engine().load(str(path))


def test_files_of_two_saves_are_not_mixed(tmp_path, engine):
    """A tag that is saved again: each file appears whole, but a kill may come between two of them."""
    first = save(engine(), tmp_path, "best", {"x": 1}, {"x": 1})
    old = first[1].read_bytes()
    save(engine(), tmp_path, "best", {"x": 2}, {"x": 2})
    reader = engine()
    assert [reader.load(str(path)) for path in first] == [{"x": 2}, {"x": 2}]
    first[1].write_bytes(old)
    with pytest.raises(CorruptCheckpoint, match=r"part-1.pt and part-0.pt are from two saves"):
        [reader.load(str(path)) for path in first]
    save(engine(), tmp_path, "best", {"x": 3}, {"x": 3})
    assert [reader.load(str(path)) for path in first] == [{"x": 3}, {"x": 3}]


def test_files_of_torch_save_still_load(tmp_path, engine):
    torch.save({"x": torch.ones(3), "args": argparse.Namespace(a=1)}, tmp_path / "own.pt")
    found = engine().load(str(tmp_path / "own.pt"))
    assert torch.equal(found["x"], torch.ones(3)) and found["args"] == argparse.Namespace(a=1)
    torch.save({"x": Path("evil")}, tmp_path / "foreign.pt")
    with pytest.raises(
        MismatchError, match=r"foreign.pt: not a file of Lastgood, and the allow-list refuses 'pathlib.*PosixPath'"
    ):
        engine().load(str(tmp_path / "foreign.pt"))
    (tmp_path / "broken.pt").write_bytes(b"PK\3\4 and so on")
    with pytest.raises((CorruptCheckpoint, MismatchError), match=r"broken.pt"):
        engine().load(str(tmp_path / "broken.pt"))
    with pytest.raises(NoCheckpoint, match=r"none.pt: there is no such file"):
        engine().load(str(tmp_path / "none.pt"))


def test_files_outside_the_tag_are_for_others_to_read(tmp_path, engine):
    """`save_16bit_model` begins a save of a tag, and writes beside it."""
    one, big = engine(), torch.randn(1000)
    info = Info("global_step7", str(tmp_path), save_latest=False)
    one.create(info)
    one.save(OrderedDict(w=big[:10]), str(tmp_path / "pytorch_model.bin"))
    assert not (tmp_path / "pytorch_model.bin").exists()
    one.commit(info)
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["w"], big[:10])
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 3000


def test_in_the_background_latest_is_written_when_all_is_durable(tmp_path, engine):
    one = engine(background=True)
    assert one.is_decoupled() and one.get_commit_info() is None
    paths = save(one, tmp_path, "a", state_of(), {"x": 1})
    assert not (tmp_path / "latest").exists() and not any(path.exists() for path in paths)
    for commit in one._saves._saving.commits:
        commit.result(60)
    info = one.get_commit_info()
    assert info.tag == "a" and not info.save_latest  # or DeepSpeed would write it without a flush
    assert not (tmp_path / "latest").exists()
    assert one.commit(info)
    assert (tmp_path / "latest").read_text() == "a"
    assert one.load(str(paths[1])) == {"x": 1}
    assert one.get_commit_info() is None
    # The next save finishes the one before, and drain the last.
    save(one, tmp_path, "b", {"x": 2})
    save(one, tmp_path, "c", {"x": 3})
    assert (tmp_path / "latest").read_text() == "b"
    one.drain()
    assert (tmp_path / "latest").read_text() == "c"
    assert [event.outcome for event in one.events] == [Outcome.DURABLE] * 3


def test_a_background_save_that_fails_never_raises_into_training(tmp_path, engine):
    one = engine(background=True)
    save(one, tmp_path, "a", {"x": 1})
    one.drain()
    save(one, tmp_path, "b", {"x": lambda: None})
    info = one.get_commit_info()
    assert one.commit(info) is False
    assert (tmp_path / "latest").read_text() == "a"
    assert one.events[-1].outcome is Outcome.FAILED
    save(one, tmp_path, "c", {"x": lambda: None})
    with pytest.raises(CheckpointError, match="c was not saved"):
        one.drain()


def test_a_background_save_that_nobody_drains_is_given_up(tmp_path, engine):
    one = engine(background=True)
    save(one, tmp_path, "a", {"x": 1})
    one.cleanup()
    assert one.events[-1].outcome is Outcome.FAILED
    assert not list((tmp_path / "a").iterdir()) and not (tmp_path / "latest").exists()


def test_export_gives_files_of_torch_save(tmp_path, engine):
    state = state_of()
    save(engine(), tmp_path, "a", state)
    (tmp_path / "a" / "notes.txt").write_text("kept")
    written = export_torch(tmp_path / "a", tmp_path / "out")
    state["views"] = [view.clone() for view in state["views"]]  # as DeepSpeed does for torch.save
    assert [path.name for path in written] == ["notes.txt", "part-0.pt"]
    assert same(torch.load(tmp_path / "out" / "part-0.pt", weights_only=False), state)
    with pytest.raises(CheckpointError, match="out is not empty"):
        export_torch(tmp_path / "a", tmp_path / "out")


@pytest.mark.parametrize(
    ("node", "error"),
    [
        ({"lastgood.object": "os.system", "attributes": {}}, MismatchError),
        ({"lastgood.object": "argparse.Namespace"}, CorruptCheckpoint),
        ({"lastgood.object": "argparse.Namespace", "attributes": {"__eq__": 1}}, CorruptCheckpoint),
        ({"lastgood.object": "argparse.Namespace", "attributes": [1]}, CorruptCheckpoint),
        ({"lastgood.object": ["unhashable"]}, CorruptCheckpoint),
    ],
)
def test_only_listed_classes_are_built(node, error):
    with pytest.raises(error, match="a file"):
        decode_objects({"x": [node]}, "a file")


def test_a_class_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(deepspeed_objects._PLAIN_OBJECTS, "no_such_module.Thing", "no_such_module")
    with pytest.raises(MismatchError, match=r"holds a no_such_module.Thing, which is not in what is installed"):
        decode_objects({"lastgood.object": "no_such_module.Thing", "attributes": {}}, "a file")
    assert ("argparse", "Namespace") in deepspeed_objects.listed_classes()


def test_commit_of_what_was_never_begun_is_refused(tmp_path, engine):
    one = engine()
    with pytest.raises(CheckpointError, match="without having begun"):
        one.save({"x": 1}, str(tmp_path / "x.pt"))
    with pytest.raises(CheckpointError, match="never begun"):
        one.commit(Info("a", str(tmp_path)))


def test_a_missing_deepspeed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"DeepSpeed cannot be imported .*pip install 'lastgood\[deepspeed\]'"):
        use_lastgood(None)


@pytest.mark.gpu
def test_tensors_of_a_cuda_device(tmp_path, engine):
    """They are copied off the device before `save` returns, and come back on the device that is asked for."""
    one = engine(pool_bytes=12 << 20)
    flat = torch.arange(20_000_000, dtype=torch.int32, device="cuda")
    state = {"flat": flat, "view": flat[5:50:3], "host": torch.ones(3), "half": flat[:1001].to(torch.bfloat16)}
    wanted = {name: tensor.cpu().clone() for name, tensor in state.items()}
    one.create(Info("a", str(tmp_path)))
    one.makedirs(str(tmp_path / "a"))
    one.save(state, str(tmp_path / "a" / "x.pt"))
    flat.zero_()
    one.commit(Info("a", str(tmp_path)))
    for device in ("cpu", "cuda"):
        found = one.load(str(tmp_path / "a" / "x.pt"), map_location=torch.device(device))
        assert all(found[name].device.type == device for name in found)
        assert all(torch.equal(found[name].cpu(), wanted[name]) for name in wanted)
