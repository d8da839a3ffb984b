"""The engine against a plain synchronous training, to the bit; and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from lastgood.errors import CheckpointError, ConfigError, MismatchError, StateError, WaitTimeout
from lastgood.sparse import pipeline
from lastgood.sparse.engine import Engine
from tests.sparse.support.reference import Reference
from tests.sparse.support.thread_ranks import Meeting, ThreadRanks, together
from tests.sparse.support.workers import PROTOTYPE, bits, loss_of, make

STEPS = 7


def train(engine, model, rank, first, last):
    losses = []
    for iteration in range(first, last):
        loss = loss_of(model, rank, iteration)
        engine.backward(loss)
        assert engine.step()
        losses.append(float(loss.detach()))
    return losses


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_is_that_of_the_reference(ranks, adam, staleness):
    plain, _ = make()
    reference = Reference(plain, ranks, 0.1, adam=adam)
    expected = [
        reference.step([functools.partial(loss_of, rank=rank, iteration=iteration) for rank in range(ranks)], staleness)
        for iteration in range(STEPS)
    ]

    def work(place):
        model, optimizer = make(adam)
        engine = Engine(model, optimizer, 0.9, "topk", staleness, ranks=place)
        losses = train(engine, model, place.rank, 0, STEPS)
        residuals = {name: held["residual"].clone() for name, held in engine.state_dict()["layers"].items()}
        engine.close()
        return losses, bits(model), residuals

    for rank, (losses, weights, residuals) in enumerate(together(ranks, work)):
        assert losses == [row[rank] for row in expected]
        assert_same(weights, bits(plain))
        assert_same(residuals, reference.residuals[rank])


@pytest.mark.parametrize("group_bytes", [1, 300])
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_goes_together_changes_no_bit(group_bytes, staleness, monkeypatch):
    def work(place):
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "topk", staleness, ranks=place)
        groups = engine._pipeline.groups
        losses = train(engine, model, place.rank, 0, STEPS)
        engine.finish()
        engine.close()
        return groups, losses, bits(model)

    expected = together(2, work)
    monkeypatch.setattr(pipeline, "GROUP_BYTES", group_bytes)
    for (one_group, losses, weights), (groups, *found) in zip(expected, together(2, work), strict=True):
        assert one_group == [range(7)] and len(groups) > 1
        assert found[0] == losses
        assert_same(found[1], weights)


def test_with_everything_sent_one_rank_trains_as_torch_does():
    """To the bit with SGD; torch's own Adam may take a square root that is off by its last bit."""
    for made, same in (
        (
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
            assert_same,
        ),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), torch.testing.assert_close),
    ):
        plain, _ = make()
        optimizer = made(plain)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss_of(plain, 0, iteration).backward()
            optimizer.step()
        model, _ = make()
        with contextlib.closing(Engine(model, made(model), compressor="none", staleness=0)) as engine:
            train(engine, model, 0, 0, STEPS)
        same(bits(model), bits(plain))


def test_all_ranks_begin_with_the_first_ones_weights():
    def work(place):
        model = copy.deepcopy(PROTOTYPE)
        with torch.no_grad():
            for one in model.parameters():
                one.add_(place.rank)
        model.norm.running_mean.add_(place.rank)
        with contextlib.closing(Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=place)):
            return bits(model)

    for found in together(3, work):
        assert_same(found, bits(PROTOTYPE))


def test_ranks_that_train_in_other_ways_are_named():
    def work(place):
        model, optimizer = make()
        with pytest.raises(
            MismatchError, match=r"line 0 of rank 0 is 'compressor=topk', and that of rank 1 is 'compressor=v16'"
        ):
            Engine(model, optimizer, compressor=["topk", "v16"][place.rank], ranks=place)

    together(2, work)


def test_a_rank_that_does_not_come_is_waited_for_and_named():
    meeting = Meeting(2)
    model, optimizer = make()
    with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for .*rank 1"):
        Engine(model, optimizer, timeout_s=0.2, ranks=ThreadRanks(meeting, 0))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_and_nothing_is_lost(staleness, caplog):
    bad = 2

    def work(place):
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "topk", staleness, ranks=place)
        train(engine, model, place.rank, 0, bad)
        engine.finish()
        before = bits(model)
        held = {name: one["residual"].clone() for name, one in engine.state_dict()["layers"].items()}
        loss = loss_of(model, place.rank, bad)
        model.head.weight.register_hook(lambda grad: grad * float("nan") if place.rank == 1 else grad)
        engine.backward(loss)
        gradient = model.head.weight.grad.clone()
        engine.step()
        engine.finish()
        state = engine.state_dict()["layers"]["embedding.weight"]
        engine.close()
        assert torch.equal(model.head.weight, before["head.weight"])
        assert engine.facts()["not_finite"] == {"embedding.weight": 1}
        assert not torch.equal(model.norm.weight, before["norm.weight"])  # the other layers went on
        expected = held["embedding.weight"]
        assert torch.equal(state["residual"], expected if place.rank else expected + gradient.flatten())

    together(2, work)
    assert "the gradient of embedding.weight was not finite in iteration 2; no rank applies it" in caplog.text


