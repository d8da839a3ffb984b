"""Exports and what other programs make of them; back again, to the bit."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lastgood import PCcheck
from lastgood.checkpointers.export import formats as export_module
from lastgood.checkpointers.export import safetensors_file
from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint, load_exported
from lastgood.checkpointers.torch_files.files import plain_tree
from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError, StateError, StorageError
from lastgood.state import apply_tree, state_digest
from lastgood.storage import SlotStore
from tests.checkpointers.support.small_training import SmallTraining
from tests.checkpointers.support.stored_helpers import differences, hard_tensors, plain_values, stored_state
from tests.state.support.trees import TREES, types_of
from tests.support.warm import WarmProcess

SAFETENSORS, PT, DCP = ExportFormat.SAFETENSORS, ExportFormat.PT, ExportFormat.DCP


# Names of lists, and of a tensor of bools whose odd values torch's own copy makes 1 (in every format).
NOT_FOR_COPIES = ("fp8", "overlapping", "odd bool")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def trained(tmp_path):
    """A real training, checkpointed by PCcheck, and its directory."""
    training = SmallTraining(16)
    training.plain.update(extra=plain_values(), hard=hard_tensors())
    checkpointer = PCcheck(tmp_path / "job")
    checkpointer.start(training.state)
    for _ in range(3):
        training.step()
    checkpointer.save(3)
    checkpointer.close()
    return training, tmp_path / "job"


def export(directory: Path, out: Path, to: ExportFormat, **how):
    view = SlotStore.peek(directory)
    return export_checkpoint(view, view.newest(), out, to, **how)


def check_aliases(tree):
    tree["plain"]["hard"]["base"].add_(1)
    assert torch.equal(tree["plain"]["hard"]["alias"], tree["plain"]["hard"]["base"])
    assert torch.equal(tree["plain"]["hard"]["row"], tree["plain"]["hard"]["base"][3])
    assert torch.equal(tree["plain"]["hard"]["transposed"], tree["plain"]["hard"]["base"].t())
    assert tree["model"]["0.weight"].data_ptr() == tree["model"]["3.weight"].data_ptr()


@pytest.mark.parametrize("to", [SAFETENSORS, PT])
def test_a_training_comes_back_to_the_bit(trained, tmp_path, to):
    training, directory = trained
    done = export(directory, tmp_path / "out", to)
    assert done.nbytes == (tmp_path / "out").stat().st_size
    tree = load_exported(tmp_path / "out")
    assert differences(tree, training.state) == []
    assert state_digest(tree) == state_digest(plain_tree(training.state))
    other = SmallTraining(16, seed=9)
    other.plain.update(extra=plain_values(), hard=hard_tensors())
    for plain in (other.plain, training.plain, tree["plain"]):
        del plain["hard"]["expanded"]  # cannot be written in place
        del plain["hard"]["odd bool"]
    apply_tree(other.state, tree, "out")
    assert other.digest() == training.digest()
    check_aliases(tree)
    assert list(tmp_path.glob("*.lastgood-tmp")) == []


def test_safetensors_reads_it(trained, tmp_path):
    training, directory = trained
    done = export(directory, tmp_path / "out", SAFETENSORS)
    found = safetensors.torch.load_file(tmp_path / "out")
    expected = training.model.state_dict()
    for name in ("0.weight", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(found[f"model.{name}"], expected[name])
    assert done.aliases["model.3.weight"] == "model.0.weight"
    assert "model.3.weight" not in found
    hard = training.plain["hard"]
    assert found["plain.hard.bf16"].dtype == torch.bfloat16
    for name in ("fp8.0", "fp8.1", "channels_last", "transposed", "expanded", "nan", "odd bool", "scale"):
        expected = hard["fp8"][int(name[-1])] if name.startswith("fp8") else hard[name]
        assert state_digest({"x": found[f"plain.hard.{name}"]}) == state_digest({"x": expected})
    assert np.array_equal(found["plain.extra.array"].numpy(), training.plain["extra"]["array"])
    with safetensors.safe_open(tmp_path / "out", framework="pt") as file:
        facts = file.metadata()
    info = SlotStore.peek(directory).newest()
    assert facts["format"] == "pt"
    assert (facts["lastgood.step"], facts["lastgood.sequence"]) == ("3", str(info.sequence))
    assert facts["lastgood.job_id"] == info.record.job_id.hex()
    assert json.loads(facts["lastgood.aliases"]) == done.aliases


def test_torch_loads_pt_alone(trained, tmp_path):
    training, directory = trained
    export(directory, tmp_path / "out.pt", PT)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    other = SmallTraining(16, seed=9)
    other.step()
    other.model.load_state_dict(found["model"])
    other.optimizer.load_state_dict(found["optimizer"])
    for part in ("model", "optimizer"):
        assert state_digest({part: other.state[part]}) == state_digest({part: training.state[part]})


def test_torch_loads_dcp_into_a_model(trained, tmp_path):
    training, directory = trained
    done = export(directory, tmp_path / "out", DCP)
    assert done.nbytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    other = SmallTraining(16, seed=9)
    other.step()
    del training.plain["hard"]["expanded"]  # cannot be loaded in place
    empty = {
        name: torch.zeros_like(value) for name, value in training.plain["hard"].items() if name not in NOT_FOR_COPIES
    }
    found = {"model": other.model, "optimizer": other.optimizer.state_dict(), "plain": {"hard": empty}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    other.optimizer.load_state_dict(found["optimizer"])
    for part in ("model", "optimizer"):
        assert state_digest({part: other.state[part]}) == state_digest({part: training.state[part]})
    expected = {name: value for name, value in training.plain["hard"].items() if name not in NOT_FOR_COPIES}
    assert differences(empty, expected) == []


def test_dcp_becomes_a_torch_file(trained, tmp_path):
    training, directory = trained
    export(directory, tmp_path / "out", DCP)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert state_digest({"x": found["model"]}) == state_digest({"x": dict(training.model.state_dict())})
    assert np.array_equal(found["plain"]["extra"]["array"], training.plain["extra"]["array"])
    assert found["plain"]["step"] == 3


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(state=st.dictionaries(st.text(max_size=4), TREES, max_size=4))
def test_any_tree_comes_back(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("any")
    stored_state(folder / "job", state)
    for to in (SAFETENSORS, PT):
        try:
            export(folder / "job", folder / to.value, to)
        except StateError as error:
            assert to is SAFETENSORS and "export to pt" in str(error)
            assert any(kind in str(error) for kind in ("complex", ">"))
            continue
        restored = load_exported(folder / to.value)
        assert types_of(restored) == types_of(state)
        assert state_digest(restored) == state_digest(state)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_views_come_back_and_share_memory_again(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("views")
    base = torch.arange(64, dtype=torch.float32)
    views = {}
    for number in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, 60))
        length = data.draw(st.integers(1, 64 - start))
        views[f"v{number}"] = base[start : start + length : data.draw(st.integers(1, 3))]
    stored_state(folder / "job", views)
    export(folder / "job", folder / "out", SAFETENSORS)
    restored = load_exported(folder / "out")
    for name, view in views.items():
        view.add_(1)
        restored[name].add_(1)
        assert state_digest(restored) == state_digest(views)


def test_large_strided_tensors_go_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "_PIECE_BYTES", 100)
    monkeypatch.setattr(safetensors_file, "_FLUSH_BYTES", 1000)
    state = {"t": torch.randn(50, 30).t(), "deep": torch.randn(1, 2, 3, 40).permute(0, 3, 1, 2), **hard_tensors()}
    stored_state(tmp_path / "job", state)
    export(tmp_path / "job", tmp_path / "out", SAFETENSORS, window_bytes=1)
    assert state_digest(load_exported(tmp_path / "out")) == state_digest(state)


def test_what_safetensors_lacks_is_named(tmp_path):
    stored_state(
        tmp_path / "job", {"part": {"wave": torch.zeros(2, dtype=torch.complex128), "big": np.zeros(2, ">f8")}}
    )
    with pytest.raises(StateError, match=r"part\.wave \(complex128\), part\.big \(>f8\); export to pt"):
        export(tmp_path / "job", tmp_path / "out", SAFETENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_what_dcp_cannot_hold_is_named(tmp_path):
    stored_state(tmp_path / "job", {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(StateError, match=r"a\.b.*export to pt"):
        export(tmp_path / "job", tmp_path / "out", DCP)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


@pytest.mark.parametrize("to", list(ExportFormat))
def test_nothing_is_replaced_unless_asked(tmp_path, to):
    first, second = {"x": torch.ones(3)}, {"x": torch.zeros(3)}
    stored_state(tmp_path / "first", first)
    stored_state(tmp_path / "second", second)
    export(tmp_path / "first", tmp_path / "out", to)
    before = {path: path.read_bytes() for path in sorted(tmp_path.glob("out*/**/*")) if path.is_file()}
    with pytest.raises(ConfigError, match="--force"):
        export(tmp_path / "second", tmp_path / "out", to)
    assert {path: path.read_bytes() for path in before} == before
    export(tmp_path / "second", tmp_path / "out", to, force=True)
    if to is DCP:
        found = {"x": torch.ones(3)}
        dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    else:
        found = load_exported(tmp_path / "out")
    assert torch.equal(found["x"], second["x"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out", "second"]


def test_force_spares_what_is_not_its_like(tmp_path):
    stored_state(tmp_path / "job", {"x": torch.ones(3)})
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("x")
    for to in ExportFormat:
        with pytest.raises(ConfigError, match="not replaced"):
            export(tmp_path / "job", home, to, force=True)
    assert (home / "precious").read_text() == "x"
    with pytest.raises(ConfigError, match="no directory"):
        export(tmp_path / "job", tmp_path / "nowhere" / "out", PT)


@pytest.mark.parametrize("to", list(ExportFormat))
def test_too_little_room_is_said_before(tmp_path, monkeypatch, to):
    stored_state(tmp_path / "job", {"x": torch.ones(1000)})
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=3000))
    with pytest.raises(StorageError, match=r"takes 4\d\d\d bytes.*free"):
        export(tmp_path / "job", tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint
from lastgood.errors import StorageError
from lastgood.storage import SlotStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
view = SlotStore.peek(sys.argv[1])
for to in ExportFormat:
    try:
        export_checkpoint(view, view.newest(), Path(sys.argv[2]), to)
    except StorageError as error:
        print(to.value, *Path(sys.argv[2]).parent.iterdir(), error)
"""


