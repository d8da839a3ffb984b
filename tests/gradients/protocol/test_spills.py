"""Spills of several shadows under skips, failures, broken connections, new starts and fences.

Rank 0's plan and the shadows' own part of it are the real ones; disks and messages are simulated. The oracle looks at
all disks at once, which nobody else can.
"""

from collections import deque

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.protocol.spills import SpillPlan, is_left_behind, retained
from lastgood.gradients.shadow.spill_state import SpillState

SLOTS = 3


class Disk:
    """One shadow: its disk, the spill that it writes, and the messages on the way from and to it."""

    def __init__(self):
        self.held = []
        self.spill = SpillState()
        self.incarnation = 0
        self.online = False
        self.heard, self.said = deque(), deque()
        self.writing = False

    def hear(self, iteration, keep, skips):
        self.spill.ask(iteration, keep)
        for one in self.spill.due(iteration):
            if skips or self.spill.iteration is not None:
                self.say(one, False)
            else:
                self.spill.begin(one, ())

    def begin_writing(self):
        """Slots are free again but for the one that stays; the one that is written into loses what it held."""
        kept = retained(self.held, self.spill.keep)
        self.held = [one for one in self.held if one == kept]
        assert len(self.held) < SLOTS
        self.writing = True

    def end_writing(self, durable):
        self.writing = False
        if durable:
            iteration = self.spill.iteration
            self.held.insert(0, Saved(epoch=self.incarnation, iteration=iteration, step=iteration))

    def say(self, iteration, durable):
        if self.online:
            self.said.append((iteration, durable))


class Spilling(RuleBasedStateMachine):
    @initialize(shadows=st.integers(2, 3))
    def begin(self, shadows):
        self.disks = [Disk() for _ in range(shadows)]
        self.iteration = 0
        self.incarnation = 0
        self.begins = {}
        self.best = None
        self.new_life(0, False)

    def common(self):
        return set(self.disks[0].held).intersection(*(disk.held for disk in self.disks))

    def newest(self):
        return max(self.common(), key=lambda one: (one.epoch, one.iteration), default=None)

    def connect(self, number):
        disk = self.disks[number]
        disk.online = True
        self.plan.connected(number, disk.held, disk.spill.open)

    @rule(back=st.integers(0, 6), chosen=st.booleans())
    def new_life(self, back, chosen):
        """Trainers died. Others fence, restore what all hold on their disks, or something in memory, and go on."""
        newest = self.newest()
        if chosen and newest is not None:
            restored = newest
        else:
            iteration = max(self.iteration - back, self.begins.get(self.incarnation, 0))
            restored = Saved(epoch=self.incarnation, iteration=iteration, step=iteration)
        self.iteration = restored.iteration
        self.incarnation += 1
        self.begins[self.incarnation] = self.iteration
        for disk in self.disks:
            disk.heard.clear()
            disk.said.clear()
            disk.online = False
            if disk.writing:
                disk.end_writing(False)  # of an incarnation that was fenced off
            disk.spill.fence()
            disk.spill.begin_incarnation(self.iteration)
            disk.incarnation = self.incarnation
            disk.held = [
                one for one in disk.held if not is_left_behind(one, self.incarnation, self.iteration, restored)
            ]
        self.best = self.newest()
        self.plan = SpillPlan(len(self.disks))
        for number in range(len(self.disks)):
            self.connect(number)

    @rule(iterations=st.integers(1, 3))
    def ask(self, iterations):
        self.iteration += iterations
        if self.plan.ready:
            keep = self.plan.ask(Saved(epoch=self.incarnation, iteration=self.iteration, step=self.iteration))
            for disk in self.disks:
                disk.heard.append((self.iteration, keep))

    @rule(number=st.integers(0, 2), skips=st.integers(0, 2))
    def deliver(self, number, skips):
        disk = self.disks[number % len(self.disks)]
        if disk.heard and disk.online:
            disk.hear(*disk.heard.popleft(), skips == 0)

    @rule(number=st.integers(0, 2), fails=st.integers(0, 3))
    def write(self, number, fails):
        disk = self.disks[number % len(self.disks)]
        if disk.writing:
            iteration = disk.spill.iteration
            disk.end_writing(fails > 0)
            disk.spill.end()
            disk.say(iteration, fails > 0)
        elif disk.spill.iteration is not None:
            disk.begin_writing()

    @rule(
        outcomes=st.lists(
            st.sampled_from(["good", "good", "good", "skips", "fails", "late", "silent"]), min_size=3, max_size=3
        )
    )
    def spill(self, outcomes):
        """All at once; with some of them it goes wrong, or takes longer, or its word does."""
        self.ask(1)
        for number, outcome in enumerate(outcomes[: len(self.disks)]):
            disk = self.disks[number]
            while disk.heard and disk.online:
                self.deliver(number, int(outcome != "skips"))
            while disk.spill.iteration is not None and outcome != "late":
                self.write(number, int(outcome != "fails"))
            while disk.said and disk.online and outcome != "silent":
                self.answer(number)

    @rule(number=st.integers(0, 2))
    def answer(self, number):
        number %= len(self.disks)
        if self.disks[number].said:
            self.plan.spilled(number, *self.disks[number].said.popleft())

    @rule(number=st.integers(0, 2), dies=st.booleans(), durable=st.booleans())
    def disconnect(self, number, dies, durable):
        number %= len(self.disks)
        disk = self.disks[number]
        if disk.online:
            disk.online = False
            disk.heard.clear()
            disk.said.clear()
            self.plan.disconnected(number)
        if dies:
            if disk.writing:
                disk.end_writing(durable)
            disk.spill = SpillState()

    @precondition(lambda self: not all(disk.online for disk in self.disks))
    @rule()
    def reconnect(self):
        for number, disk in enumerate(self.disks):
            if not disk.online:
                self.connect(number)

    @rule()
    def all_goes_well_for_a_while(self):
        """No skip is for ever: of the next two spills, one is common."""
        before = self.iteration
        for _ in range(2):
            self.reconnect()
            self.ask(1)
            for number, disk in enumerate(self.disks):
                while disk.heard:
                    self.deliver(number, 1)
                while disk.spill.iteration is not None:
                    self.write(number, 1)
                while disk.said:
                    self.answer(number)
        assert self.plan.common == self.newest()
        assert self.plan.common.iteration > before

    @invariant()
    def what_all_hold_is_never_overwritten_before_something_newer_is_held_by_all(self):
        newest = self.newest()
        if self.best is not None:
            assert newest is not None and (newest.epoch, newest.iteration) >= (self.best.epoch, self.best.iteration)
        self.best = newest

    @invariant()
    def nothing_of_a_life_that_was_left_is_held(self):
        for disk in self.disks:
            for one in disk.held:
                later = [begin for incarnation, begin in self.begins.items() if incarnation > one.epoch]
                assert all(one.iteration <= begin for begin in later)

    @invariant()
    def what_rank_0_takes_for_common_is(self):
        assert self.plan.common is None or self.plan.common in self.common()


Spilling.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSpilling = Spilling.TestCase
