"""One promise of a shadow's state at a time, step by step."""

import pytest

from lastgood.errors import CheckpointError, MismatchError
from lastgood.gradients.protocol.messages import Absent, Complete, Step
from lastgood.gradients.shadow.actions import Apply
from tests.gradients.support.simulated_shadow import BUCKETS, JOB, LAYOUT, RANKS, SLOTS, Shadow


class Lone:
    """Shadow 0 alone, with values that are lists of applied iterations."""

    def __init__(self):
        self.shadow = Shadow(0)
        self.state = self.shadow.state
        self.state.fence(JOB, 1)
        self.state.declare(LAYOUT, BUCKETS[0], [0], RANKS, None)
        self.shadow.flow()
        for bucket in BUCKETS[0]:
            self.seed(bucket, 0)
        self.work()

    def truth(self, bucket, iteration):
        return self.shadow.values[bucket]

    def check_applied(self, shadow, iteration):
        pass

    def seed(self, bucket, iteration):
        self.state.seed_begun(bucket, iteration)
        self.shadow.flow()
        self.shadow.staged[bucket] = ("seed", iteration)
        self.state.seed_landed(bucket)
        self.shadow.flow()

    def iterate(self, iteration, *, saved=True, rule=True, holes=(), spill=False, void=False):
        for bucket in BUCKETS[0]:
            if bucket not in holes:
                self.shadow.gradient(bucket, iteration, iteration)
        for rank in range(RANKS):
            self.state.ended(rank, iteration)
        step = iteration if saved else None
        rules = {} if rule else None
        self.state.step(Step(iteration=iteration, rule=rules, saved=saved, step=step, spill=spill, void=void))
        if saved and self.state.side(0, iteration):
            self.shadow.sides.add(iteration)
        self.shadow.flow()

    def complete(self, iteration):
        self.state.complete(Complete(iteration=iteration))
        self.shadow.flow()

    def work(self):
        while self.shadow.work(self):
            pass

    def spilled(self):
        return [(m.iteration, m.error is None) for m in self.shadow.said if m.kind == "spilled"]

    def at(self):
        return set(self.state.held.positions.values())

    def restorable(self):
        return [saved.iteration for saved in self.state.held.restorable()]


def test_nothing_is_applied_before_all_shadows_hold_it():
    lone = Lone()
    lone.iterate(1)
    assert [m.iteration for m in lone.shadow.said if m.kind == "have"][-1] == 1
    lone.work()
    assert lone.at() == {0}
    lone.complete(1)
    lone.work()
    assert lone.at() == {1}
    assert lone.restorable() == [1]


def test_an_update_that_nobody_saved_waits_while_there_is_room():
    lone = Lone()
    lone.iterate(1)
    lone.complete(1)
    lone.work()
    lone.iterate(2, saved=False)
    lone.complete(2)
    lone.work()
    assert (lone.at(), lone.restorable()) == ({1}, [1])
    lone.iterate(3)
    lone.complete(3)
    lone.work()
    assert (lone.at(), lone.restorable()) == ({3}, [3])
    for iteration in range(4, 4 + SLOTS):
        assert lone.restorable() == [3]
        lone.iterate(iteration, saved=False)
        lone.complete(iteration)
        lone.work()
    assert lone.at() == {3 + SLOTS}, "with full slots there is no choice"


def test_a_skipped_step_leaves_what_was_saved_before_it_restorable():
    lone = Lone()
    lone.iterate(1)
    lone.iterate(2, saved=False, rule=False)
    lone.complete(2)
    lone.work()
    assert (lone.at(), lone.restorable()) == ({2}, [1])