def test_steps_are_made_by_the_engine_alone():
    model, optimizer = make()
    engine = Engine(model, optimizer, staleness=0)
    with pytest.raises(CheckpointError, match=r"call engine\.step\(\) instead"):
        optimizer.step()
    with pytest.raises(CheckpointError, match=r"without engine\.backward"):
        engine.step()
    engine.backward(loss_of(model, 0, 0))
    with pytest.raises(CheckpointError, match="twice before"):
        engine.backward(loss_of(model, 0, 0))
    assert engine.step()
    engine.close()
    engine.close()
    with pytest.raises(CheckpointError, match="closed"):
        engine.backward(loss_of(model, 0, 0))


def test_schedulers_and_hooks_of_the_optimizer_work():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = Engine(model, optimizer, staleness=0)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(float(model.norm.weight.detach().sum())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in range(3):
            train(engine, model, 0, iteration, iteration + 1)
            scheduler.step()
            assert seen[-1] == float(model.norm.weight.detach().sum())  # the update was made when it was called
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert all(one.grad is None for one in model.parameters())
    engine.close()


def test_parts_of_a_batch_are_added_up():
    torch.manual_seed(1)
    data = [(torch.randn(7, 5), torch.randn(7, 2)) for _ in range(4)]
    plain = nn.Linear(5, 2)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for given, wanted in data:
        optimizer.zero_grad()
        for begin, end in ((0, 2), (2, 4), (4, 7)):
            (nn.functional.mse_loss(plain(given[begin:end]), wanted[begin:end]) * ((end - begin) / 7)).backward()
        optimizer.step()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), compressor="none", staleness=0, accumulate=3)
    complete = []
    for given, wanted in engine.batches(data):
        engine.backward(nn.functional.mse_loss(model(given), wanted))
        complete.append(engine.step())
        if not complete[-1]:
            with pytest.raises(StateError, match=r"save only if step\(\) returned True"):
                engine.state_dict()
    assert complete == [False, False, True] * 4
    assert_same(bits(model), bits(plain))
    with pytest.raises(CheckpointError, match=r"one engine\.backward"):
        list(engine.batches(data))
    engine.close()


def test_what_an_exchange_loses_changes_no_weight_and_is_in_no_checkpoint():
    def work(place):
        place.meeting.lost = (2, 0)
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "topk", 0, ranks=place)
        train(engine, model, place.rank, 0, 2)
        before = bits(model)
        engine.backward(loss_of(model, place.rank, 2))
        with pytest.raises(ConnectionError, match="rank 1 on there"):
            engine.step()
        for name, one in model.named_parameters():
            assert torch.equal(one, before[name])
        with pytest.raises(StateError, match="stopped in iteration 2: rank 1 on there"):
            engine.state_dict()
        with pytest.raises(CheckpointError, match="restart from a checkpoint: ConnectionError"):
            engine.step()
        engine.close()

    together(2, work)


def test_a_block_that_never_comes_is_waited_for_no_longer_than_said():
    def work(place):
        place.meeting.held = {(0, 0)}
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "topk", 0, ranks=place, timeout_s=0.2)
        engine.backward(loss_of(model, place.rank, 0))
        with pytest.raises(WaitTimeout, match=r"waited 0\.4 s for all ranks' blocks of iteration 0"):
            engine.step()
        engine.close()

    together(1, work)


@pytest.mark.parametrize(("held", "like"), [(False, 0), (True, 1)])
def test_partial_applies_what_has_arrived(held, like):
    def work(place, staleness, partial):
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "topk", staleness, partial=partial, ranks=place)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        losses = []
        for iteration in range(STEPS):
            if held and partial:
                place.meeting.release()
                place.meeting.held = {(iteration, layer) for layer in range(99)}
            losses += train(engine, model, 0, iteration, iteration + 1)
            scheduler.step()
        place.meeting.release()
        engine.finish()
        engine.close()
        return losses, bits(model), engine.facts()["early_share"]

    (expected,) = together(1, lambda place: work(place, like, False))
    (found,) = together(1, lambda place: work(place, 1, True))
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
    assert found[2] == (0 if held else 1)


