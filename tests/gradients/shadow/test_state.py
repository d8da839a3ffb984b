"""Decisions of shadows under losses, reorder, crashes and fences, against a plain model of what must hold.

The simulation has several shadows and a conductor. A shadow's value of a bucket is the tuple of updates that made it,
so that what is given back can be compared with what the trainers had, and gradients of different lives differ.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lastgood.errors import CheckpointError, CorruptCheckpoint
from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.protocol.messages import Complete, Step, parse_message
from lastgood.gradients.shadow.actions import Window
from lastgood.gradients.shadow.state import ShadowState
from lastgood.wire.records import MAX_ITERATION
from tests.gradients.support.simulated_shadow import BUCKETS, JOB, LAYOUT, RANKS, SHADOWS, SLOTS, Shadow


def newest_word(said):
    """What a shadow can be brought to, as far as it has said: what it says of losses later may speak against it."""
    word = -1
    for message in said:
        if message.kind == "have":
            word = message.iteration
        elif message.kind == "diverged" or (message.kind == "torn" and message.buckets and message.iteration <= word):
            word = -1
    return word


class World(RuleBasedStateMachine):
    """Trainers are at iteration `now`; `history` says which updates they made, in this lineage."""

    @initialize()
    def begin(self):
        self.shadows = [Shadow(number) for number in range(SHADOWS)]
        self.incarnation = 0
        self.now = 0
        self.rules = {}
        self.saved = {}
        self.made_in = {}
        self.void = set()
        self.completed = 0
        self.lost = set()
        self.wanting = set()
        self.restart(adopt=None)

    # -- the oracle

    def gradient(self, bucket, iteration):
        return (bucket, self.made_in[iteration], iteration)

    def truth(self, bucket, iteration):
        return tuple(self.gradient(bucket, one) for one in range(1, iteration + 1) if self.rules[one])

    def step_of(self, iteration):
        saved = self.saved[iteration]
        return Step(
            iteration=iteration,
            rule={} if self.rules[iteration] else None,
            saved=saved,
            step=iteration if saved else None,
            void=iteration in self.void,
        )

    def check_applied(self, shadow, iteration):
        if not shadow.state.declared:
            return  # a restore: what may be given back is checked there
        assert iteration <= self.completed, "nobody applies what not all shadows hold"

    # -- incarnations

    def restart(self, adopt):
        for shadow in self.shadows:
            shadow.parked.clear()
            shadow.said.clear()
            for slots in shadow.slots.values():
                slots.__init__()
            shadow.staged.clear()
            kept = (
                shadow.state.declare(
                    LAYOUT,
                    BUCKETS[shadow.number],
                    [rank for rank in range(RANKS) if rank % SHADOWS == shadow.number],
                    RANKS,
                    adopt,
                )
                if self.incarnation
                else None
            )
            if kept is None:
                shadow.state.fence(JOB, 1)
                kept = shadow.state.declare(
                    LAYOUT,
                    BUCKETS[shadow.number],
                    [rank for rank in range(RANKS) if rank % SHADOWS == shadow.number],
                    RANKS,
                    adopt,
                )
            assert kept == (adopt is not None)
            shadow.flow()
        self.incarnation = self.incarnation or 1
        self.lost = set()
        self.whole = False
        if adopt is None:
            for shadow in self.shadows:
                for bucket in BUCKETS[shadow.number]:
                    self.seed(shadow, bucket)

    # -- training

    def seed(self, shadow, bucket):
        """All of a bucket as it is now, at once. It takes the place of older ones, and may not be saved itself."""
        self.whole &= self.saved.get(self.now, False)
        shadow.state.seed_begun(bucket, self.now)
        shadow.flow()
        if shadow.state.is_landing(bucket, self.now):
            shadow.staged[bucket] = self.truth(bucket, self.now)
            shadow.state.seed_landed(bucket)
            shadow.flow()

    def room(self):
        """A block policy: trainers stop where a shadow that is not lost holds records back, or is far behind."""
        return (
            not any(shadow.parked for shadow in self.shadows if shadow.number not in self.lost)
            and self.now < self.completed + SLOTS
        )

    @precondition(lambda self: self.room())
    @rule(
        updates=st.booleans(),
        saves=st.integers(0, 4),
        holes=st.sets(st.integers(0, 3), max_size=1),
        hole_now=st.integers(0, 5),
        order=st.permutations(range(4)),
        spill=st.booleans(),
        step_first=st.booleans(),
        checks=st.booleans(),
        void=st.integers(0, 7),
    )
    def train(self, updates, saves, holes, hole_now, order, spill, step_first, checks, void):
        self.now += 1
        now = self.now
        self.void.discard(now)
        if void == 0:  # the update uses other gradients than were sent
            self.void.add(now)
            saves = 0
        self.rules[now], self.made_in[now] = updates, self.incarnation
        self.saved[now] = bool(saves)
        holes = holes if hole_now == 0 else set()
        step = self.step_of(now).model_copy(update={"spill": spill})
        for shadow in self.shadows:
            if step_first:
                shadow.state.step(step)
                shadow.flow()
            for bucket in order:
                if bucket in BUCKETS[shadow.number] and bucket not in holes:
                    sent = ("sent", bucket, now) if now in self.void else self.gradient(bucket, now)
                    shadow.gradient(bucket, now, sent)
            for rank in range(RANKS):
                if not shadow.parked:
                    shadow.state.ended(rank, now)
                    shadow.flow()
            if not step_first:
                shadow.state.step(step)
                shadow.flow()
            if saves and shadow.state.side(shadow.number, now):
                shadow.sides.add(now)
            shadow.flow()
            if checks:
                shadow.state.check(BUCKETS[shadow.number][0], now, 0)
                shadow.flow()

    @rule(shadow=st.integers(0, SHADOWS - 1), count=st.integers(1, 5))
    def work(self, shadow, count):
        for _ in range(count):
            if not self.shadows[shadow].work(self):
                return

    @rule(give_up=st.booleans())
    def conduct(self, give_up):
        """Rank 0: complete what all (but lost ones) hold; take those back that are whole again."""
        haves = {}
        for shadow in self.shadows:
            haves[shadow.number] = newest_word(shadow.said)
            torn = [m for m in shadow.said if m.kind == "torn" and m.buckets]
            if give_up and torn and shadow.state.held.waiting:
                self.lost.add(shadow.number)
            if (
                shadow.number in self.lost
                and not shadow.state.held.waiting
                and shadow.state.held.have >= self.completed
            ):
                self.lost.discard(shadow.number)
        waited = [haves[number] for number in haves if number not in self.lost]
        newest = min(waited) if waited else self.now
        if newest > self.completed:
            self.completed = newest
            floor = max((m.iteration for shadow in self.shadows for m in shadow.said if m.kind == "seeded"), default=0)
            self.whole = not self.lost and newest >= floor
            for shadow in self.shadows:
                shadow.state.complete(Complete(iteration=newest, lost=tuple(self.lost)))
                shadow.flow()

    @precondition(lambda self: self.room())
    @rule(iterations=st.integers(1, 3), saves=st.booleans(), ahead=st.booleans())
    def go_on(self, iterations, saves, ahead):
        """An undisturbed stretch; with `ahead`, shadows work before rank 0 has said that all hold it."""
        for _ in range(iterations):
            if self.room():
                self.train(True, int(saves), set(), 1, range(4), False, True, True, 1)
            for both in [self.work, self.conduct] if ahead else [self.conduct, self.work]:
                if both == self.work:
                    for shadow in range(SHADOWS):
                        self.work(shadow, 10)
                else:
                    self.conduct(False)

    @rule(shadow=st.integers(0, SHADOWS - 1))
    def heal(self, shadow):
        """Seed a bucket that wants it."""
        for bucket in self.shadows[shadow].state.held.unseeded[:1]:
            self.seed(self.shadows[shadow], bucket)

    @rule(shadow=st.integers(0, SHADOWS - 1))
    def distrust(self, shadow):
        """Seed a bucket that does not ask for it."""
        try:
            self.seed(self.shadows[shadow], BUCKETS[shadow][0])
        except CheckpointError:
            assert any(number in self.shadows[shadow].staged for number in BUCKETS[shadow])

    @rule(shadow=st.integers(0, SHADOWS - 1), order=st.booleans())
    def again(self, shadow, order):
        """A conductor connects again, and says again what it said."""
        state = self.shadows[shadow].state
        before = state.held.positions
        for iteration in range(1, self.now + 1):
            if iteration > state.held.have:
                state.step(self.step_of(iteration))
        state.complete(Complete(iteration=self.completed, lost=tuple(self.lost)))
        state.greet()
        self.shadows[shadow].flow()
        assert state.held.positions == before

    # -- bad days

    @rule(shadow=st.integers(0, SHADOWS - 1))
    def crash(self, shadow):
        """A shadow's process is killed; a fresh one joins this incarnation."""
        fresh = self.shadows[shadow] = Shadow(shadow)
        fresh.state.fence(JOB, self.incarnation)
        fresh.state.declare(LAYOUT, BUCKETS[shadow], [shadow], RANKS, None)
        fresh.flow()
        self.lost.add(shadow)
        self.whole = False
        # As trainers do when they connect: what is not complete is said again.
        for iteration in range(self.completed + 1, self.now + 1):
            fresh.state.step(self.step_of(iteration))
            if self.saved[iteration] and fresh.state.side(shadow, iteration):
                fresh.sides.add(iteration)
            fresh.flow()

    @rule(partial=st.booleans(), data=st.data())
    def kill_and_restore(self, partial, data):
        """All trainers are killed, perhaps in the midst of an iteration; fence, choose, restore, go on."""
        if partial:
            for shadow in self.shadows:
                bucket = data.draw(st.sampled_from(BUCKETS[shadow.number]))
                shadow.gradient(bucket, self.now + 1, ("partial", bucket, self.incarnation))
        self.incarnation += 1
        for shadow in self.shadows:
            shadow.state.fence(JOB, self.incarnation)
            shadow.flow()
            while shadow.work(self):
                pass
        offered = [set(shadow.state.held.restorable()) for shadow in self.shadows]
        common = sorted(set.intersection(*offered), key=lambda saved: saved.iteration)
        if self.whole:
            newest = max((one for one in range(1, self.completed + 1) if self.saved[one]), default=None)
            after = [one for one in range((newest or 0) + 1, self.completed + 1) if self.rules[one]]
            if newest is not None and not after:
                assert common and common[-1].iteration >= newest, "what was complete on all shadows is not lost"
        if not common:
            for shadow in self.shadows:
                shadow.values.clear()
            self.wanting.clear()
            # Nothing can be given back from memory: trainers begin anew.
            self.now = self.completed = 0
            self.rules, self.saved, self.made_in, self.void = {}, {}, {}, set()
            self.restart(adopt=None)
            return
        chosen = data.draw(st.sampled_from(common))
        for shadow in self.shadows:
            assert chosen.iteration in shadow.sides or not [r for r in range(RANKS) if r % SHADOWS == shadow.number]
            shadow.state.restore_to(chosen)
            shadow.flow()
            while shadow.work(self):
                pass
            assert shadow.state.restored(chosen)
            for bucket in BUCKETS[shadow.number]:
                assert shadow.values[bucket] == self.truth(bucket, chosen.iteration), "to the bit"
        for known in (self.rules, self.saved, self.made_in):
            for iteration in [one for one in known if one > chosen.iteration]:
                del known[iteration]
        self.void = {one for one in self.void if one <= chosen.iteration}
        self.now = self.completed = chosen.iteration
        self.restart(adopt=chosen.iteration)

    # -- what holds always

    @invariant()
    def values_are_the_trainers(self):
        for shadow in getattr(self, "shadows", []):
            for bucket, at in shadow.state.held.positions.items():
                if at is not None and not shadow.state.held.buckets[bucket].busy:
                    assert shadow.values[bucket] == self.truth(bucket, at)

    @invariant()
    def what_is_offered_has_its_side_records(self):
        for shadow in getattr(self, "shadows", []):
            for saved in shadow.state.held.restorable():
                assert saved.iteration in shadow.sides
                assert saved == Saved(
                    epoch=self.made_in[saved.iteration], iteration=saved.iteration, step=saved.iteration
                )

    @invariant()
    def how_far_it_can_be_brought_is_what_a_walk_over_all_iterations_finds(self):
        for shadow in getattr(self, "shadows", []):
            assert shadow.state.held.newest() == newest_by_walking(shadow.state)


