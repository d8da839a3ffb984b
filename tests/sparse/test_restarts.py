"""Restarts at any place of a training, any number of times: a property of the engine's state alone."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.sparse.engine import Engine
from tests.sparse.support.thread_ranks import Meeting, ThreadRanks, together
from tests.sparse.support.workers import bits, loss_of, make

OPTIONS = st.fixed_dictionaries(
    {
        "compressor": st.sampled_from(["topk", "threshold", "v16", "randomk", "none"]),
        "staleness": st.sampled_from([0, 1]),
        "mode": st.sampled_from(["plain", "lazy"]),
        "values": st.sampled_from(["float32", "bfloat16"]),
    }
)
EVENTS = st.lists(st.sampled_from(["step", "step", "restart", "finish"]), min_size=4, max_size=9)


def play(events, adam, options, restarts):
    """Losses and weights of two ranks; without `restarts` those are left out."""
    meetings = [Meeting(2) for _ in range(len(events) + 1)]  # a restart is a new job

    def work(place):
        def begin(number):
            model, optimizer = make(adam)
            return model, Engine(model, optimizer, 0.9, ranks=ThreadRanks(meetings[number], place.rank), **options)

        model, engine = begin(0)
        losses, iteration = [], 0
        for number, event in enumerate(events, 1):
            if event == "step":
                loss = loss_of(model, place.rank, iteration)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
                iteration += 1
            elif event == "finish" and iteration:
                engine.finish()
            elif event == "restart" and restarts:
                parts = {"model": model, "optimizer": engine.optimizer, "engine": engine}
                saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
                engine.close()
                model, engine = begin(number)
                model.load_state_dict(saved["model"])
                engine.optimizer.load_state_dict(saved["optimizer"])
                engine.load_state_dict(saved["engine"])
        engine.finish()
        state = engine.state_dict()
        engine.close()
        return losses, bits(model), {name: one["residual"] for name, one in state["layers"].items()}

    return together(2, work, meetings[0])


@settings(max_examples=6, deadline=None)
@given(EVENTS, st.booleans(), OPTIONS)
def test_a_training_is_the_same_with_restarts_and_without(events, adam, options):
    whole, broken = (play(events, adam, options, restarts) for restarts in (False, True))
    for one, other in zip(whole, broken, strict=True):
        assert one[0] == other[0]
        for before, after in zip(one[1:], other[1:], strict=True):
            for name, value in before.items():
                assert torch.equal(value, after[name]), name
