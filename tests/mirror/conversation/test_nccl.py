"""A conversation over NCCL against lives that are written apart from it, in rings of several ranks and channels."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgood.mirror.conversation.expected import Item
from lastgood.mirror.conversation.nccl import NcclConversation
from lastgood.mirror.conversation.nccl_plan import NcclPlan
from lastgood.mirror.conversation.places import CONTENT_KINDS, Event, Expect, Incarnation, LostStep, Place
from lastgood.mirror.job.description import Backend, DdpSettings, JobDescription
from lastgood.mirror.streams.messages import DATA, Flow
from tests.mirror.support.ddp_life import Collective, Life
from tests.mirror.support.small_job import small_job

TYPES = {1: "int8", 4: "float32", 8: "int64"}


@dataclass(frozen=True)
class Sent:
    rank: int
    channel: int
    tag: int
    begin: int
    end: int
    nbytes: int
    final: bool


def job_of(ranks: int, channels: int, protocol: str = "", **more: object) -> JobDescription:
    backend = Backend(kind="nccl", version="2.28", channels=channels, protocol=protocol)  # type: ignore[arg-type]
    return small_job((700, 3000, 50_000, 1200), ranks=ranks, backend=backend, **more)


def sends(life: Life, watched: int, seed: int) -> list[Sent]:
    """What passes the port of a rank, which is at both ends of what it sends and what the one before it sends."""
    chance = random.Random(seed)
    plan = NcclPlan(life.job)
    found: list[Sent] = []
    for tag, one in enumerate(life.collectives):
        item = Item(one.op, "other", one.nbytes, TYPES[one.item], 0, "gradients", 0)  # type: ignore[arg-type]
        # Large buffers go over all channels, small ones over some.
        all_of_them = life.job.backend.channels
        variants = plan.variants(item)
        variant = chance.choice([one for one in variants if one[1] == all_of_them or one_of_few(item)])
        queues = []
        for rank, channel in plan.roles:
            if watched in (rank, (rank + 1) % life.job.ranks):
                messages = plan.of(item, variant, (rank, channel), {})
                queues.append([Sent(rank, channel, tag, m.begin, m.end, m.nbytes, m.final) for m in messages])
        while queues := [queue for queue in queues if queue]:
            found.append(chance.choice(queues).pop(0))
    return found


def one_of_few(item: Item) -> bool:
    """Whether NCCL may use fewer channels."""
    return (item.nbytes or 0) < 40_000


class Port:
    """Says heads, and keeps what is answered."""

    def __init__(self, conversation: NcclConversation, life: Life, first_flow: int = 0) -> None:
        self.conversation, self.life, self.first = conversation, life, first_flow
        self.events: list[Event] = []
        self.expected: dict[int, Expect] = {}
        self.covered: dict[int, set[int]] = {}
        self.wrong: list[tuple[Expect, Collective]] = []
        self._flows: dict[tuple[int, int], int] = {}
        self._count: dict[int, int] = {}
        self._waiting: list[tuple[int, int, Sent]] = []
        self._told: set[int] = set()

    def open(self, roles: list[tuple[int, int]], seed: int) -> None:
        random.Random(seed).shuffle(roles)
        for number, (rank, channel) in enumerate(roles, self.first):
            ranks = self.life.job.ranks
            there = f"10.0.0.{(rank + 1) % ranks}"
            self.conversation.opened(Flow(number, "nccl-socket", f"10.0.0.{rank}", 5000 + number, there, 6000 + number))
            self._flows[rank, channel] = number

    def say(self, sents: list[Sent], lost: frozenset[int] = frozenset(), batch: int = 30) -> None:
        for at in range(0, len(sents), batch):
            losses = []
            for index, one in enumerate(sents[at : at + batch], at):
                flow = self._flows[one.rank, one.channel]
                number = self._count[flow] = self._count.get(flow, -1) + 1
                self.conversation.head(flow, number, 0, DATA, one.nbytes)
                if index in lost:
                    losses.append((flow, number, one.nbytes))
                else:
                    self._waiting.append((flow, number, one))
            self._place()
            for flow, number, nbytes in losses:
                self.conversation.lost(flow, number, 0, nbytes)
            self._listen()

    def resynced(self, missing: Sent) -> None:
        """As a parser says that it goes on after a message that is missing with its head."""
        self.conversation.resynced(self._flows[missing.rank, missing.channel], "a message is missing")
        self._listen()

    def _listen(self) -> None:
        for event in self.conversation.take():
            self.events.append(event)
            if isinstance(event, Expect):
                self.expected[event.collective], self.covered[event.collective] = event, set()

    def _place(self) -> None:
        again = True
        while again:
            again, left = False, []
            self._listen()
            for flow, number, one in self._waiting:
                answer = self.conversation.place(flow, number)
                if answer is None:
                    left.append((flow, number, one))
                elif isinstance(answer, Place):
                    self._put(answer, one)
                    again = True
            self._waiting = left

    def _put(self, place: Place, one: Sent) -> None:
        expected, truth = self.expected[place.collective], self.life.collectives[one.tag]
        said = (expected.kind, expected.step)
        bucket = expected.bucket if expected.kind == "gradient" else None
        label = truth.label if truth.label is None or bucket is not None else (*truth.label[:2], None)
        if label != (*said, bucket) or (place.begin, place.end) != (one.begin, one.end):
            self.wrong.append((expected, truth))
        covered = self.covered[place.collective]
        covered.update(range(place.begin, place.end, 2))
        complete = len(covered) * 2 >= expected.nbytes
        if expected.kind in CONTENT_KINDS and complete and place.collective not in self._told:
            self._told.add(place.collective)
            self.conversation.content(place.collective, truth.content)
            self._listen()

    def whole_steps(self) -> set[int]:
        steps: dict[int, list[bool]] = {}
        for number, one in self.expected.items():
            if one.kind == "gradient":
                steps.setdefault(one.step, []).append(len(self.covered[number]) * 2 >= one.nbytes)
        lost = {one.step for one in self.events if isinstance(one, LostStep)}
        return {step for step, found in steps.items() if all(found)} - lost


def roles_at(job: JobDescription, watched: int) -> list[tuple[int, int]]:
    return [role for role in NcclPlan(job).roles if watched in (role[0], (role[0] + 1) % job.ranks)]


@pytest.mark.parametrize(
    ("ranks", "watched", "channels"),
    [(2, 0, 1), (2, 1, 1), (3, 0, 1), (3, 1, 1), (3, 2, 1), (2, 0, 2), (2, 1, 2), (3, 0, 2), (3, 2, 2)],
)
@pytest.mark.parametrize("more", [{}, {"ddp": DdpSettings(find_unused_parameters=True)}, {"buffers": False}])
def test_every_step_is_complete(ranks: int, watched: int, channels: int, more: dict[str, object]) -> None:
    job = job_of(ranks, channels, **more)
    life = Life(job, steps=3, seed=ranks + watched)
    port = Port(NcclConversation(job), life)
    port.open(roles_at(job, watched), watched)
    port.say(sends(life, watched, 1))
    assert port.wrong == []
    assert [one for one in port.events if isinstance(one, LostStep)] == []
    assert port.whole_steps() == {0, 1, 2}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 3), gone=st.booleans(), batch=st.integers(1, 40))
@example(seed=197, ranks=3, gone=True, batch=1)
@example(seed=983, ranks=3, gone=True, batch=1)
def test_losses_never_give_a_wrong_place(seed: int, ranks: int, gone: bool, batch: int) -> None:
    """Payloads of some messages are lost, or a message is missing with its head, which parsers always say."""
    job = job_of(ranks, 1 + seed % 2)
    life = Life(job, steps=4, seed=seed)
    port = Port(NcclConversation(job), life)
    port.open(roles_at(job, 0), seed)
    all_sent = sends(life, 0, seed)
    chance = random.Random(seed)
    if gone:
        missing = chance.randrange(len(all_sent) // 2, len(all_sent))
        port.say(all_sent[:missing], batch=batch)
        reached = max(port.whole_steps(), default=-1) + 1
        port.resynced(all_sent[missing])
        port.say(all_sent[missing + 1 :], batch=batch)
        assert max(port.whole_steps(), default=-1) <= reached
    else:
        port.say(all_sent, frozenset(chance.sample(range(len(all_sent)), 2)), batch)
    assert port.wrong == []


def test_a_restart_is_another_incarnation() -> None:
    job = job_of(2, 2)
    conversation = NcclConversation(job)
    life = Life(job, steps=4, seed=1)
    port = Port(conversation, life)
    port.open(roles_at(job, 0), 1)
    all_sent = sends(life, 0, 1)
    port.say(all_sent[: len(all_sent) // 2])
    again = Port(conversation, Life(job, steps=2, seed=2), first_flow=50)
    again.open(roles_at(job, 0), 2)
    again.say(sends(again.life, 0, 2))
    assert port.wrong == again.wrong == []
    assert [one.number for one in (*port.events, *again.events) if isinstance(one, Incarnation)] == [0, 1]
    assert again.whole_steps() == {0, 1}