def test_a_fence_ends_what_was_about_to_be_applied():
    lone = Lone()
    lone.iterate(1)
    lone.work()
    lone.complete(1)
    work = lone.state.next_work()
    assert isinstance(work, Apply)
    lone.state.done(work)
    lone.state.fence(JOB, 2)
    assert lone.state.next_work() is None
    # One bucket is at 1 already, so 1 it is; the other one is brought there by the restore.
    assert lone.restorable() == [1]
    lone.state.restore_to(lone.state.held.restorable()[0])
    lone.shadow.values[work.bucket] = ()
    lone.work()
    assert lone.at() == {1}
    with pytest.raises(MismatchError, match="not newer"):
        lone.state.fence(JOB, 2)


def test_a_seed_waits_beside_the_value_that_can_still_be_given_back():
    lone = Lone()
    lone.iterate(1)
    lone.complete(1)
    lone.work()
    lone.iterate(2, holes={0})
    assert [m.buckets for m in lone.shadow.said if m.kind == "torn"] == [(0,)]
    assert lone.restorable() == [1]
    lone.seed(0, 2)
    with pytest.raises(CheckpointError, match="still has the seed"):
        lone.state.seed_begun(0, 2)
    lone.work()
    assert lone.shadow.values[0] == ("seed", 0, 1)
    assert lone.restorable() == [1, 2]
    lone.complete(2)
    lone.work()
    assert lone.shadow.values[0] == ("seed", 2)
    assert lone.shadow.values[2] == ("seed", 0, 1, 2)
    assert (lone.at(), lone.restorable()) == ({2}, [2])


def test_what_is_torn_is_so_behind_what_was_held_and_a_seed_is_said_before_what_it_makes_of_it():
    lone = Lone()
    for bucket in BUCKETS[0]:  # the next one tears before the step of this one has come
        lone.shadow.gradient(bucket, 1, 1)
    lone.shadow.gradient(BUCKETS[0][0], 2, 2)
    for rank in range(RANKS):
        lone.state.ended(rank, 2)
    lone.shadow.said.clear()
    lone.iterate(1)
    assert [(m.kind, m.iteration) for m in lone.shadow.said] == [("torn", 2), ("have", 1)]
    lone.iterate(2, holes={BUCKETS[0][1]})
    lone.complete(1)
    lone.work()
    assert (lone.at(), lone.restorable(), lone.state.held.have) == ({1}, [1], 1)
    lone.shadow.said.clear()
    lone.seed(BUCKETS[0][1], 2)
    assert [(m.kind, m.iteration) for m in lone.shadow.said] == [("seeded", 2), ("have", 2)]


def test_gradients_that_come_behind_the_tear_promise_nothing():
    lone = Lone()
    lone.iterate(1)
    lone.iterate(2, holes={0})
    lone.iterate(3)
    lone.shadow.said.clear()
    lone.shadow.gradient(0, 2, 2)
    assert [m for m in lone.shadow.said if m.kind == "have"] == []
    assert lone.state.held.have == 1
    lone.complete(1)
    lone.work()
    assert (lone.restorable(), lone.state.held.have) == ([1], 1), "it waits for a seed from here on"


def test_a_seed_that_comes_too_late_for_its_slots_is_torn_again():
    lone = Lone()
    lone.iterate(1, holes={0})
    lone.complete(1)  # it was given up meanwhile
    lone.work()
    for iteration in range(2, 4 + SLOTS):
        lone.iterate(iteration)
        lone.complete(iteration)
        lone.work()
    lone.state.seed_begun(0, 1)
    lone.shadow.flow()
    assert not lone.state.is_landing(0, 1)
    assert [m.iteration for m in lone.shadow.said if m.kind == "torn"][-1] == 2


def test_an_iteration_without_its_side_record_is_not_offered_and_is_reported():
    lone = Lone()
    for iteration in (1, 2):
        for bucket in BUCKETS[0]:
            lone.shadow.gradient(bucket, iteration, iteration)
        lone.state.step(Step(iteration=iteration, rule={}, saved=True, step=iteration))
    assert lone.state.held.have == 0
    lone.state.side(0, 2)
    lone.shadow.sides.add(2)
    lone.shadow.flow()
    assert [(m.iteration, m.buckets) for m in lone.shadow.said if m.kind == "torn"] == [(1, ())]
    assert (lone.restorable(), lone.state.held.have) == ([2], 2)


