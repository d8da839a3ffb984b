"""Suggestions of the sparse engine, followed to the letter."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from lastgood import PCcheck
from lastgood.sparse import Correction, Engine
from tests.suggestions.following import advice, follows, hear, refusal


def made(**options):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Engine(model, optimizer, **options)


def backward(engine, model, **given):
    engine.backward(model(torch.randn(2, 4, **given)).sum())


@pytest.fixture
def group():
    yield lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized():
        dist.destroy_process_group()


@follows("torch.distributed is not initialised; call")
def test_a_rank_without_a_group(group, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refusal(made)
    assert advice(message, r"call (torch\.distributed\.init_process_group)\(") == f"{dist.__name__}.init_process_group"
    monkeypatch.setenv("WORLD_SIZE", "1")  # the group of a test has one rank
    group()
    made()[2].close()


@follows("the sparse engine takes one process for each node so far; start one, as")
def test_two_processes_on_one_node(monkeypatch):
    import lastgood.sparse.ranks as ranks

    monkeypatch.setattr(ranks, "world_of_torch", lambda: (0, 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = refusal(ranks.ranks_of_torch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", advice(message, r"--nproc-per-node (\d+)"))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    assert ranks.ranks_of_torch().ranks == 2


@follows("takes the place of the optimizer's: give it SGD with")
def test_momentum_before_compression():
    model = nn.Linear(4, 3)

    def corrected(**numbers):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **numbers)
        return Engine(model, optimizer, correction=Correction(momentum=0.9))

    message = refusal(lambda: corrected(momentum=0.9))
    corrected(**eval(f"dict({advice(message, '(momentum=0)')})")).close()


@follows("staleness is 0 or 1, and partial needs 1", "choose first or own")
def test_settings_that_cannot_be():
    message = refusal(lambda: made(staleness=2))
    made(staleness=int(advice(message, r"staleness is 0 or (\d)")))[2].close()
    message = refusal(lambda: made(staleness=0, partial=True))
    made(staleness=int(advice(message, r"partial needs (\d)")), partial=True)[2].close()
    message = refusal(lambda: made(buffers="mine"))
    for word in advice(message, r"choose (.*)").split(" or "):
        made(buffers=word)[2].close()


@follows(
    "engine.backward() twice before engine.step()",
    "engine.step() without engine.backward(loss) before it",
    "call engine.step() instead of its step()",
)
def test_calls_in_another_order():
    model, optimizer, engine = made(staleness=0)
    message = refusal(optimizer.step)
    call = advice(message, r"call (engine\.step\(\))")
    hear(refusal(lambda: eval(call, {"engine": engine})))
    backward(engine, model)
    message = refusal(lambda: backward(engine, model))
    assert eval(call, {"engine": engine})
    losses = [model(torch.randn(2, 4)).sum() for _ in range(2)]
    engine.backward(sum(losses))  # "add the losses"
    assert engine.step()
    engine.close()
    option = advice(message, r"use (accumulate)=")
    model, _, engine = made(staleness=0, **{option: 2})
    for batch in engine.batches([torch.randn(4, 4)]):
        engine.backward(model(batch).mean())
        complete = engine.step()
    assert complete
    engine.close()


@follows("a part of a batch needs one engine.backward(loss)")
def test_a_part_that_is_left_out():
    model, _, engine = made(staleness=0, accumulate=2)
    batches = engine.batches([torch.randn(4, 4)])
    next(batches)
    message = refusal(lambda: next(batches))
    call = advice(message, r"engine\.backward\(loss\)")
    batches = engine.batches([torch.randn(4, 4)])
    for batch in batches:
        eval(call, {"engine": engine, "loss": model(batch).mean()})
        complete = engine.step()
    assert complete
    engine.close()


@follows("got a gradient twice in one backward pass")
def test_reentrant_activation_checkpointing():
    def loss(layer, **given):
        values = torch.randn(3, 4, requires_grad=True)
        for _ in range(2):
            values = torch.utils.checkpoint.checkpoint(layer, values, **given)
        return values.sum()

    for again in (False, True):
        layer = nn.Linear(4, 4)
        engine = Engine(layer, torch.optim.SGD(layer.parameters(), lr=0.1), staleness=0)
        with contextlib.closing(engine):
            if not again:
                message = refusal(lambda: engine.backward(loss(layer, use_reentrant=True)))  # noqa: B023
                continue
            engine.backward(loss(layer, **eval(f"dict({advice(message, 'use_reentrant=False')})")))
            assert engine.step()


@follows("make it dense, as")
def test_a_sparse_gradient():
    def step(**options):
        model = nn.Embedding(5, 4, **options)
        with contextlib.closing(Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), staleness=0)) as engine:
            engine.backward(model(torch.tensor([1])).sum())
            return engine.step()

    message = refusal(lambda: step(sparse=True))
    assert step(**eval(f"dict({advice(message, 'sparse=False')})"))


@follows("is not contiguous; make it so, as")
def test_a_parameter_that_is_not_contiguous():
    parameter = nn.Parameter(torch.randn(3, 2).t())
    model = nn.ParameterList([parameter])
    message = refusal(lambda: Engine(model, torch.optim.SGD([parameter], lr=0.1)))
    exec(advice(message, r"as (parameter\.data = .*)"), {"parameter": parameter})
    Engine(model, torch.optim.SGD([parameter], lr=0.1)).close()


@follows("whose residuals are in no attached part", "a sparse {} is attached and its {} is not")
def test_engine_and_optimizer_are_attached_together(tmp_path):
    model, optimizer, engine = made()
    for given, missing in (
        ({"optimizer": optimizer}, r"attach\(\.\.\., (engine=engine)\)"),
        ({"engine": engine}, r"attach\(\.\.\., (optimizer=engine\.optimizer)\)"),
    ):
        checkpointer = PCcheck(tmp_path, interval_steps=1)
        message = refusal(lambda: checkpointer.attach(model=model, **given))  # noqa: B023
        more = eval(f"dict({advice(message, missing)})", {"engine": engine})
        checkpointer.attach(model=model, **given, **more)
        checkpointer.close()
    engine.close()
