"""A conversation over NCCL, on sockets or RoCE: communicators are told apart by when their flows were opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Final

from lastgood.mirror.conversation.nccl_life import NcclLife
from lastgood.mirror.conversation.places import IGNORED, Answer, Contradiction, Event, Incarnation, Place
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.streams.messages import DATA, Flow

__all__ = ["NcclConversation"]

_MOST_LIVES: Final = 16
_MOST_FLOWS: Final = 1 << 12
_FIRST_BYTES: Final = 8
"""Of each rank in DDP's first collective: how many parameters it has."""


class _OtherLife:
    """A communicator that flows may be of which came late; what it would say waits until that is certain."""

    def __init__(self, job: JobDescription, serials: Iterator[int], flows: int) -> None:
        self._told: list[Event | None] = []
        self._emit: Callable[[Event], None] = self._told.append
        self._begun: Callable[[NcclLife], None] = lambda _: self._told.append(None)
        self.life = NcclLife(job, lambda event: self._emit(event), serials, lambda life: self._begun(life), flows)

    def tell(self, emit: Callable[[Event], None], begun: Callable[[NcclLife], None]) -> None:
        """It is one: say all, and from now on at once."""
        self._emit, self._begun = emit, begun
        for event in self._told:
            if event is None:
                begun(self.life)
            else:
                emit(event)


class NcclConversation:
    """Follows a training over NCCL's ring, through its incarnations. See `places.Conversation`.

    `watched` are the addresses whose traffic is mirrored, empty if that is not known.
    """

    def __init__(self, job: JobDescription, watched: Sequence[str] = ()) -> None:
        self._job = job
        self._watched = frozenset(watched)
        rings = min(job.ranks, 2 * len(self._watched) or job.ranks)
        self._flows = rings * job.backend.channels * job.backend.queue_pairs
        """Of one communicator, if all of its channels are used: each watched rank's both directions."""
        self._events: list[Event] = []
        self._serials = count()
        self._incarnations = count()
        self._lives: list[NcclLife] = []
        self._life_of: dict[int, NcclLife] = {}
        self._active: NcclLife | None = None
        self._other: _OtherLife | None = None
        self._late: dict[int, Flow] = {}
        """Flows that came late and have not spoken."""

    def opened(self, flow: Flow) -> None:
        """A flow was found: of the newest communicator while flows of that may still come, or of a new one.

        One more between the same hosts that comes late may be a channel that was silent, or the next incarnation's,
        if it begins as one does: then both are followed.
        """
        if flow.transport not in ("nccl-socket", "roce") or len(self._life_of) >= _MOST_FLOWS:
            return
        newest = self._lives[-1] if self._lives and self._lives[-1].takes_more else None
        if newest is None and self._other is not None and self._other.life.takes_more:
            newest = self._other.life
        elif newest is None:
            newest = NcclLife(self._job, self._events.append, self._serials, self._begun, self._flows)
            self._add(newest)
        elif newest.has_collectives and newest.has_flow_like(flow):
            self._late[flow.index] = flow
        self._life_of[flow.index] = newest
        newest.opened(flow)

    def _speaks_late(self, flow: Flow, nbytes: int) -> None:
        """The first message of a flow that came late."""
        if self._other is None and nbytes == _FIRST_BYTES:
            self._other = _OtherLife(self._job, self._serials, self._flows)
        if self._other is not None and self._other.life.takes_more:
            self._other.life.opened(flow)

    def _add(self, life: NcclLife) -> None:
        self._lives.append(life)
        if len(self._lives) > _MOST_LIVES:
            old = next(one for one in self._lives if one is not self._active)
            self._lives.remove(old)
            for index in old.flows:
                self._life_of.pop(index, None)

    def _settle_other(self) -> None:
        """What came late is the next incarnation once it has shown the whole start of one, and is not if it cannot."""
        other = self._other
        if other is None or not (other.life.started or other.life.dead):
            return
        self._other = None
        if other.life.dead:
            return
        for index in other.life.flows:
            before = self._life_of[index]
            if before is not other.life:
                del before.flows[index]
            self._life_of[index] = other.life
        self._add(other.life)
        other.tell(self._events.append, self._begun)

    def _begun(self, life: NcclLife) -> None:
        if self._active is not None and self._active is not life:
            self._active.finish()
        self._active = life
        self._events.append(Incarnation(next(self._incarnations), True))
        pairs = [{one.flow.source, one.flow.destination} for one in life.flows.values()]
        if self._watched and not all(pair & self._watched for pair in pairs):
            self._events.append(
                Contradiction(
                    f"the training's traffic is that of {', '.join(sorted(set.union(*pairs)))}, and "
                    f"{', '.join(sorted(self._watched))} is watched: compare --watch with where the mirror is"
                )
            )

    def closed(self, flow: int) -> None:
        """Nothing more comes in this flow."""
        for life in self._lives_of(flow):
            life.closed(flow)

    def _lives_of(self, flow: int) -> list[NcclLife]:
        """The one that it counts for, and the one that it may be of."""
        found = [self._life_of[flow]] if flow in self._life_of else []
        if self._other is not None and flow in self._other.life.flows and self._other.life not in found:
            found.append(self._other.life)
        return found

    def head(self, flow: int, message: int, slot: int, opcode: int, nbytes: int) -> None:  # noqa: ARG002 - as `Conversation` has it
        """A message begins."""
        if opcode == DATA:
            if flow in self._late:
                self._speaks_late(self._late.pop(flow), nbytes)
            for life in self._lives_of(flow):
                life.head(flow, message, nbytes)
            self._settle_other()

    def lost(self, flow: int, message: int, offset: int, nbytes: int) -> None:  # noqa: ARG002 - as `Conversation` has it
        """Bytes of a message will never come in this flow."""
        for life in self._lives_of(flow):
            life.lost(flow, message)

    def resynced(self, flow: int, why: str) -> None:  # noqa: ARG002 - as `Conversation` has it
        """An unknown number of messages is missing in a flow."""
        for life in self._lives_of(flow):
            life.resynced()
        self._settle_other()

    def place(self, flow: int, message: int) -> Answer:
        """Where a message's payload belongs."""
        other = self._other
        if other is not None and flow in other.life.flows:
            found = self._life_of[flow].place(flow, message) if self._life_of[flow] is not other.life else None
            # Kept until it is certain whose it is.
            return found if isinstance(found, Place) else None
        return self._life_of[flow].place(flow, message) if flow in self._life_of else IGNORED

    def content(self, collective: int, data: bytes) -> None:
        """All bytes of a small collective."""
        for life in self._lives:
            life.content(collective, data)

    def finish(self) -> None:
        """The capture has ended."""
        for life in self._lives:
            life.finish()

    def take(self) -> Sequence[Event]:
        """What happened since the last call, in order."""
        found, self._events[:] = list(self._events), []
        return found
