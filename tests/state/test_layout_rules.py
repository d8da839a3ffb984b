"""A layout that was read holds all that its readers rely on, whoever wrote it."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import CorruptCheckpoint, StateError
from lastgood.state import Layout, flatten, unflatten
from lastgood.state.layout import check_cost
from lastgood.state.layout_rules import MAX_DEPTH
from tests.storage.support.craft import dense, entries, layout_json, part

HUGE = 1 << 61
TENSOR = dense([4])


def complex_node(real, imaginary):
    return ["c", struct.pack(">d", real).hex(), struct.pack(">d", imaginary).hex()]


UNSOUND = {
    "no list": {"s": 1},
    "unknown tag": ["Q", 1],
    "tag that is no text": [["s"], 1],
    "too many items": ["n", 1],
    "bool as a number": ["b", 1],
    "number as a bool": ["i", True],
    "float with white space": ["f", "00 00000000000 0"],
    "short float": ["f", "00"],
    "odd digits": ["y", "abc"],
    "text as digits": ["Y", "zz"],
    "sizes of texts": ["S", ["1"]],
    "sizes beyond 64 bits": ["S", [1 << 70]],
    "list of one node": ["l", ["n"]],
    "set of lists": ["e", [["l", []]]],
    "set of a tuple of lists": ["E", [["t", [["l", []]]]]],
    "pair of three": ["d", [[["s", "a"], ["n"], ["n"]]]],
    "key that is a tensor": ["d", [[TENSOR, ["n"]]]],
    "keys of one hash": ["d", [[["i", n * ((1 << 61) - 1)], ["n"]] for n in range(1, 20_000)]],
    "keys of one hash, further in": ["d", [[["t", [["i", n * ((1 << 61) - 1)]]], ["n"]] for n in range(1, 5000)]],
    "a set of one hash": ["e", [["i", n * ((1 << 61) - 1)] for n in range(1, 20_000)]],
    "a set of complex numbers of one hash": ["e", [complex_node(-1_000_003.0 * n, n) for n in range(1, 2500)]],
    "a set of tuples of one hash": ["e", [["t", [complex_node(-1_000_003.0 * n, n)]] for n in range(1, 2500)]],
    "a set of sets of one hash": ["e", [["E", [complex_node(-1_000_003.0 * n, n)]] for n in range(1, 2500)]],
    "a set of numpy's of one hash": [
        "e",
        [["N", "<c16", np.complex128(complex(-1_000_003.0 * n, n)).tobytes().hex()] for n in range(1, 2500)],
    ],
    "key twice": ["d", [[["s", "a"], ["n"]], [["s", "a"], ["i", 1]]]],
    "key twice for Python": ["o", [[["i", 1], ["n"]], [["b", True], ["i", 1]]]],
    "module of torch as a dtype": ["D", "nn"],
    "function of torch as a dtype": ["T", 0, 0, "load", [4], [1]],
    "quantised": ["T", 0, 0, "qint8", [4], [1]],
    "no device": ["V", "nowhere"],
    "numpy object": ["N", "|O", "00" * 8],
    "numpy fields": ["A", 0, 0, "i4,i4", [1]],
    "numpy scalar of too few bytes": ["N", "<f8", "00"],
    "block of none": ["T", 7, 0, "float32", [4], [1]],
    "block from the end": ["T", -1, 0, "float32", [4], [1]],
    "block as a bool": ["T", False, 0, "float32", [4], [1]],
    "no elements in a block": ["T", 0, 0, "float32", [0], [1]],
    "behind its block": ["T", 0, 8, "float32", [4], [1]],
    "before its block": ["T", 0, -4, "float32", [4], [1]],
    "crooked offset": ["T", 0, 2, "float32", [2], [1]],
    "negative stride": ["T", 0, 8, "float32", [2], [-1]],
    "negative size": ["T", 0, 0, "float32", [-1], [1]],
    "strides that overflow": ["T", 0, 0, "float32", [5], [HUGE]],
    "elements that overflow": ["T", 0, 0, "float32", [HUGE, HUGE, 1 << 8], [0, 0, 0]],
    "empty that overflows": ["T", -1, 0, "float32", [HUGE, HUGE, 0], [1, 1, 1]],
    "sizes without strides": ["T", 0, 0, "float32", [2, 2], [1]],
    "dimensions": ["T", 0, 0, "float32", [1] * 65, [1] * 65],
    "array behind its block": ["A", 0, 4, "<f4", [4]],
    "array from the end": ["A", -1, 0, "<f4", [4]],
    "part of a list": part(["l", []], [4], [[[0, 4]]]),
    "part of a part": part(part(TENSOR, [4], [[[0, 4]]]), [4], [[[0, 4]]]),
    "runs outside of the whole": part(TENSOR, [8], [[[6, 4]]]),
    "runs that overlap": part(TENSOR, [8], [[[0, 2], [1, 2]]]),
    "runs out of order": part(TENSOR, [8], [[[4, 2], [0, 2]]]),
    "empty runs": part(TENSOR, [8], [[[0, 0], [0, 4]]]),
    "runs that are not the part's": part(TENSOR, [8], [[[0, 5]]]),
    "as many boxes as never end": part(
        ["T", 0, 0, "float32", [300, 300], [0, 0]], [900, 900], [[[3 * n, 1] for n in range(300)]] * 2
    ),
    "many parts of many boxes": [
        "l",
        [part(["T", 0, 0, "float32", [200, 200], [0, 0]], [600, 600], [[[3 * n, 1] for n in range(200)]] * 2)] * 2,
    ],
    "placement of no dimension": ["H", TENSOR, [4], [1], [2], None, [["S", 1]], [[[0, 4]]]],
    "placement of a kind that is none": ["H", TENSOR, [4], [1], [2], None, [["P"]], [[[0, 4]]]],
    "more placements than dimensions": ["H", TENSOR, [4], [1], [2], None, [["R"], ["R"]], [[[0, 4]]]],
    "names of another mesh": ["H", TENSOR, [4], [1], [2], ["a", "b"], [["R"]], [[[0, 4]]]],
    "rank that cannot be": ["R", -1, "float32", [4], [1]],
    "rank as a text": ["R", "0", "float32", [4], [1]],
    "elsewhere of a size that overflows": ["R", 0, "float32", [2], [HUGE * 2]],
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_node_is_refused_when_it_is_read(name):
    text = layout_json(entries(a=["l", [["n"], UNSOUND[name]]], b=TENSOR), [16])
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        Layout.from_json(text, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"tree": ["l", []]},
        {"tree": ["d", [[["i", 1], ["n"]]]]},
        {"tree": None},
        {"block_bytes": [True]},
        {"block_bytes": [1.5]},
        {"block_bytes": [1 << 62, 1 << 62]},
        {"deferred_blocks": 2},
        {"deferred_blocks": -1},
        {"deferred_blocks": False},
        {"layout_version": True},
        {"layout_version": 1, "tree": entries(a=part(TENSOR, [4], [[[0, 4]]]))},
        {"layout_version": 1, "tree": entries(a=["R", 0, "float32", [4], [1]])},
    ],
)
def test_an_unsound_layout_is_refused_when_it_is_read(changes):
    with pytest.raises(CorruptCheckpoint):
        Layout.from_json(layout_json(**{"tree": entries(a=TENSOR), "block_bytes": [16], **changes}), "here")


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_what_is_saved_can_be_read_again_up_to_the_deepest_that_is_saved():
    flat = flatten({"deep": nested(MAX_DEPTH)})
    layout = Layout.from_json(flat.layout.to_json(), "here")
    assert unflatten(layout, [], "here") == {"deep": nested(MAX_DEPTH)}
    with pytest.raises(StateError, match="deep"):
        flatten({"deep": nested(MAX_DEPTH + 1)})
    tree = ["n"]
    for _ in range(MAX_DEPTH + 1):
        tree = ["l", [tree]]
    with pytest.raises(CorruptCheckpoint, match="deep"):
        Layout.from_json(layout_json(entries(a=tree), []), "here")


def test_a_state_names_its_entries():
    with pytest.raises(StateError, match="names"):
        flatten({3: 1})


@pytest.mark.parametrize(
    "value", [np.str_(""), np.bytes_(b""), np.empty(3, dtype="<U0"), np.zeros((2, 0), dtype="<f4")]
)
def test_numpy_values_without_bytes_come_back(value):
    flat = flatten({"value": value})
    found = unflatten(Layout.from_json(flat.layout.to_json(), "here"), flat.blocks, "here")["value"]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape


def test_the_time_does_not_grow_with_the_square_of_equal_names():
    from lastgood.checkpointers.slots.contents import named_tensors

    depth = 13
    tree = dense([1])

    def split(words):
        """Every way to write one path of `words`: each dot inside a key, or between two."""
        if len(words) == 1:
            return [[words[0]]]
        rest = split(words[1:])
        return [[words[0], *one] for one in rest] + [[f"{words[0]}.{one[0]}", *one[1:]] for one in rest]

    root = {}
    for path in split(["a"] * depth):
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = None

    def node(value):
        return tree if value is None else ["d", [[["s", key], node(item)] for key, item in value.items()]]

    layout = Layout.from_json(layout_json(node(root), [4]), "here")
    names = [tensor.name for tensor in named_tensors(layout)]
    assert len(set(names)) == 1 << (depth - 1)


VALUES = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64, True, None, "", "float32", "<f4", "qint8", 0.5, -1]),
    st.sampled_from([[], {}, [[]], [0], ["n"], ["s", "a"], [["S", 0]], [[[0, 2], [2, 2]]]]),
)
STATE = {
    "model": {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3).bfloat16()[1:], "empty": torch.empty(0, 2)},
    "plain": [1, 2.5, 1j, "x", b"ab", bytearray(b"c"), {1, 2}, frozenset("a"), torch.Size([1]), (None, True)],
    "more": {3: np.arange(4), "np": np.float32(1), "dtype": torch.int8, "device": torch.device("cpu")},
}


def places(node, path=()):
    yield path
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from places(item, (*path, number))


@settings(max_examples=250)
@given(st.data())
def test_what_passes_can_be_built_and_described(data):
    """The rules are complete: no layout that they pass fails when a state is built of it."""
    from lastgood.checkpointers.slots.contents import find_sharing, named_tensors, named_values

    flat = flatten(STATE)
    document = json.loads(flat.layout.to_json())
    document["tree"][1].append([["s", "part"], part(dense([2], block=0), [4], [[[0, 2]]])])
    document["layout_version"] = 2
    for _ in range(data.draw(st.integers(1, 3))):
        spots = list(places(document["tree"]))
        spot = data.draw(st.sampled_from(spots[1:]))
        at = document["tree"]
        for number in spot[:-1]:
            at = at[number]
        at[spot[-1]] = copy.deepcopy(data.draw(VALUES))
    try:
        layout = Layout.from_json(json.dumps(document).encode(), "here")
    except CorruptCheckpoint:
        return
    blocks = [torch.zeros(size, dtype=torch.uint8) for size in layout.block_bytes]
    layout.digest()
    find_sharing(named_tensors(layout))
    named_values(layout)
    unflatten(layout, blocks, "here")


@pytest.mark.parametrize("written", [b'["l",[]],', b'[ "l",[]],', b'["l" ,[]],', b'["\\u006c",[]],'])
def test_plain_values_that_take_far_more_memory_than_their_file_has_are_not_read(written):
    """However they are written. Looked at before anything is made of the text, so that this costs nothing."""
    # Without the containers that are built of them they would pass.
    many = written * 250_000
    text = (
        b'{"layout_version":1,"deferred_blocks":0,"block_bytes":[],"tree":["d",[[["s","a"],["l",[%b["n"]]]]]]}' % many
    )
    with pytest.raises(CorruptCheckpoint, match="plain values"):
        Layout.from_json(text, "here")


@pytest.mark.parametrize("wide", ["\U0001f600".encode(), b"\\ud83d\\ude00", b'\\"\\ud83d\\ude00'])
def test_a_long_text_of_wide_characters_is_reckoned_with_four_bytes_for_each(wide):
    text = b'"' + wide + b"a" * (1 << 20) + b'"'
    check_cost(text, len(text))
    with pytest.raises(ValueError, match="plain values"):
        check_cost(text + b"[" * 930_000, len(text))
    check_cost(text.replace(wide, b"") + b"[" * 930_000, len(text))


def test_plain_values_that_take_far_more_memory_than_their_file_has_are_not_saved():
    layout = Layout(entries(a=["l", [["i", 1]] * 400_000]), (), 0)
    with pytest.raises(StateError, match="plain values"):
        layout.to_json()
    assert replace(layout, block_bytes=(1 << 28,)).to_json()
