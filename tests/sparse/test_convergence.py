"""What error feedback is for: digits, a small perceptron, two workers of 32, real engines.

Two trainings for each seed, some 6 s of one core each: one seed every day.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lastgood.sparse.engine import Engine
from tests.sparse.support.thread_ranks import together

RANKS, BATCH, STEPS = 2, 32, 528


@pytest.fixture(scope="module")
def digits():
    sklearn = pytest.importorskip("sklearn.datasets")
    values, labels = sklearn.load_digits(return_X_y=True)
    values, labels = torch.tensor(values / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [(values[part], labels[part]) for part in (order[:1437], order[1437:])]


def accuracy(digits, seed, compressor, compression, feedback):
    (values, labels), (held_values, held_labels) = digits
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    assert sum(one.numel() for one in model.parameters()) == 85_002
    generator = torch.Generator().manual_seed(1000 + seed)
    order = torch.cat([torch.randperm(1437, generator=generator)[:1408] for _ in range(STEPS * 64 // 1408)])
    batches = order.view(STEPS, RANKS, BATCH)
    models = [copy.deepcopy(model) for _ in range(RANKS)]

    def work(place):
        own = models[place.rank]
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
        engine = Engine(own, optimizer, compression, compressor, 0, error_feedback=feedback, ranks=place)
        for step in range(STEPS):
            chosen = batches[step, place.rank]
            engine.backward(nn.functional.cross_entropy(own(values[chosen]), labels[chosen]))
            engine.step()
        engine.finish()
        engine.close()

    together(RANKS, work)
    with torch.no_grad():
        return float((models[0](held_values).argmax(1) == held_labels).float().mean())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_error_feedback_makes_up_for_what_is_not_sent(digits, seed):
    one_in_a_thousand = [accuracy(digits, seed, "topk", 0.999, feedback) for feedback in (True, False)]
    assert one_in_a_thousand[0] >= 0.92
    assert one_in_a_thousand[1] <= 0.75


@pytest.mark.slow  # the same engine with another compressor
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_error_feedback_makes_up_for_blocks_that_are_not_sent(digits, seed):
    blocks = [accuracy(digits, seed, "v16", 0.99, feedback) for feedback in (True, False)]
    assert blocks[0] >= blocks[1] + 0.04