def newest_by_walking(state):
    """All iterations from where the furthest bucket stands to the one that all can be brought to, one by one."""
    buckets = state.held.buckets.values()
    newest, found = min((bucket.end for bucket in buckets), default=-1), None
    low = min((bucket.landing or 0 if bucket.at is None else bucket.at for bucket in buckets), default=0)
    for iteration in range(low, newest + 1) if newest >= 0 else ():
        if (
            iteration > state.held.completed
            and iteration in state.held.known.saves
            and not state.held.known.sides_whole(iteration)
        ):
            break
        if state.held.producible(iteration):
            found = iteration
    return found


World.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
TestShadows = World.TestCase


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_shadows_for_long():
    run_state_machine_as_test(World, settings=settings(max_examples=1000, stateful_step_count=60, deadline=None))


# -- what a message says is not walked over ----------------------------------------------------------------------------

FAR = 10**5
"""Iterations that one message is ahead: far more than anything that is held, and few enough for a walk that fails."""


class Counting(ShadowState):
    """Counts how often it is asked whether an iteration can be produced."""

    asked = 0

    def _producible(self, iteration):
        self.asked += 1
        return super()._producible(iteration)


def seeded(buckets=1):
    state = Counting(SLOTS)
    state.fence(JOB, 1)
    state.declare(LAYOUT, range(buckets), [0], 1, None)
    for bucket in range(buckets):
        seed(state, bucket, 5)
    while (work := state.next_work()) is not None:
        state.done(work)
    state.take()
    return state


