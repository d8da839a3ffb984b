"""DCP's metadata and files with numbers that do not fit, under right checksums."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

from lastgood import _native
from lastgood.checkpointers.dcp.reader import StoredTensors
from lastgood.checkpointers.dcp.system import TorchDCP
from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.manifest import MANIFEST, manifest_text
from lastgood.errors import CorruptCheckpoint, LastgoodError
from tests.checkpointers.support.pickle_craft import ORDERED, call, named, of, storage, tensor, torch_file


def state_of(fill):
    return {"weights": torch.full((4, 2), fill), "bias": torch.full((3,), fill, dtype=torch.float64)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("job")
    state = state_of(0.0)
    checkpointer = TorchDCP(directory, mode="sync")
    checkpointer.start(state)
    for step in (1, 2):
        for value in state.values():
            value.fill_(float(step))
        checkpointer.save(step)
    checkpointer.close()
    newest, older = (Path(one.where) for one in LocalStore(directory, 2).found())
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    return directory, newest, older, metadata


@pytest.fixture
def job(saved, tmp_path):
    """A copy of the job, and a function that gives its newest checkpoint other files under a right manifest."""
    _, newest, older, _ = saved
    for one in (newest, older):
        (tmp_path / one.name).mkdir()
        for path in one.iterdir():
            (tmp_path / one.name / path.name).write_bytes(path.read_bytes())
    place = tmp_path / newest.name

    def give(**files):
        for name, content in files.items():
            (place / {"metadata": ".metadata", "data": "__0_0.distcp"}[name]).write_bytes(content)
        found = {path.name: path.read_bytes() for path in place.iterdir() if path.name != MANIFEST}
        sums = {name: (len(content), _native.crc32c(content, 0)) for name, content in found.items()}
        (place / MANIFEST).write_bytes(manifest_text(2, sums))
        return tmp_path

    return give


def restored(directory):
    state = state_of(-1.0)
    step = TorchDCP(directory).restore(state)
    assert all(bool((value == step).all()) for value in state.values())
    return step


def test_a_checkpoint_of_dcp_is_read(job):
    assert restored(job()) == 2


def infos(metadata):
    return {index.fqn: info for index, info in metadata.storage_data.items()}


def described(metadata):
    return metadata.state_dict_metadata["weights"]


def change(where, **values):
    for name, value in values.items():
        setattr(where, name, value)


CHANGES = {
    "a negative offset": lambda m: change(infos(m)["weights"], offset=-1),
    "a huge offset": lambda m: change(infos(m)["weights"], offset=2**70),
    "an offset beyond the file": lambda m: change(infos(m)["weights"], offset=1 << 30),
    "an offset of another tensor": lambda m: change(infos(m)["weights"], offset=infos(m)["bias"].offset),
    "an offset that is none": lambda m: change(infos(m)["weights"], offset=1.0),
    "a length of nothing": lambda m: change(infos(m)["weights"], length=0),
    "a huge length": lambda m: change(infos(m)["weights"], length=2**62),
    "a negative length": lambda m: change(infos(m)["weights"], length=-5),
    "another file": lambda m: change(infos(m)["weights"], relative_path="other.distcp"),
    "a file outside": lambda m: change(infos(m)["weights"], relative_path="../x"),
    "an absolute file": lambda m: change(infos(m)["weights"], relative_path="/etc/passwd"),
    "the directory": lambda m: change(infos(m)["weights"], relative_path=".."),
    "the metadata": lambda m: change(infos(m)["weights"], relative_path=".metadata", offset=0, length=600),
    "a file without a name": lambda m: change(infos(m)["weights"], relative_path=""),
    "a file that is no text": lambda m: change(infos(m)["weights"], relative_path=1),
    "transforms": lambda m: change(infos(m)["weights"], transform_descriptors=["zstd"]),
    "another dtype": lambda m: change(described(m).properties, dtype=torch.float64),
    "a narrower dtype": lambda m: change(described(m).properties, dtype=torch.int32),
    "a dtype that is none": lambda m: change(described(m).properties, dtype="float32"),
    "a larger size": lambda m: change(described(m), size=torch.Size([2**40, 2])),
    "another size": lambda m: change(described(m), size=torch.Size([2, 4])),
    "a negative size": lambda m: change(described(m), size=torch.Size([-4, -2])),
    "a size that is none": lambda m: change(described(m), size=[4, 2]),
    "no piece": lambda m: change(described(m), chunks=[]),
    "a piece outside": lambda m: change(described(m).chunks[0], offsets=torch.Size([1, 0])),
    "a smaller piece": lambda m: change(described(m).chunks[0], sizes=torch.Size([2, 2])),
    "a piece twice": lambda m: change(described(m), chunks=[*described(m).chunks] * 2),
    "a piece that is none": lambda m: change(described(m), chunks=[1]),
    "two pieces": lambda m: change(
        described(m), chunks=[ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([2, 2])) for n in (0, 2)]
    ),
    "bytes": lambda m: m.state_dict_metadata.update(weights=BytesStorageMetadata()),
    "bytes as layout": lambda m: m.state_dict_metadata.update({"lastgood.layout": BytesStorageMetadata()}),
    "a number": lambda m: m.state_dict_metadata.update(weights=1),
    "nothing": lambda m: m.state_dict_metadata.pop("weights"),
    "no place": lambda m: m.storage_data.clear(),
    "no places": lambda m: change(m, storage_data=None),
    "no tensors": lambda m: change(m, state_dict_metadata=None),
    "a longer layout": lambda m: change(m.state_dict_metadata["lastgood.layout"], size=torch.Size([1 << 40])),
}


@pytest.mark.parametrize("name", CHANGES, ids=lambda name: name.replace(" ", "-"))
def test_metadata_that_do_not_fit_are_refused_and_the_older_checkpoint_is_taken(saved, job, name, caplog):
    metadata = pickle.loads(pickle.dumps(saved[3]))
    CHANGES[name](metadata)
    assert restored(job(metadata=pickle.dumps(metadata))) == 1
    assert "trying the checkpoint before it" in caplog.text


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol_are_read(saved, job, protocol):
    assert restored(job(metadata=pickle.dumps(saved[3], protocol=protocol))) == 2


def test_metadata_as_other_torches_write_them_are_read(saved, job):
    """Older ones had no version and no meta of the storage, newer ones have descriptors of transforms."""
    metadata = pickle.loads(pickle.dumps(saved[3]))
    for name in ("storage_meta", "version"):
        metadata.__dict__.pop(name, None)
    for info in metadata.storage_data.values():
        info.transform_descriptors = ()
    assert restored(job(metadata=pickle.dumps(metadata))) == 2
    metadata.planner_data = {"weights": ("weights",)}
    assert restored(job(metadata=pickle.dumps(metadata))) == 2


EIGHT = bytes(range(32))
KEPT = storage("0", 8)


@pytest.mark.parametrize(
    "body",
    [
        of(1),
        of([]),
        tensor(KEPT, 0, (8,), (1,)),
        tensor(KEPT, 0, (2, 4), (4, 1)),
        tensor(storage("0", 8, "IntStorage"), 0, (4, 2), (2, 1)),
        tensor(storage("0", 4, "DoubleStorage"), 0, (4, 1), (1, 1)),
        tensor(KEPT, 0, (4, 3), (2, 1)),
        call(named("torch._utils", "_rebuild_parameter"), tensor(KEPT, 0, (4, 2), (2, 1)), False, ORDERED),
    ],
)
def test_what_is_no_tensor_of_that_kind_is_refused_where_it_lies(saved, job, body):
    _, newest, _, metadata = saved
    metadata = pickle.loads(pickle.dumps(metadata))
    data = (newest / "__0_0.distcp").read_bytes()
    piece = torch_file(body, {"0": EIGHT})
    change(infos(metadata)["weights"], offset=len(data), length=len(piece))
    assert restored(job(metadata=pickle.dumps(metadata), data=data + piece)) == 1
    sound = torch_file(tensor(KEPT, 0, (4, 2), (2, 1)), {"0": EIGHT})
    change(infos(metadata)["weights"], length=len(sound))
    state = state_of(-1.0)
    assert TorchDCP(job(metadata=pickle.dumps(metadata), data=data + sound)).restore(state) == 2
    assert torch.equal(state["weights"], torch.frombuffer(bytearray(EIGHT), dtype=torch.float32).view(4, 2))


def test_lastgoods_reader_and_dcps_agree_on_what_metadata_say(saved):
    _, newest, _, _ = saved
    own = StoredTensors(newest, 1 << 20)
    for name, about in FileSystemReader(newest).read_metadata().state_dict_metadata.items():
        assert own.elements(name) == about.size.numel()


def test_a_flipped_byte_anywhere_is_refused_or_does_not_matter(saved, job):
    """Under a right manifest: as if somebody had written it so."""
    _, newest, _, _ = saved
    for part, path in (("metadata", newest / ".metadata"), ("data", newest / "__0_0.distcp")):
        content = path.read_bytes()
        for position in range(0, len(content), 61):
            damaged = content[:position] + bytes([content[position] ^ 21]) + content[position + 1 :]
            try:
                restored(job(**{part: damaged}))
            except LastgoodError as error:
                assert not isinstance(error, CorruptCheckpoint), "the older one is whole"
            job(**{part: content})
