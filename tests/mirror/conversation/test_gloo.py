"""A conversation over Gloo against lives that are written apart from it: no wrong place, and each loss is said."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lastgood.mirror.conversation.gloo import GlooConversation
from lastgood.mirror.conversation.places import Buckets, Closed, Incarnation, LostStep
from lastgood.mirror.job.ddp import likely_buckets
from lastgood.mirror.job.description import DdpSettings, JobDescription
from tests.mirror.support.ddp_life import Life
from tests.mirror.support.gloo_sends import Sent, heads
from tests.mirror.support.small_job import small_job
from tests.mirror.support.watcher import Watcher, address


def watcher(life: Life, watched: list[int], **more: Any) -> Watcher:
    return Watcher(GlooConversation(life.job, [address(rank) for rank in watched], **more), life, watched)


def hint(life: Life, watched: list[int]) -> dict[str, int] | None:
    """With four ranks and more, sizes that are all the same leave several possible."""
    return {address(rank): rank for rank in watched} if life.job.ranks > 3 else None


def run(life: Life, watched: list[int], *, batch: int = 40, seed: int = 0, announcements: bool = True) -> Watcher:
    """All of a life, without any loss."""
    found = watcher(life, watched, ranks=hint(life, watched))
    sents = heads(life, seed, announcements=announcements)
    for at in range(0, len(sents), batch):
        found.batch(sents[at : at + batch])
    found.finish()
    return found


def steps_of(life: Life) -> set[int]:
    return set(range(life.steps))


SETTINGS = {
    "plain": {},
    "unused": {"ddp": DdpSettings(find_unused_parameters=True, first_cap=1024, cap=4096)},
    "static": {"ddp": DdpSettings(static_graph=True)},
    "fp16": {"ddp": DdpSettings(hook="fp16")},
    "bf16 model": {"dtype": "bfloat16"},
    "no forward buffers": {"ddp": DdpSettings(forward_buffers=False)},
    "no buffers at all": {"ddp": DdpSettings(forward_buffers=False, init_buffers=False)},
    "no buffers in the model": {"buffers": False},
    "two reductions": {"reductions_per_step": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("ranks", "watched"), [(2, [0]), (2, [1]), (3, [2]), (5, [0, 2])])
def test_every_step_is_complete(name: str, ranks: int, watched: list[int]) -> None:
    job = small_job(ranks=ranks, **SETTINGS[name])
    for seed in range(2):
        life = Life(job, steps=4, seed=seed)
        found = run(life, watched, seed=seed, batch=10 + 37 * seed, announcements=bool(seed))
        assert found.wrong == []
        assert found.contradictions == []
        assert [one for one in found.events if isinstance(one, LostStep)] == []
        assert found.whole_steps() == steps_of(life)
        assert found.incarnations == 1
        assert {address(rank): rank for rank in watched}.items() <= found.ranks.items()
        assert [one.complete for one in found.of(Incarnation)] == [True]
        assert sorted(found.expected) == sorted(one.collective for one in found.of(Closed))
        if name not in ("unused",):
            assert found.buckets_at(life.steps) == tuple(map(tuple, life.buckets))


def test_parameters_and_buffers_are_told_by_name() -> None:
    life = Life(small_job(), steps=2)
    found = run(life, [0])
    parameters = [one for one in found.expected.values() if one.kind == "parameters"]
    assert [one.tensors for one in parameters] == [
        ("layer0.weight", "frozen", "layer1.weight", "layer2.weight", "layer3.weight", "norm.mean"),
        ("norm.count",),
    ]
    buffers = [one for one in found.expected.values() if one.kind == "buffers"]
    assert [(one.step, one.tensors, one.dtype) for one in buffers[:4]] == [
        (0, ("norm.mean",), "float32"),
        (0, ("norm.count",), "int64"),
        (1, ("norm.mean",), "float32"),
        (1, ("norm.count",), "int64"),
    ]
    assert [one.rebuilt for one in found.of(Buckets)] == [False, True]


def test_large_buckets_have_many_segments() -> None:
    """The last segment is shorter, and some chunks have fewer segments than others."""
    life = Life(small_job((1_000_001, 300, 700_003)), steps=2)
    found = run(life, [1], batch=200)
    assert found.wrong == []
    assert found.whole_steps() == {0, 1}


def test_joins_and_evaluations() -> None:
    for seed in range(4):
        life = Life(small_job(ranks=3), steps=5, seed=seed, joins=True)
        found = run(life, [1], seed=seed)
        assert found.wrong == []
        assert found.whole_steps() == steps_of(life)
        life = Life(small_job(ranks=2), steps=6, seed=seed, evaluates=True)
        found = run(life, [0], seed=seed)
        assert found.wrong == []
        assert found.whole_steps() == steps_of(life)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(2, 4),
    chance=st.sampled_from([0.05, 0.3]),
    name=st.sampled_from(sorted(SETTINGS)),
    batch=st.integers(1, 60),
)
@example(seed=10782438, ranks=2, chance=0.3, name="unused", batch=1)  # a stranger that begins as the used map does
def test_strangers_of_other_sizes_are_passed_over(seed: int, ranks: int, chance: float, name: str, batch: int) -> None:
    life = Life(
        small_job(ranks=ranks, **SETTINGS[name]), steps=4, seed=seed, strangers=chance, stranger_sizes=(4, 8, 44)
    )
    found = run(life, [seed % ranks], seed=seed, batch=batch)
    assert found.wrong == []
    assert found.whole_steps() == steps_of(life)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 3), buffers=st.booleans(), batch=st.integers(1, 60))
def test_strangers_of_a_buckets_size_cost_the_step_or_nothing(seed: int, ranks: int, buffers: bool, batch: int) -> None:
    job = small_job((70, 300, 50, 1200), ranks=ranks, buffers=buffers)
    sizes = bucket_sizes(job, seed)
    # Where a step is one bucket, or all of one size, nothing tells them from a stranger.
    assume(len(sizes) > 1 and len(set(sizes)) == len(sizes))
    life = Life(job, steps=5, seed=seed, strangers=0.15, stranger_sizes=(*sizes, 64, 8))
    found = run(life, [0], seed=seed, batch=batch)
    lost = found.lost_steps()
    for said, _ in found.wrong:
        if said[1] == life.steps:
            continue  # a stranger at the end, of a step that is never complete
        assert said[1] in (lost if said[0] == "gradient" else lost | found.lost_steps("buffers")), said
    assert found.whole_steps() | lost >= steps_of(life) - {life.steps - 1}


def bucket_sizes(job: JobDescription, seed: int) -> list[int]:
    probe = Life(job, steps=2, seed=seed, strangers=0.15, stranger_sizes=(4,) * 7)
    trainable = [one for one in job.parameters if one.trainable]
    return [sum(trainable[index].nbytes for index in bucket) for bucket in probe.buckets]


# -- losses ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4), batch=st.integers(1, 50), data=st.data())
def test_lost_payloads_cost_exactly_the_steps_whose_bytes_do_not_pass_again(
    seed: int, ranks: int, batch: int, data: st.DataObject
) -> None:
    life = Life(small_job(ranks=ranks), steps=5, seed=seed)
    found = watcher(life, [0])
    sents = heads(life, seed)
    chance = random.Random(seed)
    count = data.draw(st.integers(1, 6))
    seen = [one for one in sents if found.seen(one) and one.opcode == 1 and one.nbytes]
    carried = [
        one for one in seen if (label := life.collectives[one.tag].label) and label[0] in ("gradient", "buffers")
    ]
    lost = chance.sample(carried, count)
    for at in range(0, len(sents), batch):
        found.batch(sents[at : at + batch], lost=lost)
    found.finish()
    assert found.wrong == []
    concerned = set()
    gone = {id(one) for one in lost}
    for one in lost:
        label = life.collectives[one.tag].label
        assert label is not None
        again = [
            other
            for other in seen
            if id(other) not in gone
            and (other.tag, other.begin, other.end, other.final) == (one.tag, one.begin, one.end, True)
        ]
        if one.final and not again and label[0] == "gradient":
            concerned.add(label[1])
    assert found.lost_steps() | found.gaps("gradient") == concerned
    assert found.whole_steps() == steps_of(life) - concerned


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(2, 4),
    batch=st.integers(1, 60),
    length=st.integers(1, 40),
    buffers=st.booleans(),
    both=st.booleans(),
    strangers=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_lost_heads_never_give_a_wrong_place(
    seed: int, ranks: int, batch: int, length: int, buffers: bool, both: bool, strangers: float
) -> None:
    life = Life(small_job(ranks=ranks, buffers=buffers), steps=8, seed=seed, strangers=strangers)
    sents = heads(life, seed)
    chance = random.Random(seed)
    seen = [one for one in sents if 0 in (one.source, one.destination)]
    at = chance.randrange(len(seen) - 1)
    if not both:
        way = (seen[at].source, seen[at].destination)
        seen = [one for one in seen if (one.source, one.destination) == way or len(seen) < 2]
        at = chance.randrange(len(seen))
    gone = seen[at : at + length]

    def run_with(relative: bool) -> Watcher:
        conversation = GlooConversation(life.job, [address(0)], ranks=hint(life, [0]))
        made = Watcher(conversation, life, [0], relative=relative)
        for begin in range(0, len(sents), batch):
            made.batch(sents[begin : begin + batch], gone=gone)
        made.finish()
        return made

    found = run_with(relative=False)
    late = not all(one.complete for one in found.of(Incarnation))
    if late:  # the start is gone: steps have numbers of their own
        found = run_with(relative=True)
    lost = found.lost_steps()
    for said, _ in found.wrong:
        assert said[1] - (found.shift or 0) in lost, (said, lost)
    if late:
        return
    concerned = concerned_steps(life, gone)
    if not strangers and len(set(bucket_sizes_of(life))) == len(life.buckets):
        told = lost | found.gaps("gradient")
        whole = found.whole_steps()
        assert whole.isdisjoint(told)
        ends = max(one.tag for one in gone) == len(life.collectives) - 1
        if min(concerned, default=0) >= 2 and not ends:  # the start, and the rebuilt buckets, are there
            assert told <= {step + late for step in concerned for late in range(3)}, (told, concerned)
            assert whole | told >= steps_of(life) - {life.steps - 1}, (whole, told, concerned)


def bucket_sizes_of(life: Life) -> list[int]:
    trainable = [one for one in life.job.parameters if one.trainable]
    return [sum(trainable[index].nbytes for index in bucket) for bucket in life.buckets]


def concerned_steps(life: Life, gone: list[Sent]) -> set[int]:
    """Steps, from the first to the last, in which something is gone."""
    step_of = []
    step = -1
    for one in life.collectives:
        if one.label is not None:
            step = max(step, one.label[1])
        step_of.append(step)
    steps = {step_of[one.tag] for one in gone}
    return set(range(min(steps), max(steps) + 1)) if steps else set()


# -- begins and ends ---------------------------------------------------------------------------------------------------


def test_a_capture_that_begins_in_the_middle_says_so_and_waits_for_a_restart() -> None:
    life = Life(small_job(), steps=40, rebuilt=((1, 0), (3, 2)))
    found = watcher(life, [0])
    sents = heads(life)
    for at in range(len(sents) // 2, len(sents), 40):
        found.batch(sents[at : at + 40], late=True)
    assert [one.complete for one in found.of(Incarnation)] == [False]
    assert found.lost_steps() == {0, 1}
    assert any("in the buckets that DDP's rule makes" in one.why for one in found.of(LostStep))
    assert found.whole_steps() == set()
    again = Watcher(found.conversation, Life(life.job, steps=3, seed=5), [0], first_flow=100)
    again.batch(heads(again.life, 1))
    again.finish()
    assert again.wrong == []
    assert [one.complete for one in again.of(Incarnation)] == [True]
    assert again.whole_steps() == {0, 1, 2}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("buffers", [False, True])
def test_a_late_capture_that_knows_the_buckets_numbers_the_steps(ranks: int, buffers: bool) -> None:
    life = Life(small_job(ranks=ranks, buffers=buffers), steps=9, seed=3)
    assert len(life.buckets) > 1
    found = watcher(life, [0], buckets=life.buckets, ranks={address(0): 0})
    sents = heads(life)
    found.batch(sents[len(sents) // 2 :], late=True)
    found.finish()
    assert found.wrong == []
    assert found.whole_steps() >= {7, 8}
    assert min(found.whole_steps()) > 3


LATE = {
    "plain": {},
    "unused": {"ddp": DdpSettings(find_unused_parameters=True, first_cap=1024, cap=2048)},
    "caps": {"ddp": DdpSettings(first_cap=1024, cap=2048)},
    "caps, no buffers": {"ddp": DdpSettings(first_cap=1024, cap=2048), "buffers": False},
    "one bucket, no buffers": {"buffers": False},
    "static": {"ddp": DdpSettings(static_graph=True, first_cap=1024, cap=2048)},
    "bf16": {"ddp": DdpSettings(hook="bf16", first_cap=1024, cap=2048)},
}


def late(life: Life, sents: list[Sent], batch: int) -> Watcher:
    """All of a life that comes after a cut; only the watched rank's number is known."""
    ranks = {address(0): 0}
    found = Watcher(GlooConversation(life.job, [address(0)], ranks=ranks), life, [0], relative=True)
    for at in range(0, len(sents), batch):
        found.batch(sents[at : at + batch], late=True)
    found.finish()
    return found


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(2, 3),
    cut=st.floats(0.15, 0.5),
    name=st.sampled_from(sorted(LATE)),
    batch=st.integers(5, 60),
)
def test_a_late_capture_finds_where_a_step_begins(seed: int, ranks: int, cut: float, name: str, batch: int) -> None:
    """Whatever came before it, strangers too: steps have numbers of their own, in order, nothing is placed wrong."""
    job = small_job(ranks=ranks, **LATE[name])
    life = Life(job, steps=14, seed=seed, strangers=0.05, stranger_sizes=(12,), rebuilt=likely_buckets(job))
    sents = heads(life, seed)
    found = late(life, sents[max(1, int(cut * len(sents))) :], batch)
    assert [one.complete for one in found.of(Incarnation)] == [False]
    assert found.wrong == []
    whole = sorted(found.whole_steps())
    if not any(one.label is None for one in life.collectives[len(life.collectives) // 3 :]):
        # Without strangers all steps are there from where it was found on, one after another.
        assert len(whole) >= 3, (found.events[:20], found.shift)
        assert found.shift is not None
        assert set(range(whole[0], whole[-1] + 1)) - set(whole) <= found.lost_steps()
        assert whole[-1] + found.shift >= life.steps - 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_late_capture_learns_its_rank_from_sizes(ranks: int) -> None:
    job = small_job((71, 305, 50, 1201), ranks=ranks, ddp=DdpSettings(first_cap=1024, cap=2048))
    life = Life(job, steps=12, seed=3, rebuilt=likely_buckets(job))
    sents = heads(life, 3)
    found = Watcher(GlooConversation(job, [address(0)]), life, [0], relative=True)
    for at in range(len(sents) // 3, len(sents), 30):
        found.batch(sents[at : at + 30], late=True)
    found.finish()
    assert found.wrong == []
    assert found.ranks[address(0)] == 0
    assert len(found.whole_steps()) >= 4


def test_a_late_capture_of_steps_with_several_reductions_says_that_it_cannot_tell() -> None:
    life = Life(small_job(reductions_per_step=2), steps=8)
    sents = heads(life)
    found = late(life, sents[len(sents) // 3 :], 40)
    assert any("several reductions" in one.why for one in found.of(LostStep))
    assert found.whole_steps() == set()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 3), cut=st.floats(0.05, 1))
def test_a_restart_is_another_incarnation(seed: int, ranks: int, cut: float) -> None:
    """Killed anywhere, and started again on new connections; the old ones are never closed."""
    life = Life(small_job(ranks=ranks), steps=4, seed=seed)
    found = watcher(life, [0])
    sents = heads(life, seed)
    sents = sents[: max(1, int(cut * len(sents)))]
    found.batch(sents)
    again = Watcher(found.conversation, Life(life.job, steps=3, seed=seed + 1), [0], first_flow=100)
    later = heads(again.life, seed)
    for begin in range(0, len(later), 30):
        again.batch(later[begin : begin + 30])
    again.finish()
    assert found.wrong == again.wrong == []
    assert again.incarnations == 1
    assert again.whole_steps() == {0, 1, 2}


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_difference_is_refused_by_the_parameters_name() -> None:
    life = Life(small_job((70, 300, 50, 1200)))
    other = small_job((70, 300, 60, 1200))
    found = Watcher(GlooConversation(other, [address(0)]), life, [0])
    found.batch(heads(life))
    found.finish()
    assert any("layer2.weight has shape (50,)" in text for text in found.contradictions), found.contradictions
    assert found.whole_steps() == set()


def test_another_number_of_parameters_is_refused() -> None:
    life = Life(small_job((70, 300, 50, 1200)))
    found = Watcher(GlooConversation(small_job((70, 300, 50)), [address(0)]), life, [0])
    found.batch(heads(life))
    found.finish()
    assert found.contradictions
    assert found.whole_steps() == set()


@pytest.mark.parametrize(("real", "described"), [(3, 2), (2, 3), (4, 3)])
def test_another_world_is_refused(real: int, described: int) -> None:
    life = Life(small_job(ranks=real))
    found = Watcher(GlooConversation(small_job(ranks=described), [address(0)]), life, [0])
    sents = heads(life)
    for at in range(0, len(sents), 10):
        found.batch(sents[at : at + 10])
    found.finish()
    assert any("ranks" in text for text in found.contradictions), found.contradictions
    assert found.wrong == []
    assert found.whole_steps() == set()


def test_a_wrong_watch_is_contradicted() -> None:
    life = Life(small_job(ranks=3))
    found = Watcher(GlooConversation(life.job, [address(2)]), life, [0])
    found.batch(heads(life))
    assert any(address(0) in text and address(2) in text for text in found.contradictions), found.contradictions


def test_memory_does_not_follow_what_heads_say() -> None:
    """Tags, sizes and counts that no training has."""
    job = small_job()
    life = Life(job, steps=3)
    found = watcher(life, [0])
    sents = heads(life)
    found.batch(sents[: len(sents) // 2])
    conversation = found.conversation
    flow = found.flow(0, 1)
    chance = random.Random(1)
    for number in range(20_000):
        slot = chance.choice([2, 4, 6, 7, 255]) << 56 | chance.getrandbits(32) << 24 | chance.choice([0, 0, 1])
        conversation.head(flow, 1_000_000 + number, slot, chance.randrange(4), chance.getrandbits(48))
        conversation.place(flow, 1_000_000 + number)
    assert isinstance(conversation, GlooConversation)
    (inner,) = conversation._lives
    assert len(inner._seen.tags) < 30_000
    assert len(conversation.take()) < 100
