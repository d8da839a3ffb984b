"""Which layers go together, and what is in flight when a training goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastgood.sparse import pipeline
from lastgood.sparse.engine import Engine
from lastgood.sparse.pipeline import group_layers
from tests.sparse.support.workers import bits, loss_of, make


@given(sizes=st.lists(st.integers(32, 5000), min_size=1, max_size=80), limit=st.integers(1, 20_000))
def test_groups_are_neighbours_and_none_is_larger_than_it_must_be(sizes, limit):
    groups = group_layers(sizes, limit)
    assert [number for group in groups for number in group] == list(range(len(sizes)))
    for group in groups:
        assert sum(sizes[number] for number in group[:-1]) < limit
    for group in groups[:-1]:
        assert sum(sizes[number] for number in group) >= limit


@pytest.mark.parametrize("group_bytes", [1, 400])
def test_what_is_in_flight_goes_on_in_other_groups(group_bytes, monkeypatch):
    """A checkpoint holds layers: what goes together may be something else when it is read."""

    def train(engine, model, first, last):
        for iteration in range(first, last):
            engine.backward(loss_of(model, 0, iteration))
            engine.step()

    model, optimizer = make()
    engine = Engine(model, optimizer, 0.9, "topk", 1)
    train(engine, model, 0, 3)
    held = copy.deepcopy((bits(model), optimizer.state_dict(), engine.state_dict()))
    train(engine, model, 3, 6)
    engine.finish()
    engine.close()
    monkeypatch.setattr(pipeline, "GROUP_BYTES", group_bytes)
    again, other = make()
    engine = Engine(again, other, 0.9, "topk", 1)
    for part, state in zip((again, other, engine), held, strict=True):
        part.load_state_dict(state)
    train(engine, again, 3, 6)
    engine.finish()
    engine.close()
    for name, value in bits(model).items():
        assert torch.equal(bits(again)[name], value), name
