"""An engine that follows a controller: one setting for all ranks or for none, batches by size, and a restart."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lastgood import PCcheck
from lastgood.errors import ConfigError, MismatchError
from lastgood.sparse.control.following import AGREE_EVERY, energy_kept
from lastgood.sparse.control.portions import Portions, join_batches
from lastgood.sparse.engine import Engine
from lastgood.training.parallel import RankStream, SampleStream
from lastgood.workloads.base import BatchStream
from tests.sparse.support.heard import Heard, setting
from tests.sparse.support.reference import Reference
from tests.sparse.support.thread_ranks import together
from tests.sparse.support.workers import bits, loss_of, make

HOLDS = 4
"""Iterations after a setting could first be shown."""


class Rows(BatchStream):
    """Batches of six numbered rows."""

    def batch(self, index):
        rows = torch.arange(6 * index, 6 * index + 6)
        generator = torch.Generator().manual_seed(index)
        return {"row": rows, "x": torch.randn(6, 5, generator=generator), "y": torch.randn(6, 2, generator=generator)}


def follow(place, data, telemetry, steps, model, **options):
    """Train a linear model; returns what it was given, and the engine's state at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"compression": 0.5, "compressor": "none", "staleness": 0, "least_compression": 0.0, **options}
    with contextlib.closing(Engine(model, optimizer, telemetry=telemetry, ranks=place, **options)) as engine:
        rows, held = [], []
        for batch in itertools.islice(engine.batches(data), steps):
            engine.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]))
            held.append(engine.facts()["setting"])
            assert engine.step()
            rows.append(batch["row"].tolist())
        return rows, held, engine.state_dict()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_a_setting_holds_for_all_ranks_or_for_none(data):
    """Each rank hears of some settings, late, twice, or never."""
    known = [setting(number, (2 + number, 3), 0.5) for number in range(1, 4)]
    steps = 4 * AGREE_EVERY
    heard_at = [
        {one.number: data.draw(st.integers(0, steps + 20), label=f"rank {rank} hears of {one.number}") for one in known}
        for rank in range(2)
    ]

    class Late(Heard):
        def __init__(self, rank):
            super().__init__()
            self.rank, self.iteration = rank, 0

        def tell(self, measured):
            self.iteration = measured.iteration + 1

        def heard(self):
            return [one for one in known if heard_at[self.rank][one.number] <= self.iteration]

    def work(place):
        torch.manual_seed(0)
        stream = SampleStream(Rows(), place.rank, 2)
        rows, held, _ = follow(place, stream, Late(place.rank), steps, nn.Linear(5, 2))
        return rows, [None if one is None else one.number for one in held]

    (first, numbers), (second, others) = together(2, work)
    assert numbers == others
    expected = []
    newest = None
    for iteration in range(steps):
        if iteration % AGREE_EVERY == HOLDS:
            shown_at = iteration - HOLDS
            both = [one.number for one in known if max(heard_at[r][one.number] for r in range(2)) <= shown_at]
            newest = max([newest or 0, *both]) or None
        expected.append(newest)
    assert numbers == expected
    # No sample is left out, and none comes twice.
    together_rows = [sorted(one + other) for one, other in zip(first, second, strict=True)]
    assert list(itertools.chain(*together_rows)) == list(range(sum(map(len, together_rows))))


def test_every_sample_counts_alike_whatever_the_batches_are():
    """As one training on all ranks' samples together."""
    torch.manual_seed(1)
    start = nn.Linear(5, 2)
    sizes, steps = (4, 1, 7), 14

    def work(place):
        model = copy.deepcopy(start)
        stream = SampleStream(Rows(), place.rank, 3)
        rows, held, _ = follow(place, stream, Heard(setting(1, sizes, 0.5)), steps, model)
        return rows, bits(model), sum(one is not None for one in held)

    found = together(3, work)
    assert [one[2] for one in found] == [steps - HOLDS] * 3
    plain = copy.deepcopy(start)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    place, source = 0, Rows()
    for iteration in range(steps):
        count = 18 if iteration < HOLDS else sum(sizes)
        batches = [source.batch(number) for number in range(place // 6, (place + count - 1) // 6 + 1)]
        joined = join_batches(batches)
        begin = place % 6
        optimizer.zero_grad()
        given_rows = joined["x"][begin : begin + count], joined["y"][begin : begin + count]
        nn.functional.mse_loss(plain(given_rows[0]), given_rows[1]).backward()
        optimizer.step()
        place += count
    assert [len(rows[-1]) for rows, _, _ in found] == list(sizes)
    for _, weights, _ in found:
        for name, value in weights.items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 1])
