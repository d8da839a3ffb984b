"""What ranks agree on, held to naive twins, and whole jobs of random lives in which nothing global may be lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.agreement.decide import Fate, Held, Tally, begin
from lastgood.checkpointers.agreement.messages import cut, report_of, said_report
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, NoCheckpoint, NoGoodCheckpoint
from lastgood.storage.global_commit import retained_sequences
from lastgood.wire.frames import HEADER_BYTES, message_frame, parse_header, parse_message
from tests.checkpointers.support.rank_reports import JOB, report

OTHER = "cd" * 16


# -- the tally ---------------------------------------------------------------------------------------------------------

happenings = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from(["commit", "commit", "commit", "void"])),
    max_size=60,
)


class NaiveTally:
    """Says of every step what became of it, from the whole history, anew each time."""

    def __init__(self, world):
        self.world = world
        self.history = []

    def fates(self):
        fates, commits, newest = {}, {}, -1
        for rank, step, what in self.history:
            if step in fates:
                continue
            if step < newest:
                fates[step] = Fate.SUPERSEDED
            elif what == "void":
                fates[step] = Fate.FAILED
            else:
                commits.setdefault(step, set()).add(rank)
                if commits[step] == set(range(self.world)):
                    fates[step] = Fate.GLOBAL
                    newest = step
                    for older in commits:
                        if older < step and older not in fates:
                            fates[older] = Fate.SUPERSEDED
        return fates


@settings(max_examples=500)
@given(st.integers(1, 4), happenings)
@example(2, [(0, 1, "commit"), (0, 2, "commit"), (1, 2, "commit")])
def test_the_tally_is_as_a_naive_one(world, history):
    tally, naive, told = Tally(world), NaiveTally(world), {}
    for rank, step, what in history:
        rank %= world
        naive.history.append((rank, step, what))
        decided = tally.commit(rank, step) if what == "commit" else tally.void(step, Fate.FAILED, "why")
        for one in decided:
            assert one.step not in told, "a fate is told once and never changes"
            told[one.step] = one.fate
        assert told == naive.fates()
        for known in told:
            assert tally.fate(known).fate is told[known]
        waiting = tally.waiting()
        if waiting is not None:
            assert waiting[0] not in told and waiting[1], "someone is waited for"


def test_a_tally_stays_small_and_answers_for_what_it_forgot():
    tally = Tally(2)
    for step in range(5000):
        tally.commit(0, step)
        tally.commit(1, step)
    assert len(tally.decided) <= 1024
    assert tally.fate(3).fate is Fate.SUPERSEDED
    assert tally.fate(4999).fate is Fate.GLOBAL
    lonely = Tally(2)
    for step in range(3000):
        lonely.commit(0, step)
    assert lonely.fate(0).fate is Fate.FAILED
    assert lonely.commit(1, 2999)[0].fate is Fate.GLOBAL


# -- the beginning -----------------------------------------------------------------------------------------------------

identities = st.tuples(st.integers(1, 3), st.integers(1, 5))
helds = st.builds(
    lambda identity, bad, restarts: Held(*identity, bad, "spike" if bad else "", restarts),
    identities,
    st.booleans(),
    st.integers(0, 3),
)


@given(
    st.lists(st.lists(helds, max_size=6, unique_by=lambda one: one.identity), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 3)),
    st.booleans(),
)
def test_the_choice_is_as_a_naive_one(ranks, limit, good_only):
    reports = [
        report(rank, len(ranks), held, max_failed_restarts=limit, good_only=good_only)
        for rank, held in enumerate(ranks)
    ]
    everyone = [
        identity
        for identity in sorted({one.identity for held in ranks for one in held})
        if all(any(one.identity == identity for one in held) for held in ranks)
    ]
    allowed = []
    for identity in everyone:
        mine = [one for held in ranks for one in held if one.identity == identity]
        if good_only and any(one.bad for one in mine):
            continue
        if limit is not None and any(one.restarts >= limit for one in mine):
            continue
        allowed.append(identity)
    if everyone and not allowed:
        with pytest.raises(NoGoodCheckpoint):
            begin(reports)
        return
    chosen = begin(reports[::-1])
    assert list(chosen.common) == everyone[::-1]
    assert list(chosen.candidates) == allowed[::-1]
    assert chosen.incarnation > max([one.incarnation for held in ranks for one in held], default=0)


def test_steps_of_a_dead_life_do_not_join_those_of_a_new_one():
    reports = [report(0, 2, [(1, 20), (1, 30)]), report(1, 2, [(1, 20), (2, 30)])]
    chosen = begin(reports)
    assert chosen.common == ((1, 20),)
    assert chosen.incarnation == 3
    with pytest.raises(NoCheckpoint, match=r"step 30 is complete on all ranks; steps that are: \[20\]"):
        begin([report(0, 2, [(1, 20), (1, 30)], step=30), report(1, 2, [(1, 20), (2, 30)], step=30)])


def test_a_new_job_begins_from_nothing():
    chosen = begin([report(rank, 3, job=None) for rank in range(3)])
    assert (chosen.job_id, chosen.incarnation, chosen.candidates, chosen.common) == (None, 1, (), ())
    # Some had made their directories when the first life ended.
    assert begin([report(0, 2), report(1, 2, job=None)]).job_id == JOB


def test_a_job_that_never_had_a_whole_checkpoint_begins_anew_and_says_so():
    chosen = begin([report(0, 2, [(1, 10)]), report(1, 2)])
    assert chosen.candidates == () and chosen.incarnation == 2
    assert "rank 0 on host0" in chosen.notes[0]


@pytest.mark.parametrize(
    ("reports", "error", "words"),
    [
        ([report(0, 2, [(1, 10)]), report(1, 2, job=None)], MismatchError, r"rank 1 on host1 \(/d/1\): nothing is"),
        ([report(0, 2, [(1, 10)]), report(1, 2, [(1, 10)], job=OTHER)], MismatchError, "several jobs: rank 0.*rank 1"),
        ([report(0, 2), report(1, 3)], MismatchError, "rank 1.*3 ranks.*2"),
        (
            [report(0, 3, [(1, 10)], wrote=(0, 2)), report(1, 3, [(1, 10)], wrote=(1, 2)), report(2, 3, job=None)],
            MismatchError,
            r"rank 0 on host0 .*of a job of 2 ranks, and this job has 3; .*resume_from",
        ),
        ([report(0, 2), report(1, 2, beside="slots lie there")], MismatchError, "rank 1 on host1 .*: slots lie there"),
        ([report(0, 2), report(1, 2, reached=10)], CorruptCheckpoint, "nothing whole: rank 0.*rank 1"),
        ([report(0, 2, step=10), report(1, 2)], MismatchError, "rank 1.*the newest.*step 10"),
        (
            [report(0, 2, [(1, 10)], mark=(1, 10)), report(1, 2, mark=(1, 10))],
            CorruptCheckpoint,
            "nothing whole: rank 1",
        ),
        (
            [report(0, 2, [(1, 10)]), report(1, 2, damaged=("slot-0001.lgs: torn",))],
            CorruptCheckpoint,
            r"rank 1.*slot-0001.lgs: torn",
        ),
        (
            [report(0, 2, [(1, 10), (2, 30)], mark=(2, 30)), report(1, 2, [(1, 10)])],
            MismatchError,
            r"rank 1 on host1.*step 10 of incarnation 1.*step 30 of incarnation 2.*older copy",
        ),
    ],
)
def test_what_cannot_begin_together_is_refused_by_name(reports, error, words):
    with pytest.raises(error, match=words):
        begin(reports)


def test_damage_on_one_rank_takes_all_back_and_is_told():
    held = [(2, 20), (2, 30)]
    chosen = begin(
        [report(0, 2, held, mark=(2, 30)), report(1, 2, [(2, 20)], damaged=("slot-0003.lgs: commit record",))]
    )
    assert chosen.candidates == ((2, 20),)
    assert "rank 1" in chosen.notes[0] and "step 30" in chosen.notes[0]


@given(st.lists(helds, max_size=8), st.one_of(st.none(), identities), st.one_of(st.none(), st.integers(0, 9)))
def test_a_report_is_the_same_after_a_journey(held, mark, step):
    there = report(3, 9, held, mark=mark, step=step, damaged=("slot: x",))
    assert report_of(said_report(there)) == there


@pytest.mark.parametrize("name", ["\udcff", "\ud83d\ude00"])
def test_a_name_that_is_no_utf8_leaves_the_message_readable(name):
    """Of a directory, or of an entry of the state in a reason: a message with half of a surrogate pair is refused."""
    there = replace(report(0, 2), directory=f"/runs/{name}", damaged=(f"state.{name}",))
    frame = message_frame({"kind": "join", "why": cut(f"state.{name}"), **said_report(there)})
    header = parse_header(frame[:HEADER_BYTES], "rank 0", "its report")
    content = parse_message(header, frame[HEADER_BYTES:], "rank 0")
    shown = name.encode(errors="backslashreplace").decode()
    assert content["why"] == cut(content["why"]) == f"state.{shown}"
    assert report_of(content).directory == f"/runs/{shown}"


def test_the_longest_report_fits_into_a_message():
    held = [Held(1 << 62, (1 << 62) + number, True, "\U0001f600" * 500, 1 << 30) for number in range(129)]
    longest = report(99999, 1 << 20, held, damaged=["\U0001f600" * 500] * 64)
    assert len(message_frame({"kind": "join", **said_report(longest)})) < 64 << 10


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@given(st.sampled_from(sorted(said_report(report(0, 1)))), json_values)
def test_a_report_with_any_field_spoilt_is_refused_or_sane(field_name, value):
    said = {**said_report(report(0, 1, [(1, 2)])), field_name: value}
    try:
        read = report_of(said)
    except CorruptCheckpoint:
        return
    assert read.rank >= 0 and all(one.step >= 0 for one in read.held)


# -- whole jobs --------------------------------------------------------------------------------------------------------


@dataclass
class Disk:
    """A rank's slots, as the store keeps them: `whole` by sequence, `known` those that all ranks hold."""

    whole: dict[int, tuple[int, int]] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    mark: tuple[int, int] | None = None
    sequence: int = 0
    highest: tuple[int, int] = (0, 0)


