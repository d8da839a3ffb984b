"""What rank 0 decides about shadows, against shadows that are simulated with all that can go wrong."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lastgood.gradients.conductor.state import ConductorState
from lastgood.gradients.protocol.messages import MAX_SPOILED, Complete

BUCKETS = 2


def decided(iteration: int, lost: tuple[int, ...], *, floor: int = 0, spoiled: tuple[int, ...] = ()) -> Complete:
    return Complete(iteration=iteration, lost=lost, floor=floor, spoiled=spoiled)


class SimulatedShadow:
    """What a shadow holds in truth. It says things in order; they arrive later, or not at all."""

    def __init__(self, number, base, slots):
        self.number = number
        self.slots = slots
        self.values = dict.fromkeys(range(BUCKETS), base)
        """None: torn or empty."""
        self.held = base
        """What it can be brought to, whatever is torn behind that; None: nothing."""
        self.floor = base
        self.connected = True
        self.said = deque()

    @property
    def wants(self):
        return {bucket for bucket, value in self.values.items() if value is None}

    def can_make(self, iteration):
        return self.held is not None and self.floor <= iteration <= self.held

    def receive(self, iteration, torn):
        for bucket in torn:
            self.values[bucket] = None
        if torn:
            self.say("torn", iteration, sorted(torn))
        if not self.wants:
            self.held = iteration
            self.say("have", iteration)

    def take_seed(self, bucket, iteration, newest):
        self.values[bucket] = iteration
        self.floor = max(self.floor, iteration)
        self.say("seeded", bucket, iteration)
        if not self.wants:
            # Gradients behind the seed have been arriving meanwhile.
            self.held = max(newest, iteration)
            self.say("have", self.held)

    def lose(self, bucket):
        """A comparison has found it to be another one than the trainer's."""
        self.values[bucket] = self.held = None
        self.say("diverged", bucket)

    def say(self, *message):
        if self.connected:
            self.said.append(message)


