"""What torchsnapshot writes, and manifests that would have its own reader run code or read elsewhere."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle

import pytest
import torch

from lastgood import _native
from lastgood.checkpointers.directories.manifest import MANIFEST, manifest_text
from lastgood.checkpointers.directories.named_state import live_tensors
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.third_party.torchsnapshot_reader import StoredSnapshot
from lastgood.errors import CorruptCheckpoint, LastgoodError
from lastgood.state import flatten

RAW = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}


def state_of(fill):
    return {
        "weights": torch.full((4, 3), float(fill)),
        "a/b%c": torch.full((5,), fill, dtype=torch.uint8),
        "complex": torch.full((2,), fill, dtype=torch.complex64),
        "count": torch.tensor(fill),
    }


def write_snapshot(place, state):
    """As torchsnapshot 0.1.0 does: small tensors in one file, large ones cut along their first axis."""
    tensors = live_tensors(flatten(state))
    manifest = {"0/state": {"type": "dict", "keys": list(tensors)}}
    batched = b""
    place.mkdir()
    (place / "batched").mkdir()
    for name, tensor in tensors.items():
        entry = {"type": "Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "replicated": False}
        path = "0/state/" + name.replace("%", "%25").replace("/", "%2F")
        if tensor.dtype in RAW:
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            place_in = [len(batched), len(batched) + len(content)]
            entry |= {"location": "batched/x", "serializer": "buffer_protocol", "byte_range": place_in}
            batched += content
        else:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            torch.save(tensor, place / path)
            entry |= {"location": path, "serializer": "torch_save", "byte_range": None}
        manifest[path] = entry
    whole = manifest["0/state/weights"]
    begin = whole["byte_range"][0]
    pieces = []
    for first, last in ((0, 3), (3, 4)):
        at = [begin + 12 * first, begin + 12 * last]
        piece = {**whole, "shape": [last - first, 3], "byte_range": at}
        pieces.append({"offsets": [first, 0], "sizes": [last - first, 3], "tensor": piece})
    manifest["0/state/weights"] = {
        "type": "ChunkedTensor",
        "dtype": "torch.float32",
        "shape": [4, 3],
        "chunks": pieces,
        "replicated": False,
    }
    (place / "batched" / "x").write_bytes(batched)
    return {"version": "0.1.0", "world_size": 1, "manifest": manifest}


def seal(place, step, document):
    (place / ".snapshot_metadata").write_text(json.dumps(document))
    found = {
        str(path.relative_to(place)): path for path in place.rglob("*") if path.is_file() and path.name != MANIFEST
    }
    sums = {name: (path.stat().st_size, _native.crc32c(path.read_bytes(), 0)) for name, path in found.items()}
    (place / MANIFEST).write_bytes(manifest_text(step, sums))


@pytest.fixture
def job(tmp_path):
    """Two checkpoints, the manifest of the newer one, and a function that seals it."""
    for step in (1, 2):
        place = tmp_path / f"checkpoint-0000000{step}-step-{step}"
        document = write_snapshot(place, state_of(step))
        seal(place, step, document)
    return tmp_path, place, document


def restored(directory):
    state = state_of(0)
    step = checkpointer_class("torchsnapshot")(directory).restore(state)
    assert all(bool((value == step).all()) for value in state.values())
    return step


def test_what_torchsnapshot_writes_is_read(job):
    assert restored(job[0]) == 2


@pytest.mark.skipif(importlib.util.find_spec("torchsnapshot") is None, reason="torchsnapshot is not installed")
def test_what_the_library_itself_wrote_is_read(tmp_path):
    from torchsnapshot import Snapshot, StateDict

    tensors = live_tensors(flatten(state_of(2)))
    Snapshot.take(path=str(tmp_path / "x"), app_state={"state": StateDict(**tensors)})
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    StoredSnapshot(tmp_path / "x", 1 << 20, "state").load(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


class Evil:
    def __reduce__(self):
        return (os.mkdir, (os.environ["EVIL_PLACE"],))


def test_an_object_in_a_manifest_is_not_unpickled(job, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("EVIL_PLACE", str(tmp_path / "made"))
    directory, place, document = job
    evil = pickle.dumps(Evil())
    (place / "0" / "state" / "evil").write_bytes(evil)
    location = {"location": "0/state/evil", "replicated": False}
    honest = copy.deepcopy(document["manifest"])
    for name in ("lastgood.layout", "count", "complex"):
        for entry in (
            {"type": "object", "serializer": "torch_save", "obj_type": "Tensor", **location},
            {**honest[f"0/state/{name}"], "serializer": "torch_save", "byte_range": None, **location},
        ):
            document["manifest"] = copy.deepcopy(honest)
            document["manifest"][f"0/state/{name}"] = entry
            seal(place, 2, document)
            assert restored(directory) == 1
    assert not (tmp_path / "made").exists()
    assert "trying the checkpoint before it" in caplog.text


def entry(manifest, name="count"):
    return manifest[f"0/state/{name}"]


CHANGES = {
    "no manifest": lambda m, d: d.pop("manifest"),
    "a list": lambda m, d: d.update(manifest=[]),
    "no tensor": lambda m, d: m.pop("0/state/count"),
    "a text": lambda m, d: m.update({"0/state/count": "x"}),
    "a number": lambda m, d: m.update({"0/state/count": {"type": "int", "serialized_value": "1"}}),
    "sharded": lambda m, d: entry(m).update(type="ShardedTensor"),
    "unhashable": lambda m, d: entry(m).update(type=["Tensor"], serializer=["x"]),
    "another dtype": lambda m, d: entry(m).update(dtype="torch.float64"),
    "no dtype": lambda m, d: entry(m).update(dtype=["torch.int64"]),
    "a name of torch": lambda m, d: entry(m).update(dtype="torch.load"),
    "another shape": lambda m, d: entry(m).update(shape=[1]),
    "a negative shape": lambda m, d: entry(m).update(shape=[-1]),
    "an endless shape": lambda m, d: entry(m, "lastgood.layout").update(shape=[2**61]),
    "a shape of floats": lambda m, d: entry(m).update(shape=[1.0]),
    "a range outside": lambda m, d: entry(m).update(byte_range=[0, 2**40]),
    "a negative range": lambda m, d: entry(m).update(byte_range=[-8, 0]),
    "a range backwards": lambda m, d: entry(m).update(byte_range=[8, 0]),
    "a short range": lambda m, d: entry(m).update(byte_range=[0, 7]),
    "an odd range": lambda m, d: entry(m).update(byte_range=[0]),
    "a file outside": lambda m, d: entry(m).update(location="../x"),
    "an absolute file": lambda m, d: entry(m).update(location="/proc/self/environ"),
    "a directory": lambda m, d: entry(m).update(location="batched"),
    "no file": lambda m, d: entry(m).update(location="none"),
    "a file without a name": lambda m, d: entry(m).update(location=""),
    "a file that is no text": lambda m, d: entry(m).update(location=None),
    "a NUL": lambda m, d: entry(m).update(location="a\0b"),
    "another serializer": lambda m, d: entry(m).update(serializer="per_tensor_qtensor"),
    "no pieces": lambda m, d: entry(m, "weights").update(chunks=[]),
    "pieces that are none": lambda m, d: entry(m, "weights").update(chunks=[1, 2]),
    "a piece less": lambda m, d: entry(m, "weights")["chunks"].pop(),
    "a piece more": lambda m, d: entry(m, "weights")["chunks"].append(entry(m, "weights")["chunks"][0]),
    "pieces in another order": lambda m, d: entry(m, "weights")["chunks"].reverse(),
    "an empty piece": lambda m, d: entry(m, "weights")["chunks"][0].update(sizes=[]),
    "a wider piece": lambda m, d: entry(m, "weights")["chunks"][0].update(sizes=[3, 4]),
    "a piece in pieces": lambda m, d: entry(m, "weights")["chunks"][0].update(
        tensor=copy.deepcopy(entry(m, "weights"))
    ),
}


@pytest.mark.parametrize("name", CHANGES, ids=lambda name: name.replace(" ", "-"))
def test_a_manifest_that_does_not_fit_is_refused_and_the_older_checkpoint_is_taken(job, name):
    directory, place, document = job
    CHANGES[name](document["manifest"], document)
    seal(place, 2, document)
    assert restored(directory) == 1


def test_a_link_out_of_the_checkpoint_is_not_followed(job, tmp_path):
    _, place, _ = job
    (tmp_path / "elsewhere").mkdir()
    (place / "batched" / "x").rename(tmp_path / "elsewhere" / "x")
    (place / "batched").rmdir()
    (place / "batched").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match="no file of this checkpoint"):
        StoredSnapshot(place, 1 << 20, "state").load({"count": torch.tensor(0)})


@pytest.mark.parametrize("text", [b"", b"[", b"[" * 100_000, b"1e999", b"!!python/object:os.system x", b"\xff"])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / ".snapshot_metadata").write_bytes(text)
    with pytest.raises(LastgoodError):
        StoredSnapshot(tmp_path, 1 << 20, "state")