@dataclass
class Whole:
    sequence: int


SLOTS, KEEP = 4, 2


class SimulatedJob:
    def __init__(self, world):
        self.disks = [Disk() for _ in range(world)]
        self.newest_global = None
        self.life = 0
        self.begin()

    def begin(self):
        world = len(self.disks)
        chosen = begin(
            [
                report(rank, world, sorted(disk.whole.values()), mark=disk.mark, highest=disk.highest)
                for rank, disk in enumerate(self.disks)
            ]
        )
        if self.newest_global is not None:
            assert chosen.candidates and chosen.candidates[0] >= self.newest_global, "a global checkpoint was lost"
        for disk in self.disks:
            if chosen.candidates:
                assert chosen.candidates[0] in disk.whole.values(), "a mixed set"
            disk.known = {sequence for sequence, identity in disk.whole.items() if identity in chosen.common}
            disk.whole = {sequence: disk.whole[sequence] for sequence in disk.known}
            if chosen.common:
                disk.mark = chosen.common[0]
        self.life = chosen.incarnation
        self.newest_global = chosen.common[0] if chosen.common else None
        self.step = chosen.candidates[0][1] if chosen.candidates else 0
        self.tally = Tally(world)
        self.heard = [[] for _ in range(world)]

    def commit(self, rank, step):
        """The rank writes its part, if it has a slot for it, and reports."""
        disk = self.disks[rank]
        if any(identity == (self.life, step) for identity in disk.whole.values()):
            return
        if step <= max((s for life, s in disk.whole.values() if life == self.life), default=-1):
            return
        whole = [Whole(sequence) for sequence in sorted(disk.whole, reverse=True)]
        stay = retained_sequences(whole, lambda sequence: False, KEEP, disk.known)
        free = [sequence for sequence in sorted(disk.whole) if sequence not in stay]
        if len(disk.whole) >= SLOTS:
            if not free:
                return
            del disk.whole[free[0]]
        disk.sequence += 1
        disk.whole[disk.sequence] = (self.life, step)
        disk.highest = max(disk.highest, (self.life, step))
        for decided in self.tally.commit(rank, step):
            if decided.fate is Fate.GLOBAL:
                self.newest_global = (self.life, decided.step)
            for heard in self.heard:
                heard.append(decided)

    def hear(self, rank):
        """The rank is told the next of what was decided."""
        if not self.heard[rank]:
            return
        decided, disk = self.heard[rank].pop(0), self.disks[rank]
        sequence = next((s for s, identity in disk.whole.items() if identity == (self.life, decided.step)), None)
        if sequence is None:
            return
        if decided.fate is Fate.GLOBAL:
            disk.known.add(sequence)
            disk.mark = (self.life, decided.step)
        else:
            del disk.whole[sequence]

    def void(self, rank, step):
        if any(identity == (self.life, step) for identity in self.disks[rank].whole.values()):
            return  # a commit is final
        for decided in self.tally.void(step, Fate.FAILED, "why"):
            for heard in self.heard:
                heard.append(decided)