def seed(state, bucket, iteration):
    state.seed_begun(bucket, iteration)
    for output in state.take():
        if isinstance(output, Window) and output.ask:
            state.window_set(output.bucket, [])
    state.seed_landed(bucket)


@pytest.mark.parametrize("far", [FAR, MAX_ITERATION - 1])
@pytest.mark.parametrize(
    "say",
    [
        lambda state, far: seed(state, 0, far),
        lambda state, far: [seed(state, bucket, far) for bucket in range(3)],
        lambda state, far: state.complete(Complete(iteration=far)),
        lambda state, far: state.step(step(far)),
        lambda state, far: [state.step(step(far)), seed(state, 0, far)],
        lambda state, far: state.ended(0, far),
        lambda state, far: state.received(0, far),
        lambda state, far: state.side(0, far),
        lambda state, far: state.check(0, far, 1),
        lambda state, far: [state.ended(0, far), state.complete(Complete(iteration=far)), seed(state, 1, far)],
        lambda state, far: [state.step(step(one)) for one in (far, 6, far - 1)] and seed(state, 2, far),
    ],
)
def test_one_message_far_ahead_is_not_walked_up_to(say, far):
    state = seeded(buckets=3)
    state.asked = 0
    say(state, far)
    while (work := state.next_work()) is not None:
        state.done(work)
    state.greet()
    state.held.restorable()
    state.fence(JOB, 2)
    assert state.asked <= 100
    if far == FAR:
        assert state.held.newest() == newest_by_walking(state)


