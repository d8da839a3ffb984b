"""Engines whose ranks are joined by the exchange, over loopback."""

from __future__ import annotations

import functools

import torch

from lastgood.sparse.engine import Engine
from lastgood.sparse.exchange import Exchange
from lastgood.sparse.meeting import find_place_in
from tests.sparse.support.reference import Reference
from tests.sparse.support.thread_ranks import ThreadRanks, together
from tests.sparse.support.workers import bits, loss_of, make


class LinkedRanks(ThreadRanks):
    def open(self, layers, digest, timeout_s):
        place = find_place_in(self.meeting.store, self.rank, self.ranks, timeout_s, "127.0.0.1")
        return Exchange.open(layers, {"settings": digest}, place=place, timeout_s=timeout_s)


def test_training_over_links_is_that_of_the_reference():
    ranks, steps = 3, 5
    for staleness in (0, 1):
        plain, _ = make()
        reference = Reference(plain, ranks, 0.1)
        expected = [
            reference.step([functools.partial(loss_of, rank=rank, iteration=i) for rank in range(ranks)], staleness)
            for i in range(steps)
        ]

        def work(place, staleness=staleness):
            model, optimizer = make()
            engine = Engine(model, optimizer, 0.9, "topk", staleness, ranks=LinkedRanks(place.meeting, place.rank))
            losses = []
            for iteration in range(steps):
                loss = loss_of(model, place.rank, iteration)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            facts = engine.facts()["exchange"]
            engine.state_dict()
            engine.close()
            assert facts.sent_bytes > 0
            return losses, bits(model)

        for rank, (losses, weights) in enumerate(together(ranks, work)):
            assert losses == [row[rank] for row in expected]
            for name, value in bits(plain).items():
                assert torch.equal(weights[name], value), name
