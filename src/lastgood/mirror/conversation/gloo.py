"""A conversation over Gloo: process groups are told apart by their connections, and one of them is the training's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final

from lastgood.mirror.conversation.expected import known_buckets
from lastgood.mirror.conversation.gloo_life import GlooLife
from lastgood.mirror.conversation.places import IGNORED, Answer, Contradiction, Event, Incarnation
from lastgood.mirror.conversation.ranks import RankFinder
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.streams.messages import Flow

__all__ = ["GlooConversation"]

_MOST_LIVES: Final = 64
_MOST_FLOWS: Final = 1 << 14


class GlooConversation:
    """Follows a training over Gloo, through its incarnations. See `places.Conversation`.

    `watched` are the addresses whose traffic is mirrored, empty if that is not known. `ranks` are addresses whose rank
    is known before, `buckets` those of an earlier incarnation: they let a capture follow that begins in the middle.
    """

    def __init__(
        self,
        job: JobDescription,
        watched: Sequence[str] = (),
        *,
        ranks: Mapping[str, int] | None = None,
        buckets: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._job = job
        self._watched = frozenset(watched)
        self._ranks = dict(ranks or {})
        self._known = None if buckets is None else known_buckets(job, buckets)
        self._events: list[Event] = []
        self._serials = count()
        self._incarnations = count()
        self._lives: list[GlooLife] = []
        self._life_of: dict[int, GlooLife] = {}
        self._ends: dict[int, frozenset[tuple[str, int]]] = {}
        self._active: GlooLife | None = None

    def opened(self, flow: Flow) -> None:
        """A flow was found: of a group that has no connection between these two yet, or of a new one."""
        if flow.transport != "gloo" or len(self._life_of) >= _MOST_FLOWS:
            return
        ends = frozenset({(flow.source, flow.source_port), (flow.destination, flow.destination_port)})
        reverse = next(
            (index for index, one in self._ends.items() if one == ends and not self._flow_closed(index)), None
        )
        if reverse is not None:
            life = self._life_of[reverse]
        else:
            life = next((one for one in self._lives if one.takes(flow)), None) or self._new_life()
        self._life_of[flow.index], self._ends[flow.index] = life, ends
        life.opened(flow)

    def _new_life(self) -> GlooLife:
        life = GlooLife(
            self._job,
            self._events.append,
            self._serials,
            self._begun,
            RankFinder(self._job.ranks, self._ranks),
            self._known,
        )
        self._lives.append(life)
        if len(self._lives) > _MOST_LIVES:
            old = next(one for one in self._lives if one is not self._active)
            self._lives.remove(old)
            for flow in old.flows:
                self._life_of.pop(flow, None)
                self._ends.pop(flow, None)
        return life

    def _flow_closed(self, flow: int) -> bool:
        return self._life_of[flow].flows[flow].closed

    def _begun(self, life: GlooLife, complete: bool) -> bool:
        """A group has shown the start of the training, or was found in the middle: whether it is the training now."""
        if not complete and self._active is not None and self._active.dead is None:
            return False
        if self._active is not None and self._active is not life:
            self._active.finish()
        self._active = life
        self._events.append(Incarnation(next(self._incarnations), complete))
        self._compare_watched(life)
        return True

    def _compare_watched(self, life: GlooLife) -> None:
        pairs = [{one.flow.source, one.flow.destination} for one in life.flows.values()]
        if not self._watched or all(pair & self._watched for pair in pairs):
            return
        everywhere = set.intersection(*pairs)
        seen = ", ".join(sorted(everywhere or set.union(*pairs)))
        self._events.append(
            Contradiction(
                f"the training's traffic is that of {seen}, and {', '.join(sorted(self._watched))} is watched: "
                "compare --watch with where the mirror is"
            )
        )

    def closed(self, flow: int) -> None:
        """Nothing more comes in this flow."""
        life = self._life_of.get(flow)
        if life is not None:
            life.closed(flow)

    def head(self, flow: int, message: int, slot: int, opcode: int, nbytes: int) -> None:
        """A message begins."""
        life = self._life_of.get(flow)
        if life is not None:
            life.head(flow, message, slot, opcode, nbytes)

    def lost(self, flow: int, message: int, offset: int, nbytes: int) -> None:  # noqa: ARG002 - as `Conversation` has it
        """Bytes of a message will never come in this flow."""
        life = self._life_of.get(flow)
        if life is not None:
            life.lost(flow, message)

    def resynced(self, flow: int, why: str) -> None:  # noqa: ARG002 - as `Conversation` has it
        """An unknown number of messages is missing in a flow."""
        life = self._life_of.get(flow)
        if life is not None:
            life.resynced(flow)

    def place(self, flow: int, message: int) -> Answer:
        """Where a message's payload belongs."""
        life = self._life_of.get(flow)
        return IGNORED if life is None else life.place(flow, message)

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
        for life in self._lives:
            life.taken()
        found, self._events[:] = list(self._events), []
        return found
