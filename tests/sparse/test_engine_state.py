"""What a checkpoint holds of an engine: blocks in flight, other numbers of ranks, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError
from lastgood.sparse.blocks import SparseGradient, dense
from lastgood.sparse.compressors import keep_count, make_compressor
from lastgood.sparse.engine import Engine
from lastgood.sparse.engine_state import LayerShape, most_bytes, pack, spread, spread_velocities, unpack
from tests.sparse.support.reference import Reference
from tests.sparse.support.thread_ranks import together
from tests.sparse.support.workers import bits, loss_of, make


def block(elements, indices, values=None, finite=True):
    values = torch.randn(len(indices)) if values is None else values
    return SparseGradient(elements, 1, np.array(indices, np.uint32), values, finite)


SHAPES = [LayerShape("first", 10, 100), LayerShape("second", 33, 200)]


def test_blocks_in_flight_come_back():
    blocks = {1: [block(33, [0, 32]), block(33, []), block(33, [], finite=False)]}
    held = pack(blocks, SHAPES, 3)
    assert held["payload"].numel() == 3 * 300
    found = unpack(held, SHAPES, "here")
    assert found.keys() == {1}
    for one, other in zip(found[1], blocks[1], strict=True):
        assert one.finite == other.finite
        assert torch.equal(dense(one), dense(other))
    assert unpack(pack({}, SHAPES, 3), SHAPES, "here") == {}
    full = pack({0: blocks[1][:0], **blocks}, SHAPES, 3)
    assert full["table"].shape == held["table"].shape  # the layout of a checkpoint does not change
    assert full["payload"].shape == held["payload"].shape


def test_damaged_blocks_are_refused():
    held = pack({1: [block(33, [0, 32])]}, SHAPES, 1)
    for length in (1, -5, 10**12):
        table = torch.tensor([[0], [length]])
        with pytest.raises(CorruptCheckpoint, match="here: what is in flight of second"):
            unpack({**held, "table": table}, SHAPES, "here")
    held["payload"][0] ^= 1
    with pytest.raises(CorruptCheckpoint, match="here: what is in flight of second"):
        unpack(held, SHAPES, "here")


@pytest.mark.parametrize("name", ["topk", "threshold", "v16", "randomk", "none"])
@pytest.mark.parametrize("elements", [1, 17, 1000])
def test_no_block_is_longer_than_its_place(name, elements):
    compressor = make_compressor(name, elements)
    count = keep_count(elements, 0.9, 2)
    shape = LayerShape("layer", elements, most_bytes(compressor, count, 4))
    for _ in range(20):
        sparse = compressor.compress(torch.randn(elements), torch.zeros(elements), count)
        pack({0: [sparse]}, [shape], 1)  # or it would not go in


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 1), (1, 2)])
def test_residuals_of_other_ranks_add_up_to_the_old_ones_times_new_to_old(before, after):
    residuals = [{shape.name: torch.randn(shape.elements) for shape in SHAPES} for _ in range(before)]
    flying = {1: [block(33, [3 * rank, 32]) for rank in range(before)]}
    states = [
        {
            "in_flight": pack(flying, SHAPES, before),
            "layers": {name: {"residual": value} for name, value in residuals[rank].items()},
        }
        for rank in range(before)
    ]
    found = [spread(states, SHAPES, rank, after, "there") for rank in range(after)]
    for shape in SHAPES:
        total = sum(one[shape.name] for one in residuals)
        if shape.name == "second":
            total = total + sum(dense(one) for one in flying[1])
        assert torch.allclose(sum(one[shape.name] for one in found), total * after / before, atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 1])
def test_three_ranks_go_on_as_two(tmp_path, staleness):
    job, steps = tmp_path / "three", 4

    def three(place):
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "topk", staleness, ranks=place)
        checkpointer = PCcheck(
            rank_directory(job, place.rank), interval_steps=steps, rank=place.rank, world_size=3, control="off"
        )
        checkpointer.attach(model=model, optimizer=engine.optimizer, engine=engine)
        for iteration in range(steps):
            engine.backward(loss_of(model, place.rank, iteration))
            if engine.step():
                checkpointer.step()
        checkpointer.drain(60)
        state = engine.state_dict()
        checkpointer.close()
        engine.close()
        flying = {} if not staleness else unpack(state["in_flight"], engine._pipeline.shapes, "here")
        left = {name: one["residual"].clone() for name, one in state["layers"].items()}
        for number, blocks in flying.items():
            left[engine._pipeline.shapes[number].name] += dense(blocks[place.rank])
        return left, bits(model)

    def two(place):
        model, optimizer = make()
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        engine = Engine(model, optimizer, 0.9, "topk", staleness, ranks=place)
        checkpointer = PCcheck(
            rank_directory(tmp_path / "two", place.rank),
            interval_steps=steps,
            rank=place.rank,
            world_size=2,
            control="off",
            resume_from=str(job),
        )
        assert checkpointer.attach(model=model, optimizer=engine.optimizer, engine=engine) == steps
        began = bits(model)
        left = {name: one["residual"].clone() for name, one in engine.state_dict()["layers"].items()}
        moments = {
            name: optimizer.state[one]["momentum_buffer"].clone()
            for name, one in model.named_parameters()
            if one in optimizer.state
        }
        losses = []
        for iteration in range(steps, 2 * steps):
            loss = loss_of(model, place.rank, iteration)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.finish()
        checkpointer.close()
        engine.close()
        return began, left, moments, losses, bits(model)

    before = together(3, three)
    after = together(2, two)
    for began, _, _, _, _ in after:
        for name, value in before[0][1].items():
            assert torch.equal(began[name], value), name
    for name in before[0][0]:
        total = sum(left[name] for left, _ in before)
        assert torch.allclose(sum(left[name] for _, left, _, _, _ in after), total * 2 / 3, atol=1e-6), name

    # They go on as two ranks of the reference that have these weights, residuals and moments.
    plain, _ = make()
    plain.load_state_dict(after[0][0])
    reference = Reference(plain, 2, 0.1)
    for rank, (_, left, moments, _, _) in enumerate(after):
        reference.residuals[rank].update(left)
        for name, value in moments.items():
            reference.moments[name][0] = value.flatten()
            reference.steps[name] = 1
    expected = [
        reference.step([lambda model, rank=rank, i=i: loss_of(model, rank, i) for rank in range(2)], staleness)
        for i in range(steps, 2 * steps)
    ]
    for rank, found in enumerate(after):
        assert found[3] == [row[rank] for row in expected]


def test_velocities_of_other_numbers_of_ranks_add_up_as_residuals_do():
    velocities = [torch.randn(10) for _ in range(3)]
    states = [{"layers": {"first": {"velocity": {"velocity": one}}, "second": {}}} for one in velocities]
    found = [spread_velocities(states, SHAPES, rank, 2) for rank in range(2)]
    assert all(one.keys() == {"first"} for one in found)
    torch.testing.assert_close(found[0]["first"] + found[1]["first"], sum(velocities) * 2 / 3)
    assert torch.equal(found[1]["first"], velocities[1] * (2 / 3))


def test_other_trainings_are_refused_by_name():
    model, optimizer = make()
    engine = Engine(model, optimizer, 0.9, "topk", 0)
    state = engine.state_dict()
    one_byte, lengths = torch.zeros(1, dtype=torch.uint8), torch.zeros(7, 1, dtype=torch.int64)
    for changed, said in (
        ({"format": 2}, "of format 2; this version reads format 1"),
        ({"settings": {**state["settings"], "compressor": "v16"}}, "compressor was 'v16' .* the engine has 'topk'"),
        ({"settings": {**state["settings"], "staleness": 1}}, "staleness was 1"),
        ({"rank": 1, "ranks": 2}, "that of rank 1 of 2, and this is rank 0 of 1"),
        ({"layers": dict(list(state["layers"].items())[:-1])}, "the checkpoint has 6 layers, and the model has 7"),
        ({"in_flight": {"table": lengths[:6], "payload": one_byte}}, r"are \(6, 1\) of torch.int64, and there are 7"),
        ({"in_flight": {"table": lengths.int(), "payload": one_byte}}, "of torch.int32"),
        ({"in_flight": {"table": lengths, "payload": one_byte.float()}}, "1-dimensional, of torch.float32"),
        (
            {"layers": {"other": state["layers"]["embedding.weight"]}},
            "a layer of the checkpoint is other with 414 elements, and here it is embedding.weight",
        ),
    ):
        with pytest.raises(MismatchError, match=re.compile(said)):
            engine.load_state_dict({**state, **changed})
    engine.load_state_dict(state)
    engine.backward(loss_of(model, 0, 0))
    engine.step()
    with pytest.raises(CheckpointError, match="before its first backward pass only"):
        engine.load_state_dict(state)
    engine.close()
