"""One communicator of NCCL: its collectives by order and sizes, matched with the sequence that a training must have.

There are no tags. Each flow is one channel of one rank; which, is one of several hypotheses until sizes leave one. A
collective is known when one candidate of the sequence, in one protocol, is left that fits all flows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from lastgood.mirror.conversation.contents import content_fault
from lastgood.mirror.conversation.expected import CollectiveSequence, Item
from lastgood.mirror.conversation.nccl_flow import Cursor, NcclFlow
from lastgood.mirror.conversation.nccl_plan import NcclPlan, Role, Variant, match_roles
from lastgood.mirror.conversation.places import (
    CONTENT_KINDS,
    IGNORED,
    Answer,
    Buckets,
    Closed,
    Contradiction,
    Event,
    Expect,
    Learned,
    LostStep,
    Place,
    StepOpen,
)
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.streams.messages import Flow

__all__ = ["NcclLife"]

_MOST_WAITING: Final = 1 << 17
"""Messages of a flow that are not resolved."""
_MOST_PLACED: Final = 1 << 18
_TRIM_EVERY: Final = 4096
_JOIN_WITHIN: Final = 64
"""Collectives after which no flow is taken for a late one of the same communicator."""
_STAY_OPEN: Final = 16
"""Collectives that stay open for flows that lag or have not spoken."""
_TOLD_AFTER: Final = 64
"""Collectives by which sizes must have shown which of several queue pairs a flow is."""
_STRANGERS: Final = (1, 4, 8)
"""Bytes of all-reduces that are passed over: barriers, counts and flags."""


@dataclass
class _Known:
    item: Item
    variant: Variant
    collective: int
    before: Mapping[Role, int]
    """By rank and channel: messages of all collectives before it, where several queue pairs take turns."""
    stranger: bool = False


class NcclLife:
    """Follows one communicator from its first collective on."""

    def __init__(
        self,
        job: JobDescription,
        emit: Callable[[Event], None],
        serials: Iterator[int],
        begun: Callable[[NcclLife], None],
        most_flows: int,
    ) -> None:
        self._job = job
        self._emit = emit
        self._serials = serials
        self._begun = begun
        self._most_flows = most_flows
        self._plan = NcclPlan(job)
        self._sequence = CollectiveSequence(job)
        self.flows: dict[int, NcclFlow] = {}
        self._known: dict[int, _Known] = {}
        self._before: Mapping[Role, int] = {}
        """As `_Known.before`, of the next one."""
        self._count = 0
        """Collectives that are known; the oldest ones are forgotten."""
        self._noted: dict[int, tuple[int, int]] = {}
        """By flow: the collective, and which of its messages, whose place is noted next."""
        self._open: dict[int, tuple[Item, int]] = {}
        """By serial, with the index in what is known: until all flows have gone past it."""
        self._contents: dict[int, Item] = {}
        self.dead: str | None = None
        self.started = False
        self._step = -1
        self._buckets: tuple[tuple[int, ...], ...] | None = None
        self._learned = 0
        self._lost: set[int] = set()

    @property
    def takes_more(self) -> bool:
        """Whether a flow that is found now may belong to it: the other direction, or a channel that was silent.

        Such a flow is compared with all that is known, so that must still be there; the next incarnation's flows come
        long after, or after these have ended.
        """
        if self.dead is not None:
            return False
        waits = len(self.flows) < self._most_flows and not any(one.closed for one in self.flows.values())
        return not self._count or (waits and self._count <= _JOIN_WITHIN and 0 in self._known)

    @property
    def has_collectives(self) -> bool:
        """Whether any is known."""
        return self._count > 0

    def has_flow_like(self, flow: Flow) -> bool:
        """Whether one between the same hosts is known, in the same direction."""
        ends = (flow.source, flow.destination)
        return any((one.flow.source, one.flow.destination) == ends for one in self.flows.values())

    def opened(self, flow: Flow) -> None:
        """A flow of this communicator."""
        self.flows[flow.index] = NcclFlow(flow, roles={role: Cursor() for role in self._plan.roles})

    def closed(self, flow: int) -> None:
        """Nothing more comes in it."""
        self.flows[flow].closed = True
        if all(one.closed for one in self.flows.values()):
            self.finish()

    def head(self, flow: int, message: int, nbytes: int) -> None:
        """A message begins."""
        here = self.flows[flow]
        if self.dead is not None:
            return
        missing = message - here.due if here.flow.transport == "roce" else 0
        here.due = message + 1
        if missing > 0 and not self._pass_missing(here, message - missing, missing):
            self._die("messages are missing with their heads, and what they were of is not certain")
            return
        here.take(message, nbytes)
        if len(here.sizes) > _MOST_WAITING:
            self._trim(here)
        if len(here.sizes) > _MOST_WAITING:
            self._die("messages come that cannot be told")
            return
        self._follow(here)
        self._resolve()
        if len(here.sizes) % _TRIM_EVERY == 0 or len(here.places) > _MOST_PLACED:
            self._trim(here)

    def _pass_missing(self, here: NcclFlow, first: int, count: int) -> bool:
        """Messages whose numbers are certain, and whose heads are lost: whether they are all of one known collective.

        They are if that has begun in this flow, and has so many messages left. Otherwise they could be a stranger's,
        and what follows would be taken for its neighbours of the same size.
        """
        if len(here.roles) != 1:
            return False
        ((role, cursor),) = here.roles.items()
        begun = cursor.collective < self._count and cursor.message and cursor.at == here.heard
        if not begun:
            return False
        known = self._known[cursor.collective]
        if len(self._plan.of(known.item, known.variant, role, known.before)) - cursor.message < count:
            return False
        for number in range(first, first + count):
            here.take(number, None)
        return True

    def _trim(self, here: NcclFlow) -> None:
        """Forget what nothing asks for any more."""
        here.trim(_MOST_PLACED // 2)
        needed = min(cursor.collective for one in self.flows.values() for cursor in one.roles.values())
        needed = min(needed, *(index for index, _ in self._noted.values()), self._count)
        for index in [index for index in self._known if index < needed]:
            del self._known[index]

    # -- hypotheses ------------------------------------------------------------------------------------------------

    def _follow(self, here: NcclFlow) -> None:
        """Compare what a flow has with the collectives that are known; drop roles that do not fit."""
        before = len(here.roles)
        for role in list(here.roles):
            if not self._goes_on(here, role):
                del here.roles[role]
        if len(here.roles) < before:
            self._settle_ranks()
        if not here.roles:
            self._die("messages are missing, or are none of the training's: NCCL's traffic has no tags to go on by")
            return
        if len(here.roles) == 1:
            self._exclude(here)
            self._note_places(here)

    def _goes_on(self, here: NcclFlow, role: Role) -> bool:
        cursor, heard = here.roles[role], here.heard
        while cursor.collective < self._count:
            known = self._known[cursor.collective]
            plan = self._plan.of(known.item, known.variant, role, known.before)
            while cursor.message < len(plan) and cursor.at < heard:
                if here.sizes[cursor.at - here.first] not in (plan[cursor.message].nbytes, None):
                    return False
                cursor.newest = cursor.collective
                cursor.message += 1
                cursor.at += 1
            if cursor.message < len(plan):
                return True
            cursor.collective, cursor.message = cursor.collective + 1, 0
        return True

    def _settle_ranks(self) -> None:
        """What one address sends is sent by one rank, and the next address along the ring is the next rank."""
        ranks = self._job.ranks
        flows = [one for one in self.flows.values() if one.flow.source != one.flow.destination]
        again = True
        while again:
            again = False
            for here in flows:
                for other in flows:
                    ahead = {(here.flow.source, 0), (here.flow.destination, 1)}
                    for address, step in ahead:
                        if other.flow.source != address:
                            continue
                        mine = {rank for rank, _ in here.roles}
                        theirs = {rank for rank, _ in other.roles}
                        for one, allowed in (
                            (here, {(rank - step) % ranks for rank in theirs}),
                            (other, {(rank + step) % ranks for rank in mine}),
                        ):
                            wrong = [role for role in one.roles if role[0] not in allowed]
                            again = again or bool(wrong)
                            for role in wrong:
                                del one.roles[role]
        for one in flows:
            if len(one.roles) == 1:
                self._note_places(one)

    def _drop_silent_roles(self, here: NcclFlow) -> None:
        """The only flow between two hosts carries what is known, so it is no channel that had nothing of it to send."""
        ends = (here.flow.source, here.flow.destination)
        between = [one for one in self.flows.values() if (one.flow.source, one.flow.destination) == ends]
        speaks = [role for role, cursor in here.roles.items() if cursor.at]
        if len(between) == 1 and ends[0] != ends[1] and 0 < len(speaks) < len(here.roles):
            here.roles = {role: here.roles[role] for role in speaks}
            self._settle_ranks()

    def _exclude(self, here: NcclFlow) -> None:
        """A role that is certain is nobody else's."""
        (role,) = here.roles
        for other in self.flows.values():
            if other is not here and role in other.roles and len(other.roles) > 1:
                del other.roles[role]
                if len(other.roles) == 1:
                    self._exclude(other)
                    self._note_places(other)
        ranks = {next(iter(one.roles))[0]: one.flow.source for one in self.flows.values() if len(one.roles) == 1}
        if len(ranks) > self._learned:
            self._learned = len(ranks)
            self._emit(Learned(self._job.ranks, tuple((address, rank) for rank, address in sorted(ranks.items()))))

    def _note_places(self, here: NcclFlow) -> None:
        """Places of messages up to the cursor of the only role."""
        ((role, cursor),) = here.roles.items()
        position = here.placed
        index, message = self._noted.get(here.flow.index, (0, 0))
        while position < cursor.at:
            known = self._known[index]
            plan = self._plan.of(known.item, known.variant, role, known.before)
            if message == len(plan):
                index, message = index + 1, 0
                continue
            if not known.stranger:
                here.places[position] = known.collective, plan[message]
            position, message = position + 1, message + 1
        self._noted[here.flow.index] = index, message
        here.placed = position

    # -- the next collective ---------------------------------------------------------------------------------------

    def _resolve(self) -> None:
        while self.dead is None:
            options = self._options()
            if not options:
                return
            stranger = False
            possible = [one for one in options if self._fits(*one, shown=False)]
            if not possible:
                stranger = True
                possible = [one for one in self._strangers() if self._fits(*one, shown=False)]
            if not possible:
                if self._sequence.inside in ("start", "rebuild", "buffers") and self._sequence.give_up():
                    continue
                self._die("messages came that are none of the training's")
                return
            shown = [one for one in possible if self._fits(*one, shown=True)]
            if len(shown) > 1:
                shown = [one for one in shown if self._may_go_on(*one)]
            if len(shown) != 1:
                return  # more messages will tell
            self._accept(*shown[0], stranger)

    def _may_go_on(self, item: Item, variant: Variant) -> bool:
        """Whether what follows the messages of an option could be of what comes after it."""
        after = copy.copy(self._sequence)
        if item.kind != "other" or item.index >= 0:
            after.accept(item)
        later = self._options(after)
        then = self._plan.counted(item, variant, self._before)

        def goes_on(here: NcclFlow, role: Role) -> bool:
            if not self._role_fits(here, role, item, variant):
                return False
            cursor, plan = here.roles[role], self._plan.of(item, variant, role, self._before)
            rest = here.sizes[cursor.at - here.first + len(plan) :]
            if cursor.collective < self._count or not rest:
                return True
            plans = [self._plan.of(*one, role, then) for one in later]
            return any(not one or one[0].nbytes == rest[0] for one in plans)

        return not later or match_roles(
            {
                flow: [role for role in here.roles if goes_on(here, role)]
                for flow, here in self.flows.items()
                if here.sizes
            }
        )

    def _options(self, sequence: CollectiveSequence | None = None) -> list[tuple[Item, Variant]]:
        """Candidates of the sequence in each protocol; none while what comes depends on content."""
        found = []
        for item in (sequence or self._sequence).candidates():
            nbytes = item.nbytes
            if nbytes is None and item.kind == "sizes":
                nbytes = 16 * sum(len(self._job.parameters[index].shape) for index in self._job.trainable)
            if nbytes is None:
                nbytes = self._sequence.sizes_bytes
            if nbytes is None:
                return []
            sized = replace(item, nbytes=nbytes)
            found += [(sized, variant) for variant in self._plan.variants(sized)]
        return found

    def _strangers(self) -> list[tuple[Item, Variant]]:
        types = {1: "int8", 4: "int32", 8: "int64"}
        items = [Item("allreduce", "other", nbytes, types[nbytes], -1, "gradients", -1) for nbytes in _STRANGERS]
        return [(item, variant) for item in items for variant in self._plan.variants(item)]

    def _fits(self, item: Item, variant: Variant, *, shown: bool) -> bool:
        """Whether flows can have different roles so that all agree, and (`shown`) a message of it is there.

        A rank's channels go from one collective to the next together: what it sends for a later one comes after.
        """
        speaking = [one for one in self.flows.values() if one.heard]
        roles = {
            one.flow.index: [role for role in one.roles if self._role_fits(one, role, item, variant)]
            for one in speaking
        }
        if not shown:
            return match_roles(roles)
        return any(
            self._plan.of(item, variant, role, self._before)
            and self._waits(here, role)
            and match_roles({**roles, here.flow.index: [role]})
            for here in speaking
            for role in roles[here.flow.index]
        )

    def _waits(self, here: NcclFlow, role: Role) -> bool:
        """Whether a flow has messages of what is not known yet, if it has this role."""
        cursor = here.roles[role]
        return cursor.collective == self._count and cursor.at < here.heard

    def _role_fits(self, here: NcclFlow, role: Role, item: Item, variant: Variant) -> bool:
        cursor = here.roles[role]
        if cursor.collective < self._count:
            return True  # messages of earlier ones are still to come
        plan = self._plan.of(item, variant, role, self._before)
        for one, nbytes in zip(plan, here.sizes[cursor.at - here.first :], strict=False):
            if nbytes not in (one.nbytes, None):
                return False
        return True

    def _accept(self, item: Item, variant: Variant, stranger: bool) -> None:
        collective = next(self._serials)
        if not stranger:
            self._advance(item)
        self._known[self._count] = _Known(item, variant, collective, self._before, stranger or item.kind == "other")
        self._before = self._plan.counted(item, variant, self._before)
        if self._count == _TOLD_AFTER and self._job.backend.queue_pairs > 1:
            unsure = [
                one for one in self.flows.values() if len(one.roles) > 1 and any(c.at for c in one.roles.values())
            ]
            if unsure:
                why = "the queue pairs of a connection cannot be told apart by the sizes of their messages"
                self._emit(Contradiction(why))
                self._die(why)
                return
        self._count += 1
        if not stranger and item.kind != "other" and self.dead is None:
            assert item.nbytes is not None
            self._open[collective] = item, self._count - 1
            if item.kind in CONTENT_KINDS:
                self._contents[collective] = item
            self._emit(Expect(collective, item.kind, item.nbytes, item.dtype, item.step, item.bucket, item.tensors))
        for here in list(self.flows.values()):
            if self.dead is None:
                self._drop_silent_roles(here)
                self._follow(here)
        passed = min((cursor.passed for one in self.flows.values() for cursor in one.roles.values()), default=0)
        if len(self.flows) < self._most_flows:
            passed = 0  # what has not spoken yet may carry the rest
        passed = max(passed, self._count - _STAY_OPEN)
        for number in [number for number, (_, index) in self._open.items() if index < passed]:
            del self._open[number]
            self._emit(Closed(number))

    def _advance(self, item: Item) -> None:
        if item.group == "start":
            if item.index == 2 and not self.started:
                self.started = True
                self._begun(self)
        elif item.step > self._step:
            self._step = item.step
            self._emit(StepOpen(item.step))
        if item.group == "gradients" and self._sequence.inside is None and self._buckets is not self._sequence.buckets:
            rebuilt = self._buckets is not None
            self._buckets = self._sequence.buckets
            self._emit(Buckets(item.step, self._sequence.buckets, rebuilt))
        if item.group == "buffers" and item.index == 0 and self._sequence.buffers_repeated:
            self._emit(LostStep(item.step, "buffers were broadcast more than once before it", "buffers"))
        self._sequence.accept(item)

    # -- answers ---------------------------------------------------------------------------------------------------

    def place(self, flow: int, message: int) -> Answer:
        """Where a message's payload belongs."""
        here = self.flows[flow]
        number = here.numbers.get(message)
        if number is None:
            return IGNORED
        found = here.places.get(number)
        if found is None:
            return IGNORED if self.dead is not None or number < here.placed else None
        collective, one = found
        return Place(collective, one.begin, one.end, True) if one.final else IGNORED

    def lost(self, flow: int, message: int) -> None:
        """Bytes of a message are lost. With two ranks they do not pass again."""
        here = self.flows[flow]
        found = here.places.get(here.numbers.get(message, -1))
        if found is None or not found[1].final or self._job.ranks > 2:
            return
        item, _ = self._open.get(found[0], (None, 0))
        if item is not None and item.group == "gradients":
            self._lose(item.step, "bytes of it are lost, and they pass only once")

    def resynced(self) -> None:
        """Messages are missing."""
        self._die("messages are missing, and NCCL's traffic has no tags to go on by")

    def content(self, collective: int, data: bytes) -> None:
        """All bytes of a small collective."""
        item = self._contents.pop(collective, None)
        if item is None or self.dead is not None:
            return
        wrong = content_fault(self._job, self._sequence, item.kind, data)
        if wrong is not None:
            self._emit(Contradiction(wrong))
            self._die(wrong)
        self._resolve()

    def finish(self) -> None:
        """Nothing more comes."""
        for number in sorted(self._open):
            self._emit(Closed(number))
        self._open.clear()

    def _die(self, why: str) -> None:
        if self.dead is None:
            self.dead = why
            if self.started:
                steps = {item.step for item, _ in self._open.values() if item.group == "gradients"}
                for step in sorted({*steps, max(self._sequence.step, 0)}):
                    self._lose(step, why)
            self.finish()

    def _lose(self, step: int, why: str) -> None:
        if step not in self._lost:
            self._lost.add(step)
            self._emit(LostStep(step, why))
