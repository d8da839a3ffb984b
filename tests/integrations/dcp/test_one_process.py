"""States of one process: what LastgoodWriter wrote comes back to the bit, and torch's own folders are read as well."""

from __future__ import annotations

import io
import os
import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from lastgood.checkpointers.dcp.torch_io import first_cause
from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError, NoCheckpoint, StateError
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter, S3Options
from tests.integrations.dcp.states import emptied, example, refused, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def load(path, into, **options):
    dcp.load(into, storage_reader=LastgoodReader(path, **options))
    return into


@pytest.fixture
def saved(tmp_path):
    dcp.save(example(), storage_writer=LastgoodWriter(tmp_path / "step-1"))
    return tmp_path / "step-1"


def test_all_kinds_of_entries_come_back_to_the_bit(saved):
    state = example()
    assert same(load(saved, emptied(state)), state)
    assert not same(emptied(state), state)


def test_nothing_is_left_beside_a_checkpoint_and_its_owner_alone_reads_it(saved):
    assert [path.name for path in saved.parent.iterdir()] == ["step-1"]
    names = sorted(path.name for path in saved.iterdir())
    assert re.fullmatch(r"\.metadata __0_0-(\w{16})\.lgs lastgood-manifest-\1\.json", " ".join(names))
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {0o600}
    assert saved.stat().st_mode & 0o777 == 0o700


def test_a_newer_checkpoint_takes_the_name_of_an_older_one(saved):
    before = {path.name for path in saved.iterdir()} - {".metadata"}
    state = {"w": torch.arange(10.0)}
    dcp.save(state, storage_writer=LastgoodWriter(saved))
    assert same(load(saved, {"w": torch.zeros(10)}), state)
    assert len(list(saved.iterdir())) == 3
    assert not before & {path.name for path in saved.iterdir()}


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_folders_of_torch_are_read_as_torch_reads_them(tmp_path_factory, data):
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8]
    shapes = st.lists(st.integers(0, 7), max_size=4)
    state = {}
    for number in range(data.draw(st.integers(1, 5))):
        dtype, shape = data.draw(st.sampled_from(dtypes)), data.draw(shapes)
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.frombuffer(bytearray(os.urandom(count)), dtype=torch.uint8) if count else torch.zeros(0)
        raw = raw & 1 if dtype == torch.bool and count else raw
        state[f"t{number}"] = raw.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
    folder = tmp_path_factory.mktemp("states")
    dcp.save(state, checkpoint_id=folder / "torch")
    dcp.save(state, storage_writer=LastgoodWriter(folder / "ours"))
    for name in ("torch", "ours"):
        assert same(load(folder / name, emptied(state)), state)


def test_torch_refuses_a_slot_file_by_name(saved):
    state = emptied(example())
    with pytest.raises(CheckpointException, match=r"lastgood\.slot"):
        dcp.load(state, checkpoint_id=saved)


def test_urls_of_no_bucket_are_refused():
    with pytest.raises(ConfigError, match=r"gs://bucket/run: .*folders and s3://"):
        LastgoodWriter("gs://bucket/run")
    with pytest.raises(ConfigError, match="folders and s3://"):
        LastgoodReader("gs://bucket/run")
    with pytest.raises(ConfigError, match=r"is not s3://BUCKET"):
        LastgoodReader("s3://")
    assert not LastgoodWriter.validate_checkpoint_id("gs://bucket/run")
    for place in ("/tmp/run", "s3://bucket/run"):
        assert LastgoodWriter.validate_checkpoint_id(place)
        assert LastgoodReader.validate_checkpoint_id(place)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"layout": "dcp"}, "is for folders"), ({"readable_by": "all"}, "the bucket's to say")],
)
def test_what_a_bucket_has_not_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        LastgoodWriter("s3://bucket/run", **options)