def test_another_compression_is_followed_to_the_bit_also_after_a_restart(staleness):
    steps, saved_at = 20, 13
    plain, _ = make()
    reference = Reference(plain, 2, 0.1)
    expected = []
    for iteration in range(steps):
        reference.share = 0.1 if iteration < HOLDS else 0.4
        losses = [functools.partial(loss_of, rank=rank, iteration=iteration) for rank in range(2)]
        expected.append(reference.step(losses, staleness))

    def train(place, first, last, state):
        model, optimizer = make()
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        told = Heard(*[setting(1, (9, 9), 0.6)] if state is None else ())
        options = {"telemetry": told, "least_compression": 0.5, "ranks": place}
        with contextlib.closing(Engine(model, optimizer, 0.9, "topk", staleness, **options)) as engine:
            if state is not None:
                engine.load_state_dict(state["engine"])
            losses = []
            for iteration in range(first, last):
                loss = loss_of(model, place.rank, iteration)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}
            return losses, copy.deepcopy(parts)

    begun = together(2, lambda place: train(place, 0, saved_at, None))
    ended = together(2, lambda place: train(place, saved_at, steps, begun[place.rank][1]))
    for rank in range(2):
        assert begun[rank][0] + ended[rank][0] == [row[rank] for row in expected]
        assert begun[rank][1]["engine"]["following"]["setting"]["number"] == 1
        for name, value in ended[rank][1]["model"].items():
            assert torch.equal(value, plain.state_dict()[name])
        payloads = [one[rank][1]["engine"]["in_flight"] for one in (begun, ended)]
        if staleness:  # room is kept for the least compression, so a checkpoint's size does not change
            assert payloads[0]["payload"].shape == payloads[1]["payload"].shape


def test_no_engine_goes_below_its_least_compression_nor_takes_a_batch_of_none():
    def work(place):
        told = Heard(setting(1, (2, 2), 0.89), setting(2, (0, 4), 0.95))
        rows, held, _ = follow(
            place,
            SampleStream(Rows(), place.rank, 2),
            told,
            9,
            nn.Linear(5, 2),
            compression=0.99,
            least_compression=0.9,
        )
        return rows, held

    for rows, held in together(2, work):
        assert held == [None] * 9 and all(len(one) == 6 for one in rows)


def test_a_setting_that_another_engine_cannot_keep_is_refused():
    def state(place, least):
        told = Heard(setting(1, (3,), 0.5))
        return follow(place, Rows(), told, 6, nn.Linear(5, 2), compressor="topk", least_compression=least)[2]

    (saved,) = together(1, lambda place: state(place, 0.5))
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = pytest.raises(MismatchError, match=r"compression 0\.5; here are 1, and the least compression is 0\.9")
    with contextlib.closing(Engine(model, optimizer, 0.9, "topk", 0, telemetry=Heard())) as engine, refused:
        engine.load_state_dict(saved)
    with contextlib.closing(Engine(model, optimizer, 0.9, "topk", 0)) as engine:
        engine.load_state_dict(saved)  # without telemetry it goes on as it is told itself
        assert engine.facts()["compression"] == 0.9


def test_what_is_left_of_a_batch_is_in_the_state():
    """An ordinary loader, whose batches are cut: a restart gives the samples that come next."""

    def rows_from(stream, state, steps):
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = Heard(*[setting(1, (5,), 0.95)] if state is None else ())
        with contextlib.closing(Engine(model, optimizer, 0.9, "topk", 1, telemetry=told)) as engine:
            if state is not None:
                engine.load_state_dict(copy.deepcopy(state))
            rows = []
            for batch in itertools.islice(engine.batches(iter(stream)), steps):
                engine.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]))
                engine.step()
                rows += batch["row"].tolist()
            return rows, engine.state_dict()

    once, _ = rows_from(Rows(), None, 12)
    assert once == list(range(4 * 6 + 8 * 5))
    stream = Rows()
    first, state = rows_from(stream, None, 7)
    stream_again = Rows()
    stream_again.load_state_dict(stream.state_dict())
    again, _ = rows_from(stream_again, state, 5)
    assert first + again == once


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=8), st.lists(st.integers(1, 7) | st.none(), min_size=1, max_size=12))
def test_portions_are_the_samples_in_order(batches, wanted):
    total, first = sum(batches), 0
    data = []
    for count in batches:
        data.append((torch.arange(first, first + count), {"twice": torch.arange(first, first + count) * 2}, "text"))
        first += count
    portions, source, got = Portions(), iter(data), []
    for samples in wanted:
        try:
            rows, held, text = portions.take(source, samples)
        except StopIteration:
            assert samples is None or total - len(got) < samples
            break
        assert samples in (None, len(rows)) and text == "text"
        assert torch.equal(held["twice"], rows * 2)
        got += rows.tolist()
    assert got == list(range(len(got)))
    rest = []
    with contextlib.suppress(StopIteration):
        while True:
            rest += portions.take(source, None)[0].tolist()
    assert got + rest == list(range(total))