def test_many_steps_that_are_known_are_walked_over_once():
    state = seeded(buckets=2)
    for iteration in range(6, 400):
        if iteration != 200:
            state.step(step(iteration))
    state.asked = 0
    seed(state, 0, FAR)
    state.declared = False
    assert state.held.newest() == newest_by_walking(state)
    assert state.asked <= 500


def step(iteration):
    return Step(iteration=iteration, rule=None, saved=True, step=iteration)


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "seed", "bucket": 0, "entries": []},
        {"kind": "step", "rule": None, "saved": False, "step": None},
        {"kind": "complete"},
        {"kind": "side", "rank": 0, "step": 0, "layout": None, "nbytes": 0},
        {"kind": "absent", "parameters": [], "updated": True},
        {"kind": "verify", "bucket": 0, "checksum": 0},
        {"kind": "have"},
        {"kind": "torn", "buckets": [], "why": ""},
    ],
    ids=lambda message: message["kind"],
)
def test_an_iteration_has_room_above_it(message):
    assert parse_message({**message, "iteration": MAX_ITERATION - 1}, "a trainer").iteration == MAX_ITERATION - 1
    for iteration in (MAX_ITERATION, 1 << 63, -1, 1.0, True):
        with pytest.raises(CorruptCheckpoint):
            parse_message({**message, "iteration": iteration}, "a trainer")
