"""Files of torch.save: every value that a state may hold comes back through the allow-list unpickler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.torch_files import TorchFiles, plain_tree
from lastgood.errors import CorruptCheckpoint
from lastgood.state import state_digest
from tests.state.test_flatten import TREES, types_of


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
    import torch

    files = TorchFiles(tmp_path, keep=1)
    files.prepare()
    torch.save({"format": "lastgood-torch-1", "state": {"x": tmp_path}}, tmp_path / "checkpoint-00000001-step-1.pt")
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        files.read(None)
