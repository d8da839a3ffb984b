"""Layouts and trees of committed checkpoints: names, sharing, reading, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.slots.contents import (
    find_sharing,
    look_at_slots,
    named_tensors,
    named_values,
    read_blocks,
    read_layout,
    read_tree,
)
from lastgood.errors import CorruptCheckpoint
from lastgood.state import Layout, flatten, state_digest
from lastgood.storage import SlotState, SlotStore
from lastgood.storage import format as fmt
from tests.checkpointers.support.small_training import SmallTraining
from tests.checkpointers.support.stored_helpers import CHUNK, hard_tensors, open_store, plain_values, put, stored_state
from tests.state.support.trees import TREES


def names(state):
    return [tensor.name for tensor in named_tensors(flatten(state).layout)]


def test_names_are_paths():
    training = SmallTraining(4)
    training.step()
    found = names(training.state)
    assert {"model.0.weight", "model.1.running_mean", "optimizer.state.3.exp_avg", "rng.torch", "plain.moving"} <= {
        *found
    }
    training.step()
    assert names(training.state) == found, "values do not change names"


def test_names_that_would_be_equal_are_numbered():
    one = torch.ones(1)
    state = {"a": {"b": one, 1: one, "1": one, False: one}, "a.b": one, "a.b#2": one, "n\n\ud800": one}
    assert names(state) == ["a.b", "a.1", "a.1#2", "a.False", "a.b#3", "a.b#2", "n\\n\\ud800"]
    assert names({"__metadata__": one, "t": (one, [one]), "k": {(1, "x"): one}}) == [
        "__metadata__#2",
        "t.0",
        "t.1.0",
        "k.(1, 'x')",
    ]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=3), TREES, max_size=5))
def test_any_tree_has_unique_names(state):
    layout = flatten(state).layout
    found = named_tensors(layout)
    assert len({tensor.name for tensor in found}) == len(found) == layout.tensor_count()
    assert all(tensor.name.isprintable() for tensor in found)
    values = named_values(layout)
    assert all(isinstance(text, str) and len(text) <= 60 for _, text in values)


def test_values_are_short():
    values = dict(named_values(flatten({"plain": plain_values(), "long": "x" * 1000}).layout))
    assert values["plain.number"] == str(1 << 70)
    assert values["plain.tuple"] == "(1, (2, 'x'))"
    assert values["plain.3.deep"] == "{}"
    assert len(values["long"]) == 60
    mixed = {"groups": [{"lr": 0.1, "params": list(range(1000))}], "pair": (torch.ones(1), 2)}
    values = dict(named_values(flatten(mixed).layout))
    assert list(values) == ["groups.0.lr", "groups.0.params", "pair.1"]


def test_sharing_counts_memory_once():
    base = torch.zeros(10)
    tensors = named_tensors(flatten({"x": base[:6], "y": base[4:], "all": base, "same": base}).layout)
    sharing = dict(zip((tensor.name for tensor in tensors), find_sharing(tensors), strict=True))
    assert sum(one.own_bytes for one in sharing.values()) == 40
    assert sharing["all"].shares_with is None
    assert {sharing[name].shares_with for name in ("x", "y", "same")} == {"all"}
    apart = named_tensors(flatten({"x": base[:4], "y": base[4:]}).layout)
    assert [(one.own_bytes, one.shares_with) for one in find_sharing(apart)] == [(16, None), (24, None)]


def test_a_tree_comes_back_whatever_is_read_at_once(tmp_path):
    state = {"hard": hard_tensors(), "plain": plain_values(), "large": torch.randn(30_000)}
    info = stored_state(tmp_path, state)
    view = SlotStore.peek(tmp_path)
    assert state_digest(read_tree(view, info, 2)) == state_digest(state)
    layout = read_layout(view, info)
    for window in (1, CHUNK, 10**9):
        read = dict(read_blocks(view, info, layout, 1, window))
        assert [read[number].numel() for number in range(len(read))] == list(layout.block_bytes)
        assert all(map(torch.equal, read.values(), dict(read_blocks(view, info, layout, 1, 10**9)).values()))


def commit_raw(store, meta: bytes, digest: bytes):
    write = store.begin(1, len(meta), 20)
    memory = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
    write.copy_host([(memory.data_ptr(), len(meta))], 20)
    write.commit(0, len(meta), digest, 20)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (b"no json", "cannot be read"),
        (b'{"layout_version":1,"block_bytes":[],"deferred_blocks":0,"tree":["d",[[7]]]}', "cannot be read"),
        (b'{"layout_version":1,"block_bytes":[],"deferred_blocks":0,"tree":["d",[]]}', "does not match"),
    ],
)
def test_a_stream_without_a_sound_layout_is_refused(tmp_path, meta, words):
    with open_store(tmp_path) as store:
        commit_raw(store, meta, bytes(32))
        with pytest.raises(CorruptCheckpoint, match=f"step 1.*{words}"):
            read_layout(store, store.committed()[0])


@pytest.mark.parametrize(
    "node",
    [
        ["T", 0, 0, "float32", [100], [1]],
        ["T", 0, 0, "float32", [-1], [1]],
        ["T", 0, 0, "float32", [2], [1, 1]],
        ["T", 0, 2, "float32", [1], [1]],
        ["T", 5, 0, "uint8", [1], [1]],
        ["T", "x", 0, "uint8", [1], [1]],
        ["T", 0, 0, "nn", [1], [1]],
        ["A", 0, 0, "<i9", [1]],
        ["A", 0],
        [],
    ],
)
def test_a_layout_that_reaches_outside_its_blocks_is_refused(node):
    document = {"layout_version": 1, "block_bytes": [16], "deferred_blocks": 0, "tree": ["d", [[["s", "x"], node]]]}
    with pytest.raises(CorruptCheckpoint, match="somewhere"):
        Layout.from_json(json.dumps(document).encode(), "somewhere")


def test_a_slot_that_is_reused_is_no_damage(tmp_path):
    state = {"x": torch.ones(8)}
    with open_store(tmp_path, slots=3, keep=1) as store:
        old = put(store, 1, state)
        view = SlotStore.peek(tmp_path)
        assert view.why_gone(old) == ""
        for step in (2, 3, 4):
            put(store, step, state)
        assert view.why_gone(old) == "a training has reused the slot"
        newest = store.committed()[0]
    with newest.path.open("r+b") as file:
        file.seek(fmt.COMMIT_OFFSET + 50)
        file.write(b"\xff")
    assert view.why_gone(newest) == "", "a damaged record is damage"
    newest.path.unlink()
    assert view.why_gone(newest) != ""


def test_a_directory_in_any_condition_can_be_looked_at(tmp_path):
    stored_state(tmp_path / "a", {"x": torch.ones(2)})
    stored_state(tmp_path / "b", {"x": torch.ones(2)})
    (tmp_path / "b" / "slot-0000.lgs").rename(tmp_path / "a" / "slot-0007.lgs")
    (tmp_path / "a" / "slot-0009.lgs").mkdir()
    (tmp_path / "a" / "job.json").unlink()
    statuses, troubles = look_at_slots(SlotStore.peek(tmp_path / "a"))
    assert [status.slot for status in statuses] == [0, 7, 9]
    assert [statuses[0].state, statuses[2].state] == [SlotState.WHOLE, SlotState.TORN]
    assert len(troubles) == 1