class Conducted(RuleBasedStateMachine):
    @initialize(shadows=st.integers(1, 3), slots=st.integers(2, 4), base=st.sampled_from([0, 7]))
    def begin(self, shadows, slots, base):
        self.state = ConductorState(shadows, base)
        self.base = base
        self.shadows = [SimulatedShadow(number, base, slots) for number in range(shadows)]
        for number in range(shadows):
            self.state.connected(number, (), slots)
            self.state.have(number, base)
        assert self.state.decide() == decided(base, ())
        self.complete = base
        self.newest = base
        self.seeds = deque()
        self.durable = []

    def decide(self):
        while (certificate := self.state.decide()) is not None:
            self.check(certificate)

    def check(self, certificate):
        assert certificate.iteration >= self.complete
        assert certificate.iteration <= self.newest
        for shadow in self.shadows:
            # A shadow that is not waited for may be anywhere; of the others nothing may be promised too early. One that
            # was torn, or has died, since it said so had it all the same, and its news is on its way.
            if shadow.number not in certificate.lost and not shadow.said and shadow.connected:
                assert shadow.held is not None and shadow.held >= certificate.iteration
                assert not shadow.wants or self.state.shadows[shadow.number].wants
        if not certificate.lost and certificate.iteration >= self.state.floor:
            if all(shadow.connected and not shadow.said for shadow in self.shadows):
                assert all(shadow.can_make(certificate.iteration) for shadow in self.shadows)
            self.durable.append(certificate.iteration)
        self.complete = certificate.iteration

    @rule(data=st.data())
    def train(self, data):
        self.newest += 1
        self.state.close_iteration(self.newest)
        for shadow in self.shadows:
            torn = set()
            if shadow.connected and data.draw(st.integers(0, 5)) == 0:
                torn = data.draw(st.sets(st.integers(0, BUCKETS - 1), min_size=1))
            if shadow.connected:
                shadow.receive(self.newest, torn)
        self.decide()

    @rule(number=st.integers(0, 2))
    def deliver(self, number):
        shadow = self.shadows[number % len(self.shadows)]
        if shadow.said:
            self._hear(shadow, shadow.said.popleft())
            self.decide()

    def _hear(self, shadow, message):
        kind, *what = message
        if kind == "have":
            self.state.have(shadow.number, *what)
        elif kind == "torn":
            self.state.torn(shadow.number, *what)
        elif kind == "diverged":
            self.state.diverged(shadow.number, *what)
        else:
            self.state.seeded(shadow.number, *what)

    @rule()
    def send_seeds(self):
        for shadow, bucket in self.state.wanted_seeds(lambda bucket: True):
            self.state.seeding(shadow, bucket, self.newest)
            self.seeds.append((shadow, bucket, self.newest))

    @precondition(lambda self: self.seeds)
    @rule()
    def a_seed_arrives(self):
        number, bucket, iteration = self.seeds.popleft()
        shadow = self.shadows[number]
        if shadow.connected:
            # With the slots it has, gradients behind the seed are all there only if it comes in time.
            if self.newest - iteration < shadow.slots:
                shadow.take_seed(bucket, iteration, self.newest)
            else:
                shadow.say("seeded", bucket, iteration)
                shadow.values[bucket], shadow.floor = None, max(shadow.floor, iteration)
                shadow.say("torn", iteration + 1, [bucket])

    @rule(number=st.integers(0, 2), dies=st.booleans())
    def disconnect(self, number, dies):
        shadow = self.shadows[number % len(self.shadows)]
        if shadow.connected:
            shadow.connected = False
            shadow.said.clear()
            self.seeds = deque(one for one in self.seeds if one[0] != shadow.number)
            if dies:
                shadow.values = dict.fromkeys(range(BUCKETS))
                shadow.held = None
            self.state.disconnected(shadow.number)
            self.decide()

    @rule(number=st.integers(0, 2))
    def reconnect(self, number):
        shadow = self.shadows[number % len(self.shadows)]
        if not shadow.connected:
            shadow.connected = True
            if shadow.held is None or self.newest > shadow.held:
                shadow.values = dict.fromkeys(range(BUCKETS))  # what it missed is missing for good
            self.state.connected(shadow.number, shadow.wants, shadow.slots)
            if shadow.held is not None:
                shadow.say("have", shadow.held)
            self.decide()

    @rule(number=st.integers(0, 2), bucket=st.integers(0, BUCKETS - 1))
    def diverge(self, number, bucket):
        shadow = self.shadows[number % len(self.shadows)]
        if shadow.connected and shadow.values[bucket] is not None:
            shadow.lose(bucket)

    @rule(number=st.integers(0, 2))
    def is_behind_for_too_long(self, number):
        number %= len(self.shadows)
        if self.state.lags(number):
            self.state.give_up(number)
            self.decide()

    @rule()
    def all_goes_well_for_a_while(self):
        """Then everything is complete again, and nobody is lost: no decision is for ever."""
        for number in range(len(self.shadows)):
            self.reconnect(number)
        for _ in range(4):
            self.send_seeds()
            while self.seeds:
                self.a_seed_arrives()
            for shadow in self.shadows:
                while shadow.said:
                    self._hear(shadow, shadow.said.popleft())
            self.decide()
        self.newest += 1
        self.state.close_iteration(self.newest)
        for shadow in self.shadows:
            shadow.receive(self.newest, set())
            while shadow.said:
                self._hear(shadow, shadow.said.popleft())
        self.decide()
        assert self.complete == self.newest
        assert self.state.lost == ()
        assert self.durable[-1] == self.newest

    @invariant()
    def never_beyond_the_training(self):
        assert self.base <= self.state.complete <= self.newest


Conducted.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestConducted = Conducted.TestCase


def connected(shadows=2, base=0, slots=4):
    state = ConductorState(shadows, base)
    for number in range(shadows):
        state.connected(number, (), slots)
        state.have(number, base)
    return state


def test_nothing_is_complete_before_every_shadow_holds_it():
    state = connected()
    state.decide()
    state.close_iteration(1)
    state.have(0, 1)
    assert state.decide() is None
    state.have(1, 1)
    assert state.decide().iteration == 1
    assert state.decide() is None, "said once"


def test_a_torn_shadow_is_waited_for_while_the_others_have_room_then_left_behind():
    state = connected(slots=3)
    state.decide()
    for iteration in (1, 2):
        state.close_iteration(iteration)
        state.have(0, iteration)
        state.torn(1, 1, [1]) if iteration == 1 else None
    # The newest one is left open: a seed of just that iteration makes it whole.
    assert state.decide() == decided(1, (1,), floor=2)
    assert state.decide() is None
    state.seeding(1, 1, 2)
    state.seeded(1, 1, 2)
    state.have(1, 2)
    assert state.decide() == decided(2, (), floor=2)
    assert state.floor == 2


