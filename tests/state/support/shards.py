"""Shapes, ways to cut them among ranks, and a plain twin of the cut."""

from __future__ import annotations

import torch
from hypothesis import strategies as st


def pieces(indices, count):
    """torch.chunk may give fewer pieces than asked for; the missing ones are empty, as DTensor has it."""
    found = list(torch.chunk(indices, count)) if len(indices) else []
    return found + [indices[:0]] * (count - len(found))


def twin(shape, mesh_shape, coordinate, placements):
    """The global indices of each dimension that a part covers."""
    indices = [torch.arange(size) for size in shape]
    for count, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement[0] == "S":
            indices[placement[1]] = pieces(indices[placement[1]], count)[at]
        elif placement[0] == "Z":
            cut = [pieces(piece, count)[at] for piece in pieces(indices[placement[1]], placement[2])]
            indices[placement[1]] = torch.cat(cut)
    return [index.tolist() for index in indices]


@st.composite
def cuts(draw, shape):
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = [st.just(("R",))]
    if shape:
        axis = st.integers(0, len(shape) - 1)
        kinds += [st.tuples(st.just("S"), axis), st.tuples(st.just("Z"), axis, st.integers(1, 4))]
    placements = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    return mesh_shape, placements


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