def test_shares_of_a_stream_are_those_of_equal_batches_until_sizes_are_given():
    for rank in range(2):
        plain, shared = RankStream(Rows(), rank, 2), SampleStream(Rows(), rank, 2)
        for _ in range(3):
            assert torch.equal(next(plain)["row"], shared.take_share(None)["row"])
        other = SampleStream(Rows(), rank, 2)
        other.load_state_dict(plain.state_dict())
        assert other.state_dict() == shared.state_dict() == {"samples": 36}
        assert shared.take_share((8, 1))["row"].tolist() == ([*range(36, 44)] if rank == 0 else [44])
        assert shared.take_share((8, 1))["row"].tolist() == ([*range(45, 53)] if rank == 0 else [53])


def test_energy_and_age_are_what_they_say():
    sent, residual = torch.tensor([3.0, -4.0]), torch.tensor([0.0, 1.0, -2.0, 2.0])
    kept, age = energy_kept([residual], [sent])
    assert kept == pytest.approx(25 / 34) and age == pytest.approx(5 / 7)
    assert energy_kept([torch.zeros(3)], [torch.zeros(0)]) is None


def test_a_residual_that_receives_a_constant_gradient_is_as_old_as_a_queue_says():
    """A tenth is sent in each iteration: in the mean an element waits for about (10 - 1) / 2 iterations."""
    told = Heard()

    def work(place):
        model = nn.Linear(100, 10, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {"telemetry": told, "ranks": place, "least_compression": 0.9}
        with contextlib.closing(Engine(model, optimizer, 0.9, "topk", 0, **options)) as engine:
            for batch in itertools.islice(engine.batches(itertools.repeat(torch.ones(4, 100))), 52):
                engine.backward(model(batch).sum())
                engine.step()

    together(1, work)
    measured = told.measured[51]
    assert measured.residual_age_iterations == pytest.approx(4.5, rel=0.15)
    assert [one.energy_kept is not None for one in told.measured].count(True) == 2


def test_what_is_told_fits_what_was_done():
    told = Heard()

    def work(place):
        follow(place, Rows(), told, 3, nn.Linear(5, 2), compression=0.75, least_compression=0.75)

    together(1, work)
    assert told.closed and (told.joined.rank, told.joined.ranks, told.joined.elements) == (0, 1, 12)
    assert [one.iteration for one in told.measured] == [0, 1, 2]
    for one in told.measured:
        assert one.samples == 6 and one.compression == 0.75 and one.setting_number == 0
        assert 0 < one.compute_s < 60 and 0 <= one.apply_s <= one.compute_s
        assert one.memory_room_bytes > one.memory_bytes > 0


def test_ranks_follow_or_do_not_together():
    def work(place):
        model, optimizer = make()
        told = Heard() if place.rank else None
        with pytest.raises(MismatchError, match="is 'telemetry=False', and that of rank 1 is 'telemetry=True'"):
            Engine(model, optimizer, telemetry=told, ranks=place)

    together(2, work)


@pytest.mark.parametrize("options", [{"least_compression": 0.5}, {"telemetry": Heard(), "least_compression": 0.995}])
def test_a_limit_that_cannot_be(options):
    model, optimizer = make()
    with pytest.raises(ConfigError, match="least_compression"):
        Engine(model, optimizer, 0.99, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_a_checkpoint_has_the_setting_and_the_place_in_the_data(tmp_path, shared):
    """A loader whose batches of 6 are cut into 5, or samples that ranks share: no sample is lost or comes twice."""
    rows = [{"row": torch.tensor(n), "x": torch.randn(5), "y": torch.randn(2)} for n in range(120)]

    def work(place, folder, steps, told):
        torch.manual_seed(2)
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = Engine(model, optimizer, 0.5, "topk", 1, telemetry=told, least_compression=0.2, ranks=place)
        checkpointer = PCcheck(folder, interval_steps=7)
        parts = {"model": model, "optimizer": optimizer, "engine": engine}
        if shared:
            data = SampleStream(Rows(), 0, 1)
            first = checkpointer.attach(**parts, stream=data)
        else:
            loader = torch.utils.data.DataLoader(rows, batch_size=6)
            first = checkpointer.attach(**parts, data=loader)
            data = checkpointer.data
        seen, losses = [], []
        for batch in itertools.islice(engine.batches(data), steps - first):
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            engine.backward(loss)
            engine.step()
            checkpointer.step()
            seen.append(batch["row"].tolist())
            losses.append(float(loss.detach()))
        checkpointer.drain(30)
        held = engine.facts()["setting"]
        checkpointer.close()
        engine.close()
        return seen, losses, held

    def run(folder, steps, told):
        return together(1, lambda place: work(place, tmp_path / folder, steps, told))[0]

    first = setting(1, (5,), 0.3)
    seen, losses, _ = run("once", 15, Heard(first))
    run("twice", 9, Heard(first))
    again, more, held = run("twice", 15, Heard())
    assert held == first and list(map(len, seen)) == [6] * HOLDS + [5] * 11
    assert again == seen[7:] and more == losses[7:]
    assert list(itertools.chain(*seen)) == list(range(4 * 6 + 11 * 5))