def test_where_shadows_have_no_room_the_newest_is_not_left_open():
    state = connected(slots=2)
    state.decide()
    state.close_iteration(1)
    state.have(0, 1)
    state.torn(1, 1, [1])
    assert state.decide() == decided(1, (1,), floor=2)


def test_nor_where_the_shadow_that_lacks_it_is_given_up():
    state = connected(slots=4)
    state.decide()
    state.close_iteration(1)
    state.have(0, 1)
    state.torn(1, 1, [1])
    assert state.decide() is None
    assert state.lags(1)
    state.give_up(1)
    assert state.decide() == decided(1, (1,), floor=2)


def torn_behind(have=1, torn=2):
    """Both shadows hold iteration 1; before shadow 0 has said so, the next one is torn at shadow 1."""
    state = connected()
    state.decide()
    state.close_iteration(1)
    state.have(1, have)
    state.close_iteration(2)
    state.torn(1, torn, [1])
    return state


def test_what_all_shadows_hold_is_complete_though_the_next_one_is_torn():
    state = torn_behind()
    assert state.decide() is None
    state.have(0, 1)
    assert state.decide() == decided(1, ())
    assert state.decide() is None
    state.have(0, 2)
    assert state.decide() is None


def test_it_is_so_as_well_where_a_shadow_says_what_it_has_behind_the_tear():
    state = connected()
    state.decide()
    state.close_iteration(1)
    state.close_iteration(2)
    state.torn(1, 2, [1])
    state.have(0, 2)
    assert state.decide() is None
    state.have(1, 1)
    assert state.decide() == decided(1, ())


def test_what_all_hold_is_complete_before_the_others_go_on_without_the_torn_one():
    state = torn_behind()
    state.close_iteration(3)
    state.have(0, 3)
    state.close_iteration(4)
    assert state.decide() == decided(1, ())
    assert state.decide() == decided(3, (1,), floor=4)


def test_a_shadow_that_may_have_lost_what_it_had_is_not_relied_upon():
    for speak in (
        lambda state: state.torn(1, 1, [0]),  # it could not be applied
        lambda state: state.diverged(1, 0),
        lambda state: state.seeding(1, 0, 0),  # an older value
        lambda state: (state.seeding(1, 0, 2), state.seeded(1, 0, 2)),
        lambda state: state.disconnected(1),
        lambda state: state.give_up(1),
    ):
        state = torn_behind()
        state.seeding(1, 1, 2)
        speak(state)
        state.have(0, 1)
        assert state.decide() in (None, decided(1, (1,), floor=2)), speak


def test_what_it_says_behind_a_loss_counts_again():
    state = torn_behind()
    state.diverged(1, 0)
    state.have(1, 0)
    state.have(0, 1)
    assert state.decide() is None
    state.have(1, 1)
    assert state.decide() == decided(1, ())


def test_what_all_hold_without_its_side_record_is_not_complete():
    state = torn_behind()
    state.torn(0, 1, [])
    state.have(0, 1)
    assert state.decide() is None


def test_a_seed_that_is_on_its_way_is_not_sent_twice_and_a_later_tear_wants_another():
    state = connected()
    state.torn(1, 3, [1])
    assert state.wanted_seeds(lambda bucket: True) == [(1, 1)]
    state.seeding(1, 1, 4)
    assert state.wanted_seeds(lambda bucket: True) == []
    state.torn(1, 4, [1])  # said before the seed had arrived
    assert state.wanted_seeds(lambda bucket: True) == []
    state.torn(1, 5, [1])
    assert state.wanted_seeds(lambda bucket: True) == [(1, 1)]


def test_training_that_outruns_its_seeds_is_told_to_wait():
    state = connected()
    for turn in range(3):
        assert not state.torn_often()
        state.torn(0, 2 * turn + 1, [0])
        state.seeding(0, 0, 2 * turn + 1)
        if turn < 2:
            state.seeded(0, 0, 2 * turn + 1)
    assert state.torn_often()


