"""Trees of every kind of leaf, and what is compared of them beside their values."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import torch
from hypothesis import strategies as st

from lastgood.state import (
    flatten,
    stateful_paths,
    unflatten,
)

DTYPES = [
    dtype
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
]


def random_bits(dtype, shape, generator):
    count = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=8),
    st.binary(max_size=8).map(bytearray),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3")]),
    st.sampled_from([np.float32(1.5), np.int64(-(2**60)), np.bool_(True), np.complex128(1 - 2j)]),
    st.builds(
        lambda dtype, shape, seed: random_bits(dtype, shape, torch.Generator().manual_seed(seed)),
        st.sampled_from(DTYPES),
        st.sampled_from([(), (0,), (4,), (2, 3)]),
        st.integers(0, 1000),
    ),
    st.builds(
        lambda kind, size: np.arange(size).astype(kind),
        st.sampled_from(["<i4", ">f8", "u1", "?", "<c8"]),
        st.integers(0, 5),
    ),
)


KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=2)))


TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.frozensets(st.integers(), max_size=3),
        st.sets(st.text(max_size=2), max_size=3),
    ),
    max_leaves=12,
)


def types_of(value):
    if isinstance(value, dict):
        return (type(value), [(repr(key), types_of(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [types_of(item) for item in value])
    return type(value)


def a_tree(state):
    flat = flatten(state)
    blocks = [block.clone() for block in flat.blocks]
    return unflatten(flat.layout, blocks, "here"), stateful_paths(flat.layout)
