"""Flattening any state: bytes out, bytes in, to the bit."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import CorruptCheckpoint, MismatchError, StateError
from lastgood.state import Layout, RngState, apply_tree, flatten, state_digest, unflatten
from tests.state.support.trees import DTYPES, TREES, random_bits, types_of


def round_trip(state):
    flat = flatten(state)
    stream = bytearray(flat.layout.stream_bytes)
    for offset, block in zip(flat.layout.block_offsets(), flat.blocks, strict=True):
        stream[offset : offset + block.numel()] = bytes(block.cpu().numpy())
    layout = Layout.from_json(flat.layout.to_json(), "test")
    assert layout.digest() == flat.layout.digest()
    assert layout.stream_bytes == flat.layout.stream_bytes
    blocks = [
        torch.frombuffer(bytearray(stream[offset : offset + size]), dtype=torch.uint8)
        for offset, size in zip(layout.block_offsets(), layout.block_bytes, strict=True)
    ]
    return unflatten(layout, blocks, "test")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)], ids=str)
def test_every_dtype_keeps_its_bits(dtype, shape):
    tensor = random_bits(dtype, shape, torch.Generator().manual_seed(1))
    restored = round_trip({"x": tensor})["x"]
    assert restored.dtype == dtype
    assert restored.shape == tensor.shape
    assert state_digest({"x": restored}) == state_digest({"x": tensor})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=5), TREES, max_size=5))
def test_any_tree_comes_back(state):
    restored = round_trip(state)
    assert types_of(restored) == types_of(state)
    assert state_digest(restored) == state_digest(state)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_views_of_one_storage_are_written_once_and_alias_again(data):
    base = torch.arange(64, dtype=torch.float32)
    views = {}
    for number in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, 60))
        length = data.draw(st.integers(1, 64 - start))
        step = data.draw(st.integers(1, 3))
        views[f"v{number}"] = base[start : start + length : step]
    flat = flatten(views)
    assert flat.layout.payload_bytes <= base.numel() * 4 + 16 * len(views)
    restored = round_trip(views)
    assert state_digest(restored) == state_digest(views)
    for name, view in views.items():
        with torch.no_grad():
            view.add_(1)
            restored[name].add_(1)
        assert state_digest(restored) == state_digest(views)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_where_a_state_lies_in_memory_leaves_no_trace_in_its_layout(data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=6))
    updated = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    tied = data.draw(st.integers(0, len(sizes) - 1))

    def lying(order):
        """The same tensors, in memory in this order: each has a storage of its own at the address it is given."""
        memory = bytearray(64 * len(sizes))
        tensors = [
            torch.frombuffer(memory, dtype=torch.float32, count=size, offset=64 * order[number]).fill_(number)
            for number, size in enumerate(sizes)
        ]
        found = {f"t{number}": tensor for number, tensor in enumerate(tensors)} | {"tied": tensors[tied]}
        if any(updated):
            given = [tensor for tensor, yes in zip(tensors, updated, strict=True) if yes]
            found["optimizer"] = torch.optim.SGD(given, lr=0.1)
        return found

    numbers = list(range(len(sizes)))
    one, other = lying(numbers), lying(data.draw(st.permutations(numbers)))
    flat, again = flatten(one), flatten(other)
    assert flat.layout.to_json() == again.layout.to_json()
    assert flat.layout.digest() == again.layout.digest()
    assert [bytes(block.numpy()) for block in flat.blocks] == [bytes(block.numpy()) for block in again.blocks]


def test_views_of_several_dtypes_at_odd_offsets():
    base = torch.arange(40, dtype=torch.uint8)
    state = {"odd": base[3:20], "wide": base[8:24].view(torch.float64), "whole": base}
    assert state_digest(round_trip(state)) == state_digest(state)
    del state["whole"]
    assert state_digest(round_trip(state)) == state_digest(state)


def test_tied_weights_are_stored_once():
    layer = torch.nn.Linear(16, 16, bias=False)
    tied = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(16, 16, bias=False))
    tied[2].weight = layer.weight
    flat = flatten({"model": tied})
    assert flat.layout.payload_bytes == 16 * 16 * 4
    tree = round_trip({"model": tied})["model"]
    assert tree["0.weight"].data_ptr() == tree["2.weight"].data_ptr()


def test_reallocated_parameter_is_seen():
    layer = torch.nn.Linear(2, 2)
    flatten({"model": layer})
    layer.weight.data = torch.full((2, 2), 7.0)
    assert round_trip({"model": layer})["model"]["weight"].eq(7).all()


def test_new_optimizer_keys_make_a_new_layout():
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    before = flatten({"model": layer, "optimizer": optimizer}).layout
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    after = flatten({"model": layer, "optimizer": optimizer}).layout
    assert before.digest() != after.digest()
    optimizer.step()
    again = flatten({"model": layer, "optimizer": optimizer}).layout
    assert again.digest() == after.digest(), "values alone must not change the structure's digest"


def test_only_what_optimizers_update_is_deferred():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[:2].parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    flat = flatten({"model": model, "optimizer": optimizer, "ema": [torch.ones(3)]})
    deferred = {block.data_ptr() for block in flat.blocks[: flat.layout.deferred_blocks]}
    assert model[0].weight.data_ptr() in deferred
    assert optimizer.state[model[0].weight]["exp_avg"].data_ptr() in deferred
    assert model[1].running_mean.data_ptr() not in deferred
    assert model[2].weight.data_ptr() not in deferred
    assert sum(block.numel() for block in flat.blocks) == flat.layout.payload_bytes


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (lambda: None, "function"),
        (object(), "object"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (np.array([object()]), "dtype"),
        (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value, word):
    with pytest.raises(StateError, match=r"state\.outer\.inner\[1\].*") as caught:
        flatten({"outer": {"inner": [0, value]}})
    assert word in str(caught.value)


def test_a_container_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(StateError, match="holds itself"):
        flatten({"loop": loop})


def test_counter_size_and_stateful_objects():
    class Part:
        def state_dict(self):
            return {"count": 3}

        def load_state_dict(self, state):
            self.loaded = state

    part = Part()
    tree = round_trip({"milestones": Counter({3: 1}), "size": torch.Size([2, 3]), "part": part, "deep": {"part": part}})
    assert type(tree["milestones"]) is Counter
    assert tree["size"] == torch.Size([2, 3])
    assert tree["part"] == {"count": 3}
    assert tree["deep"]["part"] == {"count": 3}


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"layout_version": 1}',
        b'{"layout_version":1,"block_bytes":[-1],"deferred_blocks":0,"tree":["n"]}',
    ],
)
def test_a_damaged_layout_is_refused(damage):
    with pytest.raises(CorruptCheckpoint, match="somewhere"):
        Layout.from_json(damage, "somewhere")


def test_another_layout_version_names_both():
    with pytest.raises(MismatchError, match=r"version 99.*version 1"):
        Layout.from_json(b'{"layout_version": 99}', "somewhere")


@pytest.mark.parametrize(
    "node",
    [
        ["T", 0, 0, "float32", [100], [1]],
        ["T", 0, 2, "float32", [1], [1]],
        ["T", 9, 0, "uint8", [1], [1]],
        ["?"],
        ["T", 0, 0, "nn", [1], [1]],
    ],
)
def test_a_layout_cannot_reach_outside_its_blocks(node):
    layout = Layout(["d", [[["s", "x"], node]]], (16,), 0)
    with pytest.raises(CorruptCheckpoint):
        unflatten(layout, [torch.zeros(16, dtype=torch.uint8)], "test")


def test_rng_round_trip_continues_every_generator():
    state = {"rng": RngState()}
    random.random(), np.random.rand(), torch.rand(1)
    tree = round_trip(state)
    expected = (random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.rand(3).tolist())
    apply_tree(state, tree, "test")
    assert (random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.rand(3).tolist()) == expected


def small_training(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "plain": {"step": 0, "buffer": torch.zeros(3)}, "note": "a"}


def train(state, steps):
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(4, 8).bfloat16()).sum().backward()
        state["optimizer"].step()
        state["plain"]["step"] += 1
        state["plain"]["buffer"] += 0.5


def test_apply_restores_in_place_to_the_bit():
    saved = small_training(0)
    train(saved, 3)
    saved["note"] = "b"
    # fp32 moments of bf16 parameters: Optimizer.load_state_dict would round them.
    for entry in saved["optimizer"].state.values():
        entry["momentum_buffer"] = entry["momentum_buffer"].float() + 1e-6
    live = small_training(1)
    pointers = [p.data_ptr() for p in live["model"].parameters()] + [live["plain"]["buffer"].data_ptr()]
    apply_tree(live, round_trip(saved), "test")
    assert state_digest(live) == state_digest(saved)
    assert pointers == [p.data_ptr() for p in live["model"].parameters()] + [live["plain"]["buffer"].data_ptr()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("note"), ["note"]),
        (lambda state: state.update(more=1), ["more"]),
        (lambda state: state.update(model=torch.nn.Linear(8, 8)), ["model"]),
        (lambda state: state["plain"].update(buffer=torch.zeros(4)), ["plain.buffer", "(3,)", "(4,)"]),
        (lambda state: state["plain"].update(buffer=torch.zeros(3).double()), ["float32", "float64"]),
        (lambda state: state.update(optimizer=torch.optim.SGD([torch.zeros(1)])), ["groups hold [6]", "[1]"]),
        (lambda state: state["model"].float(), ["bfloat16", "float32"]),
    ],
)
def test_apply_refuses_a_different_state_before_changing_anything(change, words):
    tree = round_trip(small_training(0))
    live = small_training(1)
    change(live)
    before = state_digest(live)
    with pytest.raises(MismatchError) as caught:
        apply_tree(live, tree, "file")
    for word in ["file", *words]:
        assert word in str(caught.value)
    assert state_digest(live) == before


def test_parts_in_lists_and_nested_mappings_are_restored_in_place():
    def make():
        models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        return {"models": {"a": models[0], "b": models[1]}, "optimizers": optimizers, "pair": (torch.zeros(2), 3)}

    saved, live = make(), make()
    for optimizer, model in zip(saved["optimizers"], saved["models"].values(), strict=True):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    saved["pair"][0].add_(1)
    kept = [live["models"]["a"], live["optimizers"][1], live["pair"][0]]
    apply_tree(live, round_trip(saved), "test")
    assert state_digest(live) == state_digest(saved)
    assert kept[0] is live["models"]["a"]
    assert kept[1] is live["optimizers"][1]
    assert kept[2] is live["pair"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["models"].update(c=torch.nn.Linear(1, 1)), ["models", "'c'"]),
        (lambda state: state["list"].append(torch.zeros(1)), ["list", "2 entries", "1 entries"]),
        (lambda state: state.update(pair=(torch.zeros(2), torch.zeros(1))), ["pair[1]", "a int"]),
    ],
)
def test_apply_refuses_nested_differences(change, words):
    def make():
        return {"models": {"a": torch.nn.Linear(2, 2)}, "list": [torch.zeros(1)], "pair": (torch.zeros(2), 3)}

    live = make()
    change(live)
    with pytest.raises(MismatchError) as caught:
        apply_tree(live, round_trip(make()), "file")
    for word in words:
        assert word in str(caught.value)


def test_changes_of_deferred_tensors_are_seen():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    state = {"layer": layer, "optimizer": optimizer, "other": torch.zeros(2)}
    flat = flatten(state)
    state["other"].add_(1)
    for number in range(flat.layout.deferred_blocks):
        flat.check_versions(number)
    with torch.no_grad():
        layer.weight.renorm_(2, 0, 0.1)
    with pytest.raises(StateError, match=r"state\.layer\.weight was changed"):
        for number in range(flat.layout.deferred_blocks):
            flat.check_versions(number)


def test_the_version_of_a_modules_state_dict_is_kept():
    class Newer(torch.nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            assert local_metadata.get("version") == 2, "taken for a state dict of an old version"
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    saved, fresh = Newer(2, 2), Newer(2, 2)
    flat = flatten({"model": saved})
    blocks = [block.clone() for block in flat.blocks]
    apply_tree({"model": fresh}, unflatten(flat.layout, blocks, "here"), "here")
    assert torch.equal(fresh.weight, saved.weight)


PAIR = "\ud83d\ude00"
HALVES = [PAIR[0], PAIR[1], PAIR[::-1], "\U0001f600" + PAIR[0]]


@pytest.mark.parametrize("text", [PAIR, f"x{PAIR}", f"{PAIR[0]}{PAIR}"])
def test_a_text_that_json_would_make_another_one_is_refused_by_its_path(text):
    """JSON writes two halves of a pair as it writes the character that they are, which is what comes back."""
    assert json.loads(json.dumps(text)) != text
    for value, path in (
        (text, "state.a.b"),
        ([0, (text,)], "state.a.b[1][0]"),
        ({text: 1}, "state.a.b"),
        ({(1, text): 1}, "state.a.b"),
        ({1, text}, "state.a.b{}"),
        (frozenset({(text,)}), "state.a.b{}[0]"),
        (OrderedDict(x=text), "state.a.b.x"),
    ):
        with pytest.raises(StateError, match=rf"^{re.escape(path)}.*surrogate pair"):
            flatten({"a": {"b": value}})
    with pytest.raises(StateError, match=r"^state: .*surrogate pair"):
        flatten({text: 1})


def test_halves_of_a_pair_that_make_none_come_back():
    state = {"x": HALVES, **dict.fromkeys(HALVES, 1), "set": set(HALVES)}
    layout = Layout.from_json(flatten(state).layout.to_json(), "here")
    assert unflatten(layout, [], "here") == state