@settings(max_examples=300)
@given(
    st.integers(2, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["commit"] * 6 + ["hear"] * 6 + ["void", "kill"]), st.integers(0, 2), st.integers(1, 4)
        ),
        max_size=120,
    ),
)
def test_no_history_loses_a_global_checkpoint_or_mixes_two(world, history):
    job = SimulatedJob(world)
    for what, rank, ahead in history:
        rank %= world
        if what == "kill":
            job.begin()
        elif what == "hear":
            job.hear(rank)
        elif what == "commit":
            job.commit(rank, job.step + ahead)
        else:
            job.void(rank, job.step + ahead)
    job.begin()


def test_what_is_kept_of_one_rank_is_as_before():
    whole = [Whole(sequence) for sequence in (9, 8, 7, 6)]
    assert retained_sequences(whole, lambda sequence: False, 2) == {9, 8}
    assert retained_sequences(whole, lambda sequence: sequence in (9, 8), 2) == {7, 9}
    assert retained_sequences(whole, lambda sequence: False, 2, {7, 6}) == {9, 8, 7, 6}
    assert retained_sequences(whole, lambda sequence: False, 1, {8, 7, 6}) == {9, 8}
    assert retained_sequences(whole, lambda sequence: False, 1, ()) == {9, 8, 7, 6}


def test_an_unknown_failure_has_a_class():
    from lastgood.checkpointers.agreement.decide import failure_class

    assert failure_class("MismatchError") is MismatchError
    assert failure_class({"no": "name"}) is CheckpointError