def test_options_of_a_bucket_are_refused_for_a_folder(tmp_path):
    for kind in (LastgoodWriter, LastgoodReader):
        with pytest.raises(ConfigError, match=r"s3= is for s3://"):
            kind(tmp_path / "run", s3=S3Options(region="eu-west-1"))


@pytest.mark.parametrize("options", [{"writer_threads": 0}, {"layout": "other"}, {"readable_by": "me"}])
def test_options_that_there_are_not_are_refused(tmp_path, options):
    with pytest.raises(ConfigError):
        LastgoodWriter(tmp_path / "step-1", **options)


def test_a_writer_is_used_again_and_goes_by_pickle(tmp_path):
    writer = pickle.loads(pickle.dumps(LastgoodWriter(tmp_path / "first")))
    state = {"w": torch.arange(6)}
    for name in ("second", "third"):
        dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=writer)
        assert same(load(tmp_path / name, emptied(state)), state)
    assert not (tmp_path / "first").exists()


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_another_dtype_is_named_on_both_sides(saved):
    state = {"model": {"w": torch.zeros(300, 70, dtype=torch.float64)}}
    error = refused(lambda: load(saved, state))
    assert isinstance(error, MismatchError)
    assert re.search(r"model\.w: the checkpoint holds torch\.float32, the state torch\.float64", str(error))
    assert not state["model"]["w"].any()
    load(saved, state, cast=True)
    assert torch.equal(state["model"]["w"], example()["model"]["w"].double())


def test_another_shape_is_named_on_both_sides(saved):
    error = refused(lambda: load(saved, {"model": {"w": torch.zeros(300, 71)}}))
    assert "[300, 70]" in str(error)
    assert "[300, 71]" in str(error)
    assert "model.w" in str(error)


def test_keys_that_one_side_lacks_are_named(saved):
    assert "model.other" in str(refused(lambda: load(saved, {"model": {"other": torch.zeros(3)}})))
    part = {"model": {"w": torch.zeros(300, 70)}}
    error = refused(lambda: load(saved, part, strict=True))
    assert isinstance(error, MismatchError)
    assert "'flags'" in str(error)
    assert not part["model"]["w"].any()
    assert torch.equal(load(saved, part)["model"]["w"], example()["model"]["w"])


def test_a_tensor_for_a_value_is_refused(saved):
    assert "flags" in str(refused(lambda: load(saved, {"flags": 3})))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    error = refused(lambda: load(tmp_path / "step-9", {"w": torch.zeros(1)}))
    assert isinstance(error, NoCheckpoint)
    assert "step-9: is not there" in str(error)


class Custom:
    """Of nobody's list."""

    def __init__(self):
        self.number = 5


def test_a_value_that_would_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    error = refused(lambda: dcp.save({"mine": Custom()}, storage_writer=LastgoodWriter(tmp_path / "step-1")))
    assert isinstance(error, StateError)
    assert "mine" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_class_that_both_sides_name_is_stored(tmp_path):
    dcp.save({"mine": Custom()}, storage_writer=LastgoodWriter(tmp_path / "step-1", allow=[Custom]))
    error = refused(lambda: load(tmp_path / "step-1", {"mine": None}))
    assert isinstance(error, CorruptCheckpoint)
    assert "Custom" in str(error)
    assert load(tmp_path / "step-1", {"mine": None}, allow=[Custom])["mine"].number == 5


# -- hostile files -----------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.fixture
def unexploded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "exploded").exists()


