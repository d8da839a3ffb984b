"""What was seen of a process group of Gloo: its flows, its tags, and what each tag was found to be.

In which order collectives must come is another question (`gloo_life`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal

from lastgood.mirror.conversation.expected import Item
from lastgood.mirror.conversation.gloo_flow import UNKNOWN, GlooFlow
from lastgood.mirror.conversation.gloo_tags import (
    OPERATIONS,
    Lookalikes,
    Tag,
    reduction_fits,
    sent_messages,
    size_fits,
)
from lastgood.mirror.conversation.places import (
    IGNORED,
    Answer,
    Closed,
    Contradiction,
    Event,
    Expect,
    LostStep,
    Place,
    StepOpen,
)
from lastgood.mirror.conversation.ranks import RankFinder
from lastgood.mirror.job.description import JobDescription

__all__ = ["MOST_LOST", "GlooSeen", "kind_of_loss"]

MOST_LOST: Final = 4096
"""Steps that are told as lost one by one, and remembered."""
_KEPT: Final = 1 << 14
"""Collectives that are known after they were closed."""
_MOST_CONTRADICTIONS: Final = 8

What = Literal["gradients", "buffers"]


class GlooSeen:
    """Flows and tags of one process group, and what is told of them to `emit`."""

    def __init__(
        self, job: JobDescription, emit: Callable[[Event], None], serials: Iterator[int], ranks: RankFinder
    ) -> None:
        self._job = job
        self._emit = emit
        self._serials = serials
        self.ranks = ranks
        self.flows: dict[int, GlooFlow] = {}
        self.tags: dict[int, Tag] = {}
        self.highest = -1
        self.lookalikes = Lookalikes(job.ranks)
        self.tells_losses = False
        """Whether it is the training's: its steps are told."""
        self._open: dict[int, None] = {}
        """Tags that are not closed."""
        self._closed: deque[int] = deque()
        self._by_serial: dict[int, int] = {}
        self._lost: set[tuple[int, str]] = set()
        self._contradictions = 0

    # -- tags ------------------------------------------------------------------------------------------------------

    def begin(self, tag: int, prefix: int) -> Tag:
        """A tag is seen for the first time."""
        known = self.tags[tag] = Tag(OPERATIONS.get(prefix))
        self._open[tag] = None
        return known

    def of(self, collective: int) -> Tag | None:
        """The tag of a collective that `accept` numbered, while it is known."""
        return self.tags.get(self._by_serial.get(collective, -1))

    def fits(self, known: Tag, item: Item) -> bool:
        """Whether all that was seen of a tag could be this collective."""
        if known.op != item.op:
            return False
        world = self._job.ranks
        for flow, sizes in known.sizes.items():
            source = self.flows[flow].flow.source
            if item.op == "allreduce":
                if not any(reduction_fits(item, world, rank, sizes) for rank in self.ranks.candidates(source)):
                    return False
            elif not all(size_fits(item, nbytes) for _, nbytes in sizes):
                return False
        return True

    def accept(self, tag: int, item: Item) -> list[tuple[int, int, int]]:
        """A tag is this collective. Returns its messages so far as (flow, ordinal, bytes), to be compared with it."""
        known = self.tags[tag]
        known.state, known.item, known.collective = "item", item, next(self._serials)
        self._by_serial[known.collective] = tag
        if item.kind != "other" and not self.is_lost(item):
            nbytes = item.nbytes
            if nbytes is None:
                nbytes = next(sizes[0][1] for sizes in known.sizes.values())
            self._emit(Expect(known.collective, item.kind, nbytes, item.dtype, item.step, item.bucket, item.tensors))
        sizes, known.sizes = known.sizes, {}
        return [(flow, ordinal, nbytes) for flow, seen in sizes.items() for ordinal, nbytes in seen]

    def drop_ahead(self) -> None:
        """Forget tags that are not resolved; close the others."""
        for tag in sorted(self._open):
            if self.tags[tag].state == "open":
                del self.tags[tag], self._open[tag]
            else:
                self.close(tag)

    def forget_before(self, first: int) -> None:
        """Forget open tags before this one."""
        for tag in [tag for tag in self._open if tag < first]:
            del self.tags[tag], self._open[tag]

    def close_old(self, following: int, behind: int) -> None:
        """Close collectives before tag `following` of which nothing more can come, and forget them.

        A rank begins a phase when it has finished the one before; a flow that stays silent is waited for until phase
        `behind` is over.
        """
        for tag in [tag for tag in self._open if tag < following]:
            known = self.tags[tag]
            item = known.item
            if item is not None and known.state == "item" and item.phase >= behind:
                flows = [one for one in self.flows.values() if one.rings or one.flow.index in known.flows]
                if not all(one.closed or one.phase > item.phase for one in flows):
                    continue
            self.close(tag)

    def close_all(self) -> None:
        """Nothing more comes of any of them."""
        for tag in sorted(self._open):
            self.close(tag)

    def close(self, tag: int) -> None:
        """Nothing more comes of a collective. It stays known for a while: pieces are asked for after many heads."""
        known = self.tags[tag]
        self._open.pop(tag, None)
        item = known.item
        if item is not None and item.group == "gradients":
            self.lookalikes.ended(item)
            if item.kind != "other" and not self.ranks.known():
                self.lose(item.step, "gradients", "no size shows which rank is watched, nor is it said (HOST=RANK)")
        if known.collective >= 0 and item is not None and item.kind != "other":
            self._emit(Closed(known.collective))
        self._closed.append(tag)
        if len(self._closed) > _KEPT:
            old = self._closed.popleft()
            gone = self.tags.pop(old)
            self.lookalikes.forget(old)
            self._by_serial.pop(gone.collective, None)
            for flow in gone.flows:
                self.flows[flow].forget(old)

    def found_world(self) -> int | None:
        """How many ranks an all-gather shows, if not as described: each rank sends two messages for each other one."""
        tag = next((tag for tag, one in self.tags.items() if one.item is not None and one.op == "allgather"), None)
        if tag is None:
            return None
        for index in self.tags[tag].flows:
            count = self.flows[index].count(tag)
            if count and count != 2 * (self._job.ranks - 1):
                return count // 2 + 1
        return None

    # -- places ----------------------------------------------------------------------------------------------------

    def place(self, flow: int, message: int) -> Answer:
        """Where a message's payload belongs."""
        here = self.flows[flow]
        said = here.said(message)
        known = self.tags.get(said.tag) if said is not None else None
        if said is None or known is None or known.state in ("stranger", "lost"):
            return IGNORED
        item = known.item
        if item is None:
            return None
        if item.kind == "other" or said.ordinal == UNKNOWN or self.is_lost(item):
            return IGNORED
        if item.op == "broadcast":
            return Place(known.collective, 0, said.nbytes, True)
        rank = self.ranks.rank(here.flow.source)
        if rank is None:
            return None
        if item.op == "allgather":
            return self._gathered(known.collective, rank, said.ordinal)
        assert item.nbytes is not None  # of all-reduces it is known
        message_sent = sent_messages(item.nbytes, item.item_bytes, self._job.ranks, rank)[said.ordinal]
        if not message_sent.final:
            return IGNORED
        return Place(known.collective, message_sent.begin, message_sent.end, True)

    def _gathered(self, collective: int, rank: int, ordinal: int) -> Answer:
        """The `ordinal`-th message of a rank in the all-gather of counts: two halves of each block."""
        block = (rank - ordinal // 2) % self._job.ranks
        begin = 8 * block + 4 * (ordinal % 2)
        return Place(collective, begin, begin + 4, True)

    def bytes_lost(self, flow: int, message: int) -> None:
        """Bytes of a message are lost here. If nobody else sends them to where we look, so is the step."""
        said = self.flows[flow].said(message)
        known = self.tags.get(said.tag) if said is not None else None
        place = self.place(flow, message)
        if said is None or known is None or known.item is None or not isinstance(place, Place) or not said.nbytes:
            return
        if known.item.op == "allreduce" and not self._others(flow, known.item, place):
            self.lose(known.item.step, "gradients", "bytes of it are lost, and they pass only once")

    def _others(self, flow: int, item: Item, place: Place) -> bool:
        """Whether the final bytes of a place come in another flow as well, as far as is known."""
        for index, other in self.flows.items():
            rank = self.ranks.rank(other.flow.source)
            if index == flow or other.closed:
                continue
            if rank is None:
                return True
            assert item.nbytes is not None
            for one in sent_messages(item.nbytes, item.item_bytes, self._job.ranks, rank):
                if one.final and one.begin == place.begin and other.rings:
                    return True
        return False

    # -- what is told ----------------------------------------------------------------------------------------------

    def open_step(self, step: int) -> None:
        """The first collective of a step."""
        if len(self._lost) > MOST_LOST:
            self._lost = {one for one in self._lost if one[0] >= step - MOST_LOST // 4}
        self._emit(StepOpen(step))

    def is_lost(self, item: Item) -> bool:
        """Whether nothing of it is waited for any more."""
        return (item.step, kind_of_loss(item)) in self._lost

    def lose(self, step: int, what: What, why: str) -> None:
        """Tell once that a step is lost."""
        if (step, what) not in self._lost and self.tells_losses:
            self._lost.add((step, what))
            self._emit(LostStep(step, why, what))

    def lose_to_stranger(self, item: Item) -> None:
        """Either of two may be the gradients."""
        self.lose(item.step, "gradients", "an all-reduce of the size of one of its buckets came beside them")

    def contradict(self, text: str) -> None:
        """The traffic is not that of the job description."""
        if self._contradictions < _MOST_CONTRADICTIONS:
            self._contradictions += 1
            self._emit(Contradiction(text))


def kind_of_loss(item: Item) -> What:
    """What a step lacks if this collective is missing."""
    return "buffers" if item.group == "buffers" else "gradients"