def test_what_its_side_record_may_still_come_for_is_not_held_though_a_later_iteration_needs_none():
    lone = Lone()
    lone.iterate(1, saved=False)
    lone.state.step(Step(iteration=2, rule={}, saved=True, step=2))
    for bucket in BUCKETS[0]:
        lone.shadow.gradient(bucket, 2, 2)
    lone.iterate(3, saved=False)
    assert [m.iteration for m in lone.shadow.said if m.kind == "have"][-1] == 1
    assert lone.state.side(0, 2)
    lone.shadow.flow()
    assert [m.iteration for m in lone.shadow.said if m.kind == "have"][-1] == 3


def test_a_step_that_was_lost_on_its_way_is_as_a_gradient_that_was():
    lone = Lone()
    lone.iterate(1)
    lone.complete(1)
    for iteration in (2, 3):
        for bucket in BUCKETS[0]:
            lone.shadow.gradient(bucket, iteration, iteration)
    lone.state.step(Step(iteration=3, rule={}, saved=False, step=None))
    lone.shadow.flow()
    assert lone.state.held.waiting == 0, "it may still come"
    lone.complete(2)
    lone.work()
    torn = [m for m in lone.shadow.said if m.kind == "torn"]
    assert [(m.iteration, set(m.buckets)) for m in torn] == [(2, set(BUCKETS[0]))]
    for bucket in BUCKETS[0]:
        lone.seed(bucket, 2)
    lone.work()
    assert [m.iteration for m in lone.shadow.said if m.kind == "have"][-1] == 3
    lone.complete(3)
    lone.work()
    assert lone.at() == {3}


def test_a_side_record_that_comes_again_and_finds_no_room_takes_nothing_back():
    lone = Lone()

    def torn():
        lone.shadow.flow()
        return [(m.iteration, m.buckets) for m in lone.shadow.said if m.kind == "torn"]

    lone.iterate(1)
    assert (lone.restorable(), lone.state.held.have) == ([1], 1)
    lone.state.side_refused(0, 1, "side records take all their memory")
    assert (lone.restorable(), lone.state.held.have, torn()) == ([1], 1, [])
    for iteration in (2, 3, 4):
        lone.complete(iteration - 1)
        lone.work()
        lone.iterate(iteration)
    lone.state.side_refused(0, 1, "side records take all their memory")
    assert torn() == [], "nobody needs it any more"
    for bucket in BUCKETS[0]:
        lone.shadow.gradient(bucket, 5, 5)
    lone.state.step(Step(iteration=5, rule={}, saved=True, step=5))
    lone.state.side_refused(0, 5, "side records take all their memory")
    assert torn() == [(5, ())], "one that never came is missing for good"
    assert 5 not in lone.restorable()


def test_rank_0_hears_again_of_what_counts_as_unsaved_before_it_hears_that_it_is_held():
    lone = Lone()
    lone.iterate(1)
    for bucket in BUCKETS[0]:
        lone.shadow.gradient(bucket, 2, 2)
    lone.state.step(Step(iteration=2, rule={}, saved=True, step=2))
    lone.state.side_refused(0, 2, "side records take all their memory")
    lone.shadow.flow()
    lone.shadow.said.clear()  # its connection broke
    lone.state.greet()
    lone.shadow.flow()
    said = [(m.kind, m.iteration) for m in lone.shadow.said if m.kind in ("have", "torn")]
    assert said == [("torn", 2), ("have", 2)]


def test_a_spill_is_copied_once_applied_and_its_end_is_said():
    lone = Lone()
    lone.iterate(1, spill=True)
    assert lone.state.spill.open == (1,)
    lone.complete(1)
    assert lone.state.spill.all_copied is None
    lone.work()
    assert lone.state.spill.all_copied == 1
    lone.iterate(2, spill=True)
    lone.complete(2)
    lone.work()
    assert lone.spilled() == [(2, False)], "the one before is still being written"
    lone.state.spill_over(1)
    lone.shadow.flow()
    assert lone.spilled() == [(2, False), (1, True)]
    assert lone.state.spill.open == ()


