"""Files whose pickles were written to run code: every opcode on every name that may be in one."""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import os
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

from lastgood import _native
from lastgood.bounds import Budget, Refused
from lastgood.checkpointers.dcp.metadata import metadata_names
from lastgood.checkpointers.dcp.reader import StoredTensors
from lastgood.checkpointers.dcp.system import TorchDCP
from lastgood.checkpointers.directories.manifest import MANIFEST, manifest_text
from lastgood.checkpointers.torch_files.archive import file_names, read_torch_file, set_metadata
from lastgood.checkpointers.torch_files.files import TorchFiles
from lastgood.errors import CorruptCheckpoint, LastgoodError
from lastgood.integrations.deepspeed import _load_foreign
from lastgood.integrations.deepspeed_objects import listed_classes
from lastgood.pickles import Maker, Record, load_pickle
from tests.checkpointers.support.pickle_craft import attempts, call, made, named, of, pickled, torch_file

METADATA = "torch.distributed.checkpoint.metadata"
CALLED = []


def marker(*_, **__):
    CALLED.append(1)


FOREIGN = (__name__, "marker")
RECORDS = {**file_names(), **{name: Record.maker(".".join(name)) for name in listed_classes()}}


@pytest.fixture(autouse=True)
def nothing_is_called_and_nothing_changed():
    copyreg.add_extension(*FOREIGN, 240)
    names = {**file_names(), **metadata_names()}
    classes = {Maker, Record, *filter(lambda one: isinstance(one, type), map(real, [*names, *listed_classes()]))}
    before = {kind: attributes(kind) for kind in classes}
    members = [member for kind in classes for member in getattr(kind, "__members__", {}).values()]
    values = [dict(vars(member)) for member in members]
    makers = [(one, one.name, one.make) for one in names.values() if isinstance(one, Maker)]
    CALLED.clear()
    yield
    copyreg.remove_extension(*FOREIGN, 240)
    assert not CALLED
    assert {kind: attributes(kind) for kind in classes} == before
    assert [dict(vars(member)) for member in members] == values
    assert [(one, one.name, one.make) for one, _, _ in makers] == makers


def attributes(kind):
    """All that is set on a class, but for what Python itself notes there at a first use."""
    return kind.__bases__, {
        key: value for key, value in vars(kind).items() if not key.startswith(("__abstract", "_abc", "__slotn"))
    }


def real(name):
    """What Python's own unpickler would give for a name, if it is there."""
    try:
        return getattr(importlib.import_module(name[0]), name[1])
    except (ImportError, AttributeError):
        return None


def tried(names, body):
    """Whether a pickle gives a value; nothing else than Refused is raised."""
    try:
        load_pickle(pickled(body), names, Budget(0), build={OrderedDict: set_metadata})
    except Refused:
        return False
    return True


def test_the_markers_would_be_called_by_pythons_own_unpickler():
    for body in (attempts(*FOREIGN, FOREIGN)["foreign REDUCE"], attempts(*FOREIGN, FOREIGN)["EXT1"]):
        pickle.loads(pickled(body))
    assert len(CALLED) == 2
    CALLED.clear()


@pytest.mark.parametrize("names", [file_names(), RECORDS, metadata_names()], ids=["torch", "deepspeed", "dcp"])
def test_every_opcode_on_every_name(names):
    """Values that nothing can change stand for dtypes; one of those is tried in each way."""
    whole = [name for name, found in names.items() if type(found) is not torch.dtype]
    bodies = [body for name in [*whole, ("torch", "float32")] for body in attempts(*name, FOREIGN).values()]
    read = sum(tried(names, body) for body in bodies)
    assert 50 < read < len(bodies) / 3, "some are values, and most are refused"


@pytest.mark.parametrize("how", ["BUILD bases", "REDUCE evil", "foreign REDUCE", "EXT1", "INST nothing", "REDUCE text"])
def test_what_readers_make_of_such_files(tmp_path, how):
    path = tmp_path / "x.pt"
    for reader, name in (
        (read_torch_file, ("collections", "Counter")),
        (_load_foreign, ("argparse", "Namespace")),
        (_load_foreign, ("deepspeed.runtime.zero.config", "ZeroStageEnum")),
    ):
        path.write_bytes(torch_file(attempts(*name, FOREIGN)[how]))
        with pytest.raises(LastgoodError, match=r"x\.pt"):
            reader(path)
    body = attempts(METADATA, "TensorStorageMetadata", FOREIGN)[how]
    metadata = made(named(METADATA, "Metadata"), {"state_dict_metadata": {"x": body}, "storage_data": {}})
    for content in (body, metadata):
        (tmp_path / ".metadata").write_bytes(pickled(content))
        with pytest.raises(CorruptCheckpoint, match=r"\.metadata|holds no tensor"):
            StoredTensors(tmp_path, 1 << 16).elements("x")