@pytest.mark.usefixtures("unexploded")
def test_a_bomb_in_the_metadata_does_not_explode(tmp_path):
    state = {"w": torch.zeros(3)}
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    metadata = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())
    metadata.planner_data = Bomb()
    (tmp_path / "torch" / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(lambda: load(tmp_path / "torch", state))
    assert isinstance(error, CorruptCheckpoint)
    assert "mkdir" in str(error)


@pytest.mark.usefixtures("unexploded")
def test_a_bomb_in_a_byte_item_does_not_explode(tmp_path):
    dcp.save({"value": Bomb()}, checkpoint_id=tmp_path / "torch")
    error = refused(lambda: load(tmp_path / "torch", {"value": None}))
    assert isinstance(error, CorruptCheckpoint)
    assert "mkdir" in str(error)
    assert "value" in str(error)


@pytest.mark.usefixtures("unexploded")
def test_a_bomb_of_torchs_older_format_before_a_sound_file_does_not_explode(tmp_path):
    """torch looks at the first bytes, and takes what is no zip for a bare pickle."""
    sound = io.BytesIO()
    torch.save(5, sound)
    both = pickle.dumps(Bomb()) + sound.getvalue()
    dcp.save({"value": 5}, checkpoint_id=tmp_path / "torch")
    (data,) = (tmp_path / "torch").glob("*.distcp")
    data.write_bytes(both)
    metadata = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(both)
    (tmp_path / "torch" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert isinstance(refused(lambda: load(tmp_path / "torch", {"value": 0})), CorruptCheckpoint)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"relative_path": "../other"}, "no file beside it"),
        ({"relative_path": "/etc/passwd"}, "no file beside it"),
        ({"relative_path": "__0_9.distcp"}, "lacks __0_9.distcp"),
        ({"length": 1 << 40}, "items up to byte"),
        ({"offset": 1 << 61}, "items up to byte"),
        ({"offset": -1}, "damaged place"),
        ({"length": "x"}, "damaged place"),
    ],
)
def test_metadata_that_name_other_places_are_refused(tmp_path, change, said):
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    metadata = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        vars(place).update(change)
    (tmp_path / "torch" / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(lambda: load(tmp_path / "torch", {"w": torch.zeros(3)}))
    assert isinstance(error, CorruptCheckpoint)
    assert said in str(error)


def test_metadata_that_were_changed_are_told_by_the_manifest(saved):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.w"].properties.requires_grad = True
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(lambda: load(saved, emptied(example())))
    assert isinstance(error, CorruptCheckpoint)
    assert "manifest" in str(error)


@pytest.mark.parametrize("name", [r"__0_0.*\.lgs", r"lastgood-manifest.*"])
def test_a_file_that_is_missing_is_named(saved, name):
    (path,) = (one for one in saved.iterdir() if re.fullmatch(name, one.name))
    path.unlink()
    error = refused(lambda: load(saved, emptied(example())))
    assert isinstance(error, CorruptCheckpoint)
    assert path.name in str(error)


def test_a_file_of_another_save_is_refused(saved, tmp_path):
    dcp.save(example(), storage_writer=LastgoodWriter(tmp_path / "step-2"))
    (mine,), (other,) = saved.glob("*.lgs"), (tmp_path / "step-2").glob("*.lgs")
    mine.write_bytes(other.read_bytes())
    error = refused(lambda: load(saved, emptied(example())))
    assert isinstance(error, CorruptCheckpoint)
    assert "files of two saves" in str(error)


@settings(max_examples=30, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_of_any_file_is_believed(tmp_path_factory, place, bit):
    """A bit that nobody reads (padding, the second record's rest) may flip; then the state comes back to the bit."""
    folder = tmp_path_factory.mktemp("flip")
    state = {"w": torch.arange(3000.0), "value": [1, 2]}
    dcp.save(state, storage_writer=LastgoodWriter(folder / "step-1"))
    for path in (folder / "step-1").iterdir():
        content = path.read_bytes()
        begin = 1 << 20 if path.suffix == ".lgs" else 0
        at = begin + int(place * (len(content) - begin))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        into = {"w": torch.zeros(3000), "value": [0, 0]}
        try:
            load(folder / "step-1", into)
        except CheckpointException as error:
            assert isinstance(first_cause(error), (CorruptCheckpoint, NoCheckpoint)), error
        else:
            assert same(into, state)
        path.write_bytes(content)
