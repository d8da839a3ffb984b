"""A conversation over NCCL, on sockets or RoCE: communicators are told apart by when their flows were opened."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

from lastgood.mirror.conversation.nccl_life import NcclLife
from lastgood.mirror.conversation.places import IGNORED, Answer, Contradiction, Event, Incarnation
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.streams.messages import DATA, Flow

__all__ = ["NcclConversation"]

_MOST_LIVES: Final = 16
_MOST_FLOWS: Final = 1 << 12


class NcclConversation:
    """Follows a training over NCCL's ring, through its incarnations. See `places.Conversation`.

    `watched` are the addresses whose traffic is mirrored, empty if that is not known.
    """

    def __init__(self, job: JobDescription, watched: Sequence[str] = ()) -> None:
        self._job = job
        self._watched = frozenset(watched)
        rings = min(job.ranks, 2 * len(self._watched) or job.ranks)
        self._flows = rings * job.backend.channels
        """Of one communicator, if all of its channels are used: each watched rank's both directions."""
        self._events: list[Event] = []
        self._serials = count()
        self._incarnations = count()
        self._lives: list[NcclLife] = []
        self._life_of: dict[int, NcclLife] = {}
        self._active: NcclLife | None = None

    def opened(self, flow: Flow) -> None:
        """A flow was found: of the newest communicator while flows of that may still come, or of a new one."""
        if flow.transport not in ("nccl-socket", "roce") or len(self._life_of) >= _MOST_FLOWS:
            return
        if not self._lives or not self._lives[-1].takes_more:
            self._lives.append(NcclLife(self._job, self._events.append, self._serials, self._begun, self._flows))
            if len(self._lives) > _MOST_LIVES:
                old = next(one for one in self._lives if one is not self._active)
                self._lives.remove(old)
                for index in old.flows:
                    self._life_of.pop(index, None)
        self._life_of[flow.index] = self._lives[-1]
        self._lives[-1].opened(flow)

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
        if flow in self._life_of:
            self._life_of[flow].closed(flow)

    def head(self, flow: int, message: int, slot: int, opcode: int, nbytes: int) -> None:  # noqa: ARG002 - as `Conversation` has it
        """A message begins."""
        if flow in self._life_of and opcode == DATA:
            self._life_of[flow].head(flow, message, nbytes)

    def lost(self, flow: int, message: int, offset: int, nbytes: int) -> None:  # noqa: ARG002 - as `Conversation` has it
        """Bytes of a message will never come in this flow."""
        if flow in self._life_of:
            self._life_of[flow].lost(flow, message)

    def resynced(self, flow: int, why: str) -> None:  # noqa: ARG002 - as `Conversation` has it
        """An unknown number of messages is missing in a flow."""
        if flow in self._life_of:
            self._life_of[flow].resynced()

    def place(self, flow: int, message: int) -> Answer:
        """Where a message's payload belongs."""
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