def test_distrust_wants_every_bucket_again_though_the_shadow_has_all():
    state = connected()
    state.decide()
    state.close_iteration(1)
    state.have(0, 1)
    state.have(1, 1)
    state.seeding(0, 0, 0)
    state.distrust(lambda shadow: [shadow], 1)
    assert sorted(state.wanted_seeds(lambda bucket: True)) == [(0, 0), (1, 1)]
    assert not any(known.whole for known in state.shadows)
    state.seeded(0, 0, 0)
    assert (0, 0) in state.wanted_seeds(lambda bucket: True), "a seed from before is of no use"
    state.seeding(0, 0, 1)
    state.seeded(0, 0, 1)
    assert state.wanted_seeds(lambda bucket: True) == [(1, 1)]


def test_who_was_away_hears_of_seeds_that_came_meanwhile():
    state = connected()
    state.torn(1, 1, [0, 1])
    state.disconnected(1)
    state.connected(1, [1], 4, seeds=[(0, 3), (1, 0)])
    assert state.wanted_seeds(lambda bucket: True) == [(1, 1)]
    assert state.floor == 3, "what another rank seeded counts as well"


def test_many_spoiled_iterations_are_told_by_where_they_end():
    state = connected(slots=3)
    for number in range(1, MAX_SPOILED + 4):
        state.close_iteration(number)
        state.torn(1, number, [])
    for shadow in (0, 1):
        state.have(shadow, MAX_SPOILED + 4)
    state.close_iteration(MAX_SPOILED + 4)
    word = state.decide()
    assert (word.iteration, word.lost, word.floor) == (MAX_SPOILED + 4, (), 4)
    assert word.spoiled == tuple(range(4, MAX_SPOILED + 4))
    assert [number for number in range(1, MAX_SPOILED + 5) if word.promises(number)] == [MAX_SPOILED + 4]


def test_only_owned_buckets_are_seeded_in_turn_by_shadow():
    state = connected()
    state.torn(0, 1, [0, 2, 4])
    state.torn(1, 1, [1, 3])
    assert state.wanted_seeds(lambda bucket: bucket != 2) == [(0, 0), (1, 1), (0, 4), (1, 3)]


def iteration_without_side(state, number, shadow):
    """Both have it, and one of them lacks a side record of it."""
    state.close_iteration(number)
    state.torn(shadow, number, [])
    state.have(0, number)
    state.have(1, number)
    return state.decide()


def test_what_a_side_record_is_missing_of_is_not_complete_before_one_that_has_all():
    state = connected(slots=5)
    state.decide()
    # Each shadow lacks another one: were these complete, nothing would be held by both.
    assert iteration_without_side(state, 1, 0) is None
    assert iteration_without_side(state, 2, 1) is None
    assert state.complete == 0
    state.close_iteration(3)
    state.have(0, 3)
    assert state.decide() is None
    state.have(1, 3)
    assert state.decide() == decided(3, (), spoiled=(1, 2))


def test_the_newest_that_has_all_side_records_is_complete():
    state = connected(slots=4)
    state.decide()
    state.close_iteration(1)
    state.close_iteration(2)
    state.torn(1, 2, [])
    state.have(0, 2)
    state.have(1, 2)
    assert state.decide() == decided(1, ())


def test_nothing_before_a_seed_is_complete_instead_of_what_lacks_a_side_record():
    state = connected(slots=4)
    state.decide()
    state.close_iteration(1)
    state.torn(0, 1, [0])
    state.have(1, 1)
    assert state.decide() is None
    state.close_iteration(2)
    state.torn(1, 2, [])
    state.seeding(0, 0, 2)
    state.seeded(0, 0, 2)
    state.have(0, 2)
    state.have(1, 2)
    # Iteration 1 has all side records, and shadow 0 is behind it for ever.
    assert state.decide() is None
    assert state.complete == 0


def test_without_room_it_goes_on_and_says_who_lacks_a_side_record_until_all_is_there_again():
    state = connected(slots=3)
    state.decide()
    assert iteration_without_side(state, 1, 1) is None
    assert iteration_without_side(state, 2, 1) == decided(2, (1,), floor=3)
    assert state.decide() is None
    state.close_iteration(3)
    state.have(0, 3)
    state.have(1, 3)
    assert state.decide() == decided(3, (), floor=3)


def test_followers_hear_the_same_news_from_every_shadow():
    state = ConductorState(2, 0)
    assert state.follow(3, ())
    assert not state.follow(3, ())
    assert state.follow(3, (1,))
    assert not state.follow(2, ())
