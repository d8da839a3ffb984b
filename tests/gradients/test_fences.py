"""A fence that reaches two shadows one after the other, while the life that it ends still trains and decides.

The shadows' states and rank 0's conductor are the real ones; only what lies between them is simulated. Every order of
what may happen is tried: sends, words to rank 0, its decisions on their way, and the two fences.
"""

from collections import deque

from lastgood.gradients.conductor.conductor import Conductor, ConductorSettings
from lastgood.gradients.link.data_link import DataSettings
from lastgood.gradients.link.shadow_link import Identity
from lastgood.gradients.protocol.messages import Refused, Step, Welcome
from tests.gradients.support.simulated_shadow import BUCKETS, JOB, LAYOUT, RANKS, SLOTS, Shadow

LAST = 3
"""Iterations that the old life trains; the first one is complete and applied before anything else happens."""


class Anything:
    """No oracle of values is needed here."""

    def check_applied(self, shadow, iteration):
        pass


class Scene:
    """Two shadows and a rank 0, and what is on its way between them."""

    def __init__(self, path=()):
        self.durable = 0
        settings = ConductorSettings(30.0, 30.0, DataSettings(1 << 20, 1 << 16, 1.0, 1.0))
        identity = Identity(JOB, 1, 0, None, None)
        addresses = ["127.0.0.1:1", "127.0.0.1:2"]
        self.conductor = Conductor(identity, 0, addresses, b"x" * 32, settings, lambda bucket: True, self.settled)
        self.shadows = [Shadow(number) for number in range(2)]
        self.sent = [0, 0]
        self.fenced = [False, False]
        self.to_rank0 = [deque(), deque()]
        self.obeyed = [0, 0]
        for number, shadow in enumerate(self.shadows):
            shadow.state.fence(JOB, 1)
            shadow.state.declare(LAYOUT, BUCKETS[number], [number], RANKS, None)
            shadow.flow()
            for bucket in BUCKETS[number]:
                shadow.state.seed_begun(bucket, 0)
                shadow.flow()
                shadow.staged[bucket] = ()
                shadow.state.seed_landed(bucket)
                shadow.flow()
            welcome = Welcome(shadow=number, shadows=2, job=JOB, epoch=1, layout=LAYOUT, gradient_slots=SLOTS)
            self.conductor.connected(number, welcome)
            self.work(number)
            shadow.said.clear()
        for event in [*(("send", 0), ("send", 1)), *(("hear", 0), ("hear", 1)), *(("obey", 0), ("obey", 1)), *path]:
            getattr(self, event[0])(event[1])

    def settled(self, word):
        if word.promises(word.iteration):
            self.durable = max(self.durable, word.iteration)

    def possible(self):
        for number in range(2):
            if self.sent[number] < LAST:
                yield ("send", number)
            if self.to_rank0[number]:
                yield ("hear", number)
            if not self.fenced[number]:
                yield ("fence", number)
                if self.word(number) > self.obeyed[number]:
                    yield ("obey", number)

    def word(self, number):
        complete = self.conductor.links[number]._complete
        return 0 if complete is None else complete.iteration

    def send(self, number):
        """All of an iteration to one shadow; a fenced one takes nothing."""
        self.sent[number] += 1
        iteration = self.sent[number]
        if iteration > self.conductor._state.closed:
            self.conductor.closed(iteration)
        if self.fenced[number]:
            return
        shadow = self.shadows[number]
        shadow.state.step(Step(iteration=iteration, rule={}, saved=True, step=iteration))
        if shadow.state.side(number, iteration):
            shadow.sides.add(iteration)
        for bucket in BUCKETS[number]:
            shadow.gradient(bucket, iteration, iteration)
        shadow.flow()
        self.words(number)

    def words(self, number):
        said = self.shadows[number].said
        self.to_rank0[number].extend(one for one in said if one.kind == "have")
        said.clear()

    def hear(self, number):
        """The next word; behind the one of the fence the connection ends."""
        message = self.to_rank0[number].popleft()
        self.conductor.heard(number, message)
        if message.kind == "refused":
            self.conductor.disconnected(number, "it was closed")

    def obey(self, number):
        self.obeyed[number] = self.word(number)
        self.shadows[number].state.complete(self.conductor.links[number]._complete)
        self.shadows[number].flow()
        self.work(number)
        self.words(number)

    def work(self, number):
        while self.shadows[number].work(Anything()):
            pass

    def fence(self, number):
        self.fenced[number] = True
        self.shadows[number].state.fence(JOB, 2)
        self.shadows[number].flow()
        self.to_rank0[number].append(Refused(why="fenced off", fenced=2))

    def held(self):
        return [{one.iteration for one in shadow.state.held.restorable()} for shadow in self.shadows]

    def signature(self):
        state = self.conductor._state
        return (
            *self.sent, *self.fenced, *self.obeyed, *map(len, self.to_rank0), state.complete, state.lost, self.durable,
            *map(frozenset, self.held()), *(known.have for known in state.shadows), self.conductor.fenced is None,
        )  # fmt: skip


def test_whatever_the_order_of_two_fences_all_that_was_durable_is_held_by_both_shadows():
    seen, paths, ends = set(), deque([()]), 0
    while paths:
        path = paths.popleft()
        scene = Scene(path)
        if scene.signature() in seen:
            continue
        seen.add(scene.signature())
        if all(scene.fenced):
            ends += 1
            first, second = scene.held()
            assert first & second, f"nothing is held by both: {first}, {second}, after {path}"
            assert max(first & second) >= scene.durable, f"{scene.durable} was durable: {first}, {second}, after {path}"
        paths.extend((*path, event) for event in scene.possible())
    assert ends > 100