def test_a_spill_that_a_seed_has_jumped_over_is_answered():
    lone = Lone()
    lone.iterate(1, holes={0, 2})
    for bucket in BUCKETS[0]:
        lone.seed(bucket, 2)
    lone.complete(2)
    lone.work()
    assert lone.at() == {2}
    lone.iterate(1, spill=True)
    lone.work()
    assert lone.spilled() == [(1, False)]


def test_a_spill_whose_bucket_is_lost_ends_and_the_next_one_is_begun():
    lone = Lone()
    lone.iterate(1, spill=True)
    lone.complete(1)
    work = lone.state.next_work()
    assert isinstance(work, Apply)
    lone.state.failed(work, "it could not be applied")
    lone.shadow.flow()
    assert lone.spilled() == [(1, False)]
    lone.seed(work.bucket, 1)
    lone.work()
    lone.iterate(2, spill=True)
    lone.complete(2)
    lone.work()
    assert lone.state.spill.all_copied == 2


def test_a_fence_ends_a_spill_that_is_not_copied():
    lone = Lone()
    lone.iterate(1, spill=True)
    lone.complete(1)
    assert isinstance(lone.state.next_work(), Apply)
    lone.state.fence(JOB, 2)
    assert lone.state.spill.open == ()


def test_a_rank_that_never_came_is_not_waited_for_where_others_need_the_room():
    shadow = Shadow(0)
    state = shadow.state
    state.fence(JOB, 1)
    state.declare(LAYOUT, BUCKETS[0], [0], RANKS, None)
    state.connected(0)
    for bucket in BUCKETS[0]:
        state.seed_begun(bucket, 0)
        shadow.flow()
        shadow.staged[bucket] = ("seed", 0)
        state.seed_landed(bucket)
        shadow.flow()
    for iteration in range(1, SLOTS + 2):
        assert not [message for message in shadow.said if message.kind == "torn"]
        state.ended(0, iteration)  # its parts of each bucket have come, and rank 1 has not
        state.step(Step(iteration=iteration, rule={}, saved=False, step=None))
        shadow.flow()
        while shadow.work(Lone()):
            pass
    torn = [message for message in shadow.said if message.kind == "torn"]
    assert torn and {bucket for message in torn for bucket in message.buckets} == set(BUCKETS[0])
    assert not any(shadow.slots[bucket].placed for bucket in BUCKETS[0])  # nobody's gradients wait any more


def test_gradients_that_the_update_did_not_use_count_as_lost_until_a_seed_comes():
    lone = Lone()
    lone.iterate(1)
    lone.complete(1)
    lone.work()
    lone.iterate(2, saved=False, void=True)
    lone.iterate(3)
    assert (lone.restorable(), lone.state.held.have) == ([1], 1), "what comes behind it is not offered either"
    torn = [(m.iteration, set(m.buckets)) for m in lone.shadow.said if m.kind == "torn"]
    assert torn == [(2, set(BUCKETS[0]))]
    lone.complete(3)  # the others go on
    lone.work()
    assert (lone.at(), lone.restorable()) == ({1}, [1])
    for bucket in BUCKETS[0]:
        lone.seed(bucket, 3)
    lone.work()
    assert (lone.at(), lone.restorable(), lone.state.held.have) == ({3}, [3], 3)


def test_an_iteration_that_is_void_is_so_before_one_that_is_torn_already():
    lone = Lone()
    for iteration, holes in ((1, ()), (2, {0})):
        for bucket in BUCKETS[0]:
            if bucket not in holes:
                lone.shadow.gradient(bucket, iteration, iteration)
    for rank in range(RANKS):
        lone.state.ended(rank, 2)
    lone.state.step(Step(iteration=1, rule={}, saved=False, step=None, void=True))
    lone.shadow.flow()
    torn = [(m.iteration, set(m.buckets)) for m in lone.shadow.said if m.kind == "torn"]
    assert torn == [(2, {0}), (1, set(BUCKETS[0]))]
    assert not any(slots.placed for slots in lone.shadow.slots.values()), "their slots make nobody wait"


