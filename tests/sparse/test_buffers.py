"""Buffers of rank 0 come to the others: from the forward pass, and once more if the backward pass changes them."""

from __future__ import annotations

import pytest
import torch

from lastgood.errors import WaitTimeout
from lastgood.sparse.buffers import Buffers
from tests.sparse.support.thread_ranks import Meeting, ThreadRanks


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.tensor(seed),
        torch.rand(3, 4, generator=generator).t(),  # not contiguous
        torch.rand(1, generator=generator, dtype=torch.float64),
        torch.rand(5, generator=generator) > 0.5,
        torch.rand(2, generator=generator),
        torch.empty(0),
    ]


def made(timeout_s=20.0):
    meeting = Meeting(2)
    ranks = [ThreadRanks(meeting, rank) for rank in range(2)]
    held = [tensors(rank) for rank in range(2)]
    return meeting, ranks, held, [Buffers(one, own, timeout_s) for one, own in zip(ranks, held, strict=True)]


def equal(one, other):
    return all(torch.equal(own, theirs) for own, theirs in zip(one, other, strict=True))


def test_all_have_the_first_ranks():
    _, ranks, held, buffers = made()
    buffers[1].tell(0)  # begins to fetch before there is anything
    buffers[0].tell(0)
    for one in buffers:
        one.tell_again(0)
        one.hear(0)
    assert equal(*held) and equal(held[0], tensors(0))
    for one, own in zip(buffers, held, strict=True):
        one.tell(1)
        own[0].add_(7)  # as activations that are computed again
        one.tell_again(1)
    held[1][4].zero_()
    for one in buffers:
        one.hear(1)
    assert equal(*held) and int(held[1][0]) == 7
    for one in ranks:
        one.close()


def test_what_all_have_heard_is_forgotten():
    meeting, ranks, _, buffers = made()
    before = meeting.store.num_keys()
    for iteration in range(5):
        for one in buffers:
            one.tell(iteration)
            one.tell_again(iteration)
        for one in buffers:
            one.hear(iteration)
            one.forget(iteration - 1)
    assert meeting.store.num_keys() <= before + 2
    for one in ranks:
        one.close()


def test_a_first_rank_that_says_nothing_is_named():
    _, ranks, _, buffers = made(timeout_s=0.2)
    buffers[1].tell(3)
    buffers[1].tell_again(3)
    with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for 'buffers/3' of rank 0"):
        buffers[1].hear(3)
    ranks[1].close()