def test_a_failed_write_leaves_nothing(tmp_path):
    stored_state(tmp_path / "job", {"x": torch.ones(100_000)})
    process = WarmProcess(["-c", LIMITED, tmp_path / "job", tmp_path / "out"])
    said, _ = process.communicate(120)
    lines = [line for line in said.splitlines() if line.split()[0] in list(ExportFormat)]
    assert [line.split()[:2] for line in lines] == [[to.value, str(tmp_path / "job")] for to in ExportFormat], said
    assert all(str(tmp_path / "out") in line for line in lines), said


@pytest.mark.parametrize("to", list(ExportFormat))
def test_nothing_appears_that_is_not_durable(tmp_path, monkeypatch, to):
    stored_state(tmp_path / "job", {"x": torch.ones(10)})

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="device failed"):
        export(tmp_path / "job", tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


KILLED = """
import sys
from pathlib import Path
from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint
from lastgood.storage import SlotStore
view = SlotStore.peek(sys.argv[1])
info = view.newest()
while True:
    for to in ExportFormat:
        export_checkpoint(view, info, Path(sys.argv[2]) / to.value, to, force=True)
        print(to.value, flush=True)
"""


def test_a_killed_export_leaves_whole_files_only(tmp_path):
    state = {"x": torch.randn(200_000), "y": torch.randn(1000)}
    stored_state(tmp_path / "job", state)
    out = tmp_path / "out"
    out.mkdir()
    child = WarmProcess(["-c", KILLED, tmp_path / "job", out])
    with child.stdout:
        try:
            for _ in range(4):
                assert child.stdout.readline(), "the exporter ended by itself"
            time.sleep(0.02)
        finally:
            child.kill()
            child.wait()
    for to in (SAFETENSORS, PT):
        assert state_digest(load_exported(out / to.value)) == state_digest(state)


def damage(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def test_damage_of_an_export_is_seen(tmp_path):
    stored_state(tmp_path / "job", {"x": torch.randn(1000), "y": torch.ones(4, dtype=torch.uint8)})
    for to in (SAFETENSORS, PT):
        out = tmp_path / to.value
        export(tmp_path / "job", out, to)
        damage(out, out.stat().st_size // 2)
        with pytest.raises(CorruptCheckpoint, match="checksum"):
            load_exported(out)
        out.write_bytes(out.read_bytes()[:-50])
        with pytest.raises(CorruptCheckpoint, match=str(out)):
            load_exported(out)


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.safetensors", "x.SAFETENSORS", "x.bin", "x"])
@pytest.mark.parametrize("to", list(ExportFormat))
def test_every_name_and_format_comes_back_or_is_refused_before_anything_is_written(tmp_path, name, to):
    state = {"a": torch.arange(10)}
    stored_state(tmp_path / "job", state)
    out = tmp_path / name
    promised = {".pt": PT, ".pth": PT, ".safetensors": SAFETENSORS}.get(out.suffix.lower(), to)
    if promised is not to:
        with pytest.raises(ConfigError, match=f"give --to {promised.value}, or another name"):
            export(tmp_path / "job", out, to)
        assert not out.exists()
        return
    export(tmp_path / "job", out, to)
    if to is DCP:
        found = {"a": torch.zeros(10, dtype=torch.int64)}
        dcp.load(found, checkpoint_id=out, no_dist=True)
    else:
        found = load_exported(out)
    assert torch.equal(found["a"], state["a"])


def test_what_is_in_a_file_decides_how_it_is_read(tmp_path):
    stored_state(tmp_path / "job", {"a": torch.arange(10)})
    for to, other in ((PT, "x.safetensors"), (SAFETENSORS, "x.pt")):
        export(tmp_path / "job", tmp_path / to.value, to)
        (tmp_path / to.value).rename(tmp_path / other)
        (tmp_path / "link").symlink_to(other)
        assert torch.equal(load_exported(tmp_path / "link")["a"], torch.arange(10))
        (tmp_path / "link").unlink()


def test_the_checksums_are_over_the_tensors_bytes(tmp_path):
    import google_crc32c

    state = {"x": torch.randn(7, 5).t()}
    stored_state(tmp_path / "job", state)
    export(tmp_path / "job", tmp_path / "out", SAFETENSORS)
    content = (tmp_path / "out").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    begin, end = header["x"]["data_offsets"]
    data = content[8 + length :][begin:end]
    assert data == state["x"].contiguous().numpy().tobytes()
    facts = header["__metadata__"]
    checksums = json.loads(facts.pop("lastgood.crc32c"))
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    assert checksums == {name: f"{google_crc32c.value(of):08x}" for name, of in (("x", data), ("__metadata__", text))}


def test_small_parts_of_large_memory_are_refused_by_safetensors_and_kept_by_pt(tmp_path):
    column = torch.zeros(1 << 18, 64)[:, :1]
    stored_state(tmp_path / "job", {"a": column})
    with pytest.raises(StateError, match="export to pt"):
        export(tmp_path / "job", tmp_path / "out", SAFETENSORS)
    export(tmp_path / "job", tmp_path / "out", PT)
    assert load_exported(tmp_path / "out")["a"].stride() == (64, 1)


def test_more_plain_values_than_a_file_accounts_for_are_refused_by_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr("lastgood.bounds._BESIDE_BYTES", 10 << 20)
    stored_state(tmp_path / "job", {"order": list(range(30_000))})
    with pytest.raises(StateError, match=r"long lists of plain values.*export to pt"):
        export(tmp_path / "job", tmp_path / "out", SAFETENSORS)
    export(tmp_path / "job", tmp_path / "out", PT)
    assert load_exported(tmp_path / "out")["order"][-1] == 29_999


def test_files_of_others_are_refused(tmp_path):
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "foreign")
    torch.save([1, 2], tmp_path / "foreign.pt")
    for name in ("foreign", "foreign.pt"):
        with pytest.raises(MismatchError, match="not exported by Lastgood"):
            load_exported(tmp_path / name)
    with pytest.raises(StorageError):
        load_exported(tmp_path / "missing")
    with pytest.raises(StorageError, match="read with torch"):
        load_exported(tmp_path)


def test_what_torch_saved_of_a_module_is_read_as_it_was(tmp_path):
    """A module's state_dict() is an OrderedDict, no dict."""
    module = torch.nn.BatchNorm1d(3)
    torch.save(module.state_dict(), tmp_path / "module.pt")
    found = load_exported(tmp_path / "module.pt")
    assert list(found) == list(module.state_dict())
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())