def dcp_checkpoint(directory, metadata, payload):
    place = directory / "checkpoint-00000001-step-1"
    place.mkdir(parents=True)
    (place / ".metadata").write_bytes(metadata)
    (place / "__0_0.distcp").write_bytes(payload)
    files = {one.name: (one.stat().st_size, _native.crc32c(one.read_bytes(), 0)) for one in place.iterdir()}
    (place / MANIFEST).write_bytes(manifest_text(1, files))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_an_enum_with_other_bases_makes_no_tensor_of_bytes_and_runs_nothing(tmp_path):
    """DCP's planner unpickles what is no tensor; an enum with bases of its own passes for a tensor before that."""
    payload = pickle.dumps(Evil(tmp_path / "made"))
    enum = named(METADATA, "_MEM_FORMAT_ENCODING")
    size = call(named("torch", "Size"), (len(payload),))
    member = call(enum, 0)
    state = {
        "properties": call(named(METADATA, "TensorProperties"), named("torch", "uint8")),
        "size": size,
        "chunks": [],
    }
    both = (named(METADATA, "TensorStorageMetadata"), named(METADATA, "BytesStorageMetadata"))
    rebased = enum + of((None, {"__bases__": both})) + b"b"
    index = call(named(METADATA, "MetadataIndex"), "lastgood.layout")
    info = call(named("torch.distributed.checkpoint.filesystem", "_StorageInfo"), "__0_0.distcp", 0, len(payload))
    body = member + of((None, state)) + b"b" + b"q\x00" + b"0" + rebased + b"0"
    body += call(named(METADATA, "Metadata"), {"lastgood.layout": b"h\x00"}, None, {index: info})
    # In a process of its own: where it works, torch's class is another one ever after.
    dcp_checkpoint(tmp_path / "job", pickled(body), payload)
    code = (
        "import sys, torch\n"
        "from lastgood.checkpointers.dcp.system import TorchDCP\n"
        "from lastgood.errors import CorruptCheckpoint\n"
        "try:\n"
        "    TorchDCP(sys.argv[1]).restore({'model': torch.nn.Linear(2, 2)})\n"
        "except CorruptCheckpoint as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job")], capture_output=True, text=True, check=True, timeout=120
    )
    assert not (tmp_path / "made").exists(), "code of the file was run"
    assert ".metadata: cannot be read" in done.stdout


def test_metadata_are_read_once(tmp_path, monkeypatch):
    """What is read a second time may be another file by then."""
    state = {"weights": torch.arange(4.0)}
    checkpointer = TorchDCP(tmp_path, mode="sync")
    checkpointer.start(state)
    checkpointer.save(1)
    checkpointer.close()
    original = StoredTensors.load

    def load(stored, targets):
        (stored._checkpoint / ".metadata").write_bytes(pickled(call(named(*FOREIGN))))
        original(stored, targets)

    monkeypatch.setattr(StoredTensors, "load", load)
    fresh = {"weights": torch.zeros(4)}
    assert TorchDCP(tmp_path).restore(fresh) == 1
    assert torch.equal(fresh["weights"], torch.arange(4.0))


def test_a_listed_enum_keeps_its_members(tmp_path):
    """torch's own allow-list lets BUILD set the attributes of a member, which all of the process share."""
    (module, name) = next(one for one in listed_classes() if one[1] == "ZeroStageEnum")
    if real((module, name)) is None:
        pytest.skip("DeepSpeed is not installed")
    body = call(named(module, name), 1) + of({"_value_": 7, "_name_": "x"}) + b"b"
    (tmp_path / "x.pt").write_bytes(torch_file(body))
    with contextlib.suppress(LastgoodError):
        _load_foreign(tmp_path / "x.pt")
    assert real((module, name))(1).value == 1


def test_a_foreign_name_in_a_checkpoint_is_named_and_the_older_one_is_taken(tmp_path, caplog):
    files = TorchFiles(tmp_path, keep=2)
    files.prepare()
    files.write(1, {"x": 1})
    (tmp_path / "checkpoint-00000002-step-2.pt").write_bytes(torch_file(call(named("posix", "system"), "true")))
    assert files.read(None)[:2] == (1, {"x": 1})
    assert "'posix.system' is not on the list" in caplog.text