def test_buffers_of_their_own():
    def work(place, buffers):
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "topk", 0, buffers=buffers, ranks=place)
        train(engine, model, place.rank, 0, 3)
        engine.close()
        return model.norm.running_mean.clone()

    first, second = together(2, lambda place: work(place, "first"))
    assert torch.equal(first, second)
    own, other = together(2, lambda place: work(place, "own"))
    assert torch.equal(first, own)
    assert not torch.equal(own, other)


def test_buffers_that_the_backward_pass_changes_are_those_of_the_first_rank_too():
    """Of activations that are computed once more, and counted again."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, values):
            return torch.utils.checkpoint.checkpoint(self.inner, values, use_reentrant=False)

    def work(place):
        torch.manual_seed(0)
        model = Twice()
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), 0.5, "topk", 0, ranks=place)
        generator = torch.Generator().manual_seed(place.rank)
        for _ in range(2):
            engine.backward(model(torch.randn(5, 4, generator=generator)).square().sum())
            engine.step()
        engine.close()
        return bits(model), int(model.inner[1].num_batches_tracked)

    (first, counted), (second, _) = together(2, work)
    assert counted == 4
    assert_same(first, second)


def test_a_gradient_that_comes_twice_is_refused():
    layer = nn.Linear(4, 4)

    def twice(values):
        for _ in range(2):
            values = torch.utils.checkpoint.checkpoint(layer, values, use_reentrant=True)
        return values

    engine = Engine(layer, torch.optim.SGD(layer.parameters(), lr=0.1), staleness=0)
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        engine.backward(twice(torch.randn(3, 4, requires_grad=True)).sum())
    engine.close()


def test_what_cannot_be_trained_is_refused_by_name():
    sparse = nn.Embedding(5, 4, sparse=True)
    engine = Engine(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1), staleness=0)
    with pytest.raises(ConfigError, match=r"weight has a gradient of layout torch\.sparse_coo"):
        engine.backward(sparse(torch.tensor([1])).sum())
    engine.close()
    model, optimizer = make()
    for given, said in (
        ({"staleness": 2}, "staleness is 0 or 1"),
        ({"staleness": 0, "partial": True}, "partial needs 1"),
        ({"buffers": "mine"}, "choose first or own"),
        ({"compression": 1.0}, "below 1"),
        ({"compressor": "zip"}, "no compressor 'zip'"),
        ({"accumulate": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            Engine(model, optimizer, **given)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="trains no parameter"):
        Engine(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))
    transposed = nn.Linear(3, 2)
    transposed.weight = nn.Parameter(torch.randn(3, 2).t())
    with pytest.raises(ConfigError, match="weight is not contiguous"):
        Engine(transposed, torch.optim.SGD(transposed.parameters(), lr=0.1))


def test_ranks_of_a_job_that_has_no_group_are_refused(monkeypatch):
    model, optimizer = make()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        Engine(model, optimizer)


def test_an_engine_that_is_dropped_leaves_nothing_behind():
    model, optimizer = make()
    engine = Engine(model, optimizer, staleness=0)
    train(engine, model, 0, 0, 1)
    seen, before = weakref.ref(engine), bits(model)
    engine.close()
    del engine
    gc.collect()
    assert seen() is None
    loss_of(model, 0, 1).backward()
    optimizer.step()
    assert not torch.equal(model.norm.weight, before["norm.weight"])


@pytest.mark.parametrize("change", ["unfrozen", "added"])
def test_a_parameter_that_came_later_is_refused(change):
    model, optimizer = make()
    if change == "added":
        optimizer = torch.optim.SGD([one for name, one in model.named_parameters() if name != "norm.bias"], lr=0.1)
    engine = Engine(model, optimizer, staleness=0)
    train(engine, model, 0, 0, 2)
    if change == "added":
        optimizer.add_param_group({"params": [model.norm.bias]})
    else:
        model.frozen.requires_grad_(True)
    before = bits(model)
    engine.backward(loss_of(model, 0, 2))
    with pytest.raises(ConfigError, match="make the engine after that change"):
        engine.step()
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name])
    engine.close()


@pytest.mark.parametrize("way", ["clipped", "replaced"])
def test_a_gradient_that_is_changed_after_it_has_left_is_refused(way):
    model, optimizer = make()
    engine = Engine(model, optimizer, staleness=0)
    engine.backward(loss_of(model, 0, 0))
    if way == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    else:
        model.norm.bias.grad = torch.zeros(18)
    with pytest.raises(ConfigError, match=r"was changed between engine\.backward\(\) and engine\.step\(\)"):
        engine.step()
    engine.close()
