"""Who writes what several ranks hold alike."""

from __future__ import annotations

import threading

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.ranks.replicated import Division, Item, assign, holders, without_blocks
from lastgood.checkpointers.slots.contents import named_tensors
from lastgood.errors import StateError, WaitTimeout
from lastgood.state import flatten

GROUPS = [(0, 1, 2), (0, 1), (3, 4, 5, 6)]
ITEMS = st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(GROUPS)), max_size=40).map(
    lambda found: [Item(f"item {number}", nbytes, group) for number, (nbytes, group) in enumerate(found)]
)


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.randoms())
def test_each_item_has_one_owner_and_loads_differ_by_one_item_at_most(items, random):
    owners = assign(items)
    assert set(owners) == {item.name for item in items}
    for group in GROUPS:
        own = [item for item in items if item.group == group]
        assert all(owners[item.name] in group for item in own)
        loads = [sum(item.nbytes for item in own if owners[item.name] == rank) for rank in group]
        assert max(loads) - min(loads) <= max((item.nbytes for item in own), default=0)
    shuffled = list(items)
    random.shuffle(shuffled)
    assert assign(shuffled) == owners


def test_bytes_are_spread_and_not_blocks():
    items = [Item("large", 10, (0, 1)), *(Item(f"small {number}", 1, (0, 1)) for number in range(10))]
    owners = assign(items)
    assert {name for name, owner in owners.items() if owner == owners["large"]} == {"large"}


def test_holders_of_a_part_are_those_along_the_replicated_dimensions():
    ranks = np.arange(8).reshape(2, 2, 2)
    assert holders(ranks, (1, 0, 1), (("R",), ("S", 0), ("R",))) == (0, 1, 4, 5)
    assert holders(ranks, (1, 0, 1), (("S", 0), ("S", 1), ("R",))) == (4, 5)


class Together:
    """Ranks in threads of one process."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.texts = [b""] * world_size

    def exchange(self, rank):
        together = self

        class Exchange:
            def gather(self, text):
                together.texts[rank] = text
                try:
                    together.barrier.wait(60)
                    found = list(together.texts)
                    together.barrier.wait(60)
                except threading.BrokenBarrierError:
                    raise WaitTimeout("the other rank did not come") from None
                return found

        return Exchange()

    def run(self, work):
        results = [None] * self.world_size

        def one(rank):
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        return results


def training(more=0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2 + more))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def divided(states, declared="ddp"):
    together = Together(len(states))

    def one(rank):
        division = Division(declared, rank, len(states), together.exchange(rank))
        return division.apply(flatten(states[rank]))

    return together.run(one)


def test_together_the_ranks_write_each_deferred_byte_once_and_all_else_each():
    states = [training(), training()]
    parts = divided(states)
    whole = flatten(states[0]).layout
    deferred = sum(whole.block_bytes[: whole.deferred_blocks])
    written = [sum(part.layout.block_bytes[: part.layout.deferred_blocks]) for part in parts]
    assert sum(written) == deferred
    assert abs(written[0] - written[1]) <= max(whole.block_bytes)
    for part in parts:
        assert sum(part.layout.block_bytes) - sum(part.layout.block_bytes[: part.layout.deferred_blocks]) == (
            whole.payload_bytes - deferred
        )
    named = [{tensor.name: tensor for tensor in named_tensors(part.layout)} for part in parts]
    for name, tensor in named[0].items():
        other = named[1][name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
        assert tensor.owner in (None, 1)
        assert other.owner in (None, 0)
        assert (tensor.owner is None) or (other.owner is None), "somebody writes it"


def test_ranks_that_hold_different_tensors_write_all_of_them():
    states = [training(), training(more=1)]
    parts = divided(states)
    assert [part.layout for part in parts] == [flatten(state).layout for state in states]


def test_a_rank_whose_others_do_not_come_writes_all():
    class Alone:
        def gather(self, text):
            raise WaitTimeout("nobody came")

    state = training()
    flat = Division("ddp", 0, 2, Alone()).apply(flatten(state))
    assert flat.layout == flatten(state).layout


def test_plain_tensors_are_each_rank_s_own_unless_they_are_declared_alike():
    states = [training(), training()]
    assert [part.layout for part in divided(states, "placements")] == [flatten(state).layout for state in states]


def test_what_is_declared_alike_and_is_not_is_refused_by_name():
    states = [training(), training()]
    with torch.no_grad():
        states[1]["model"][2].bias.add_(1)
    together = Together(2)
    found = together.run(
        lambda rank: Division("ddp", rank, 2, together.exchange(rank)).check_equal(flatten(states[rank]))
    )
    assert all(isinstance(error, StateError) and "[0, 1]" in str(error) for error in found)
    states[1] = training()
    assert together.run(
        lambda rank: Division("ddp", rank, 2, together.exchange(rank)).check_equal(flatten(states[rank]))
    ) == [None, None]


def test_a_layout_without_blocks_says_who_has_them():
    flat = flatten({"model": torch.nn.Linear(3, 2), "plain": torch.arange(3)})
    (weight,) = (tensor for tensor in named_tensors(flat.layout) if tensor.name == "model.weight")
    rest = without_blocks(flat, {weight.block: 4})
    tensors = {tensor.name: tensor for tensor in named_tensors(rest.layout)}
    assert len(rest.blocks) == len(flat.blocks) - 1
    assert {tensor.name: tensor.owner for tensor in tensors.values()} == {
        "model.weight": 4,
        "model.bias": None,
        "plain": None,
    }
    kept = tensors["plain"]
    assert bytes(rest.blocks[kept.block].numpy()) == bytes(torch.arange(3).view(torch.uint8).numpy())
