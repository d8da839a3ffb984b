"""Files of torch.save: every value that a state may hold comes back through the allow-list unpickler."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.torch_files.files import TorchFiles, plain_tree
from lastgood.errors import CorruptCheckpoint, StateError
from lastgood.state import state_digest
from tests.state.support.trees import TREES, types_of


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), TREES, max_size=4))
def test_any_tree_comes_back(tmp_path_factory, state):
    files = TorchFiles(tmp_path_factory.mktemp("files"), keep=1)
    files.prepare()
    files.write(3, plain_tree(state))
    step, restored, _, _ = files.read(None)
    assert step == 3
    assert types_of(restored) == types_of(state)
    assert state_digest(restored) == state_digest(state)


@pytest.mark.parametrize("value", [b"", frozenset({1}), np.array(["a", "bc"]), np.array(["2020-01-01"], dtype="M8[D]")])
def test_values_that_torch_alone_does_not_allow(tmp_path, value):
    files = TorchFiles(tmp_path, keep=1)
    files.write(1, {"x": value})
    assert np.array_equal(files.read(None)[1]["x"], value)


def test_the_newest_is_the_last_written_and_is_never_pruned(tmp_path):
    files = TorchFiles(tmp_path, keep=1)
    for step in (10, 20, 15):
        files.write(step, {"x": step})
    assert files.steps() == [15]
    assert files.read(None)[:2] == (15, {"x": 15})


def test_a_foreign_pickle_is_refused(tmp_path):
    files = TorchFiles(tmp_path, keep=1)
    files.prepare()
    torch.save({"format": "lastgood-torch-1", "state": {"x": tmp_path}}, tmp_path / "checkpoint-00000001-step-1.pt")
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        files.read(None)


# -- files that somebody else wrote ------------------------------------------------------------------------------------


def four_bytes():
    return torch.zeros(4, dtype=torch.uint8)


ODD = {
    "no data": {"lastgood.numpy": "<f4"},
    "no shape": {"lastgood.numpy": "<f4", "data": four_bytes()},
    "more keys": {"lastgood.numpy": "<f4", "shape": [1], "data": four_bytes(), "more": 1},
    "a key that is no text": {"lastgood.numpy": "<f4", "shape": [1], 1: four_bytes()},
    "nonsense": {"lastgood.numpy": "nonsense", "shape": [1], "data": four_bytes()},
    "objects": {"lastgood.numpy": "|O", "shape": [1], "data": torch.zeros(8, dtype=torch.uint8)},
    "fields": {"lastgood.numpy": "<f2,<f2", "shape": [1], "data": four_bytes()},
    "an array of arrays": {"lastgood.numpy": "(2,)<f2", "shape": [1], "data": four_bytes()},
    "no text": {"lastgood.numpy": 4, "shape": [1], "data": four_bytes()},
    "a list": {"lastgood.numpy": ["<f4"], "shape": [1], "data": four_bytes()},
    "too large a shape": {"lastgood.numpy": "<f4", "shape": [7], "data": four_bytes()},
    "too small a shape": {"lastgood.numpy": "<f2", "shape": [1], "data": four_bytes()},
    "a negative shape": {"lastgood.numpy": "<f4", "shape": [-1], "data": four_bytes()},
    "an endless shape": {"lastgood.numpy": "<f4", "shape": [2**62, 2**62, 0], "data": None},
    "a shape of floats": {"lastgood.numpy": "<f4", "shape": [1.0], "data": four_bytes()},
    "a shape that is none": {"lastgood.numpy": "<f4", "shape": 1, "data": four_bytes()},
    "a huge text": {"lastgood.numpy": "|S99999999999", "shape": None, "data": four_bytes()},
    "empty texts without end": {"lastgood.numpy": "|S0", "shape": [2**40], "data": None},
    "two scalars": {"lastgood.numpy": "<f2", "shape": None, "data": four_bytes()},
    "floats as bytes": {"lastgood.numpy": "<f4", "shape": [1], "data": torch.zeros(1)},
    "a number as bytes": {"lastgood.numpy": "<f4", "shape": [1], "data": 4},
    "bytes with gaps": {"lastgood.numpy": "<f4", "shape": [1], "data": torch.zeros(8, dtype=torch.uint8)[::2]},
    "bytes of two axes": {"lastgood.numpy": "<f4", "shape": [1], "data": torch.zeros(2, 2, dtype=torch.uint8)},
}


@pytest.mark.parametrize("odd", ODD, ids=lambda name: name.replace(" ", "-"))
def test_an_odd_value_of_numpys_is_refused_and_the_older_checkpoint_is_taken(tmp_path, odd):
    files = TorchFiles(tmp_path, keep=2)
    files.write(1, {"x": 1})
    document = {"format": "lastgood-torch-1", "step": 2, "state": {"a": [ODD[odd]]}}
    torch.save(document, tmp_path / "checkpoint-00000002-step-2.pt")
    assert files.read(None)[:2] == (1, {"x": 1})
    with pytest.raises(CorruptCheckpoint, match=r"step-2\.pt"):
        files.read(2)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [1],
        {},
        {"format": "other", "step": 2, "state": {}},
        {"format": ["lastgood-torch-1"], "step": 2, "state": {}},
        {"format": "lastgood-torch-1", "step": 2},
        {"format": "lastgood-torch-1", "step": 2, "state": [1]},
        {"format": "lastgood-torch-1", "step": 3, "state": {}},
        {"format": "lastgood-torch-1", "state": {}},
    ],
    ids=str,
)
def test_a_file_of_something_else_is_refused_and_the_older_checkpoint_is_taken(tmp_path, document):
    files = TorchFiles(tmp_path, keep=2)
    files.write(1, {"x": 1})
    torch.save(document, tmp_path / "checkpoint-00000002-step-2.pt")
    assert files.read(None)[:2] == (1, {"x": 1})
    with pytest.raises(CorruptCheckpoint, match=r"step-2\.pt"):
        files.read(2)


def test_a_file_that_cannot_be_opened_is_passed_over(tmp_path):
    files = TorchFiles(tmp_path, keep=2)
    files.write(1, {"x": 1})
    os.mkfifo(tmp_path / "checkpoint-00000002-step-2.pt")
    assert files.read(None)[:2] == (1, {"x": 1})


@pytest.mark.parametrize("value", [np.array([object()]), np.zeros(2, dtype=[("a", "<f4")])], ids=["objects", "fields"])
def test_arrays_that_are_not_their_bytes_fail_the_save(tmp_path, value):
    with pytest.raises(StateError, match="cannot be stored to the bit"):
        TorchFiles(tmp_path, keep=1).write(1, {"x": value})


@pytest.mark.parametrize("value", [np.str_(""), np.bytes_(b""), np.datetime64("2020-01-01"), np.zeros((0, 3), "S4")])
def test_values_of_numpy_without_a_byte_come_back(tmp_path, value):
    files = TorchFiles(tmp_path, keep=1)
    files.write(1, {"x": value})
    found = files.read(None)[1]["x"]
    assert type(found) is type(value) and found.dtype == value.dtype and np.array_equal(found, value)
