"""Parameters that are stepped in a host copy: the engine is the plain reference, whose master is in host memory."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import nn

from lastgood import PCcheck
from lastgood.sparse import host_copies
from lastgood.sparse.engine import Engine
from tests.sparse.support.reference import Reference
from tests.sparse.support.thread_ranks import together
from tests.sparse.support.workers import make

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when cuBLAS starts
STEPS = 7


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_of(request, monkeypatch):
    """Where each rank's model is. On the CPU a copy is made of what could do without: only the streams are missing."""
    monkeypatch.setattr(host_copies, "needs_copy", lambda parameter: True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    count = torch.cuda.device_count() if request.param == "cuda" else 0
    yield lambda rank: f"cuda:{rank % count}" if count else "cpu"
    torch.use_deterministic_algorithms(before)


def loss_on(model, rank, iteration):
    """As `workers.loss_of`, of a model on any device."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    tokens = torch.randint(23, (2, 9), generator=generator).to(model.head.weight.device)
    return nn.functional.cross_entropy(model(tokens[0], detour=(iteration + rank) % 3 == 0), tokens[1])


class OnDevice:
    """A loss of a model in host memory: its twin computes it on a device, and gradients come back."""

    def __init__(self, model, twin, rank, iteration):
        self.model, self.twin = model, twin
        twin.load_state_dict(model.state_dict())
        twin.zero_grad(set_to_none=True)
        self.loss = loss_on(twin, rank, iteration)
        for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            mine.copy_(theirs)

    def backward(self):
        self.loss.backward()
        for mine, theirs in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.cpu()

    def detach(self):
        return self.loss.detach()


def train(engine, model, rank, first, last):
    losses = []
    for iteration in range(first, last):
        loss = loss_on(model, rank, iteration)
        engine.backward(loss)
        assert engine.step()
        losses.append(float(loss.detach()))
    return losses


def bits(model):
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("adam", [False, True])
def test_training_is_that_of_a_master_in_host_memory(adam, staleness, device_of):
    plain, _ = make()
    twins = [make()[0].to(device_of(rank)) for rank in range(2)]
    reference = Reference(plain, 2, 0.1, adam=adam)
    expected = [
        reference.step(
            [functools.partial(OnDevice, twin=twins[rank], rank=rank, iteration=iteration) for rank in range(2)],
            staleness,
        )
        for iteration in range(STEPS)
    ]

    def work(place):
        model, _ = make()
        model, optimizer = make(adam, model.to(device_of(place.rank)))
        engine = Engine(model, optimizer, 0.9, "topk", staleness, ranks=place)
        losses = train(engine, model, place.rank, 0, STEPS)
        residuals = {name: held["residual"].clone() for name, held in engine.state_dict()["layers"].items()}
        moments = {value.device.type for held in optimizer.state.values() for value in held.values()}
        engine.close()
        return losses, bits(model), residuals, moments

    for rank, (losses, weights, residuals, moments) in enumerate(together(2, work)):
        assert losses == [row[rank] for row in expected]
        same(weights, bits(plain))
        same(residuals, reference.residuals[rank])
        assert moments == {"cpu"}


@pytest.mark.parametrize("mode", ["plain", "lazy"])
def test_a_checkpoint_is_gone_on_from_to_the_bit(mode, device_of, tmp_path):
    def begin(at):
        model, _ = make()
        model, optimizer = make(True, model.to(device_of(0)))
        engine = Engine(model, optimizer, 0.9, "v16", 1, mode=mode)
        checkpointer = PCcheck(tmp_path, interval_steps=4, chunk_bytes=4096)
        assert checkpointer.attach(model=model, optimizer=optimizer, engine=engine) == at
        return model, engine, checkpointer

    def run(model, engine, checkpointer, first, last):
        losses = []
        for iteration in range(first, last):
            losses += train(engine, model, 0, iteration, iteration + 1)
            checkpointer.step()
            checkpointer.drain(60)
        return losses

    model, engine, checkpointer = begin(0)
    losses = run(model, engine, checkpointer, 0, 7)
    weights = bits(model)
    checkpointer.close()
    engine.close()
    model, engine, checkpointer = begin(4)
    assert run(model, engine, checkpointer, 4, 7) == losses[4:]
    same(bits(model), weights)
    checkpointer.close()
    engine.close()


def test_finish_before_the_first_step_and_changes_by_hand_keep_the_weights(device_of):
    model, _ = make()
    model, optimizer = make(model=model.to(device_of(0)))
    before = bits(model)
    engine = Engine(model, optimizer, compressor="none", staleness=0)
    engine.finish()
    same(bits(model), before)
    train(engine, model, 0, 0, 1)
    with torch.no_grad():
        model.sometimes.weight.fill_(3.0)  # no step of iteration 1 or 2 changes it
    train(engine, model, 0, 1, 3)
    assert torch.equal(model.sometimes.weight.cpu(), torch.full((18, 18), 3.0))
    with torch.no_grad():
        model.embedding.weight.fill_(0.5)
    train(engine, model, 0, 4, 5)
    assert (model.embedding.weight - 0.5).abs().max() < 0.4
    engine.close()