def test_gradients_that_come_behind_the_word_that_they_are_void_count_as_lost_as_well():
    lone = Lone()
    lone.state.step(Step(iteration=1, rule={}, saved=False, step=None, void=True))
    for bucket in BUCKETS[0]:
        lone.shadow.gradient(bucket, 1, 1)
    lone.iterate(2)
    assert lone.restorable() == []
    assert [set(m.buckets) for m in lone.shadow.said if m.kind == "torn"] == [set(BUCKETS[0])]


def test_void_gradients_that_its_slots_hold_do_not_follow_a_seed():
    lone = Lone()
    lone.iterate(1, holes=BUCKETS[0])
    lone.work()
    lone.iterate(2, saved=False, void=True)
    lone.iterate(3)
    for bucket in BUCKETS[0]:
        lone.seed(bucket, 1)
    lone.work()
    assert (lone.restorable(), lone.state.held.have) == ([1], 1)


@pytest.mark.parametrize("step_first", [True, False])
def test_a_step_of_ranks_apart_waits_until_each_has_said_what_it_left_alone(step_first):
    lone = Lone()
    step = Step(iteration=1, rule={}, saved=True, step=1, absent=(4,), apart=True)

    def others(said):
        for rank in range(1, RANKS):
            assert lone.restorable() == [] and lone.state.next_work() is None
            lone.state.absent(rank, Absent(iteration=1, parameters=said, updated=True))

    for bucket in BUCKETS[0]:
        lone.shadow.gradient(bucket, 1, 1)
    lone.state.side(0, 1)
    lone.shadow.sides.add(1)
    if not step_first:
        others((7, 8))
    lone.state.step(step)
    if step_first:
        others((7, 8))
    lone.state.absent(1, Absent(iteration=1, parameters=(9,), updated=True))  # said again, it changes nothing
    assert lone.restorable() == [1]
    lone.state.complete(Complete(iteration=1))
    work = lone.state.next_work()
    assert isinstance(work, Apply) and work.step.absent == (4, 7, 8)
    lone.state.absent(1, Absent(iteration=2, parameters=(6,), updated=True))
    lone.state.fence(JOB, 2)
    lone.state.declare(LAYOUT, BUCKETS[0], [0], RANKS, None)
    lone.state.step(step.model_copy(update={"iteration": 2}))
    assert 2 not in lone.state.held.known.steps, "what was said in another incarnation does not count"
    lone.state.absent(1, Absent(iteration=2, parameters=(5,), updated=True))
    assert lone.state.held.known.steps[2].absent == (4, 5)


@pytest.mark.parametrize(
    ("rule", "updated", "void", "lost"),
    [({}, True, True, True), ({}, False, True, True), (None, True, False, True), (None, False, False, False)],
)
def test_what_one_rank_apart_did_otherwise_voids_the_iteration(rule, updated, void, lost):
    lone = Lone()
    lone.state.step(Step(iteration=1, rule=rule, saved=True, step=1, apart=True))
    for bucket in BUCKETS[0]:
        lone.shadow.gradient(bucket, 1, 1)
    for rank in range(RANKS):
        lone.state.ended(rank, 1)
    lone.state.side(0, 1)
    lone.shadow.sides.add(1)
    for rank in range(1, RANKS):
        assert lone.restorable() == []
        lone.state.absent(rank, Absent(iteration=1, parameters=(), updated=updated, void=void))
    lone.shadow.flow()
    assert lone.restorable() == ([] if lost else [1])
    assert [set(m.buckets) for m in lone.shadow.said if m.kind == "torn"] == ([set(BUCKETS[0])] if lost else [])
