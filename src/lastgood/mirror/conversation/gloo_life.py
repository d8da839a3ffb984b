"""One process group of Gloo: its collectives by tag, matched with the sequence that a training must have.

Tags count the collectives of a group from 0, without gaps. They are resolved in order: each is the next collective of
the sequence, a stranger that is passed over, or missing. What is certain stays certain; what could be two things costs
the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Final

from lastgood.mirror.conversation.contents import content_fault
from lastgood.mirror.conversation.expected import Buckets, CollectiveSequence, Item
from lastgood.mirror.conversation.gloo_flow import UNKNOWN, GlooFlow
from lastgood.mirror.conversation.gloo_late import LateStart
from lastgood.mirror.conversation.gloo_seen import MOST_LOST, GlooSeen, kind_of_loss
from lastgood.mirror.conversation.gloo_tags import (
    OPERATIONS,
    Tag,
    reduction_fits,
    size_fits,
)
from lastgood.mirror.conversation.places import (
    CONTENT_KINDS,
    IGNORED,
    Answer,
    Event,
    Learned,
)
from lastgood.mirror.conversation.places import Buckets as BucketsEvent
from lastgood.mirror.conversation.ranks import RankFinder
from lastgood.mirror.job.ddp import likely_buckets
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.streams.messages import DATA, READY_TO_RECEIVE, READY_TO_SEND, Flow

__all__ = ["GlooLife"]

_WINDOW: Final = 4096
"""Tags that are followed ahead of the first one that is not resolved."""
_AHEAD: Final = 4
"""A tag that was not seen while one so far ahead was is missing; threads begin them in order."""
_AHEAD_IF_SEEN: Final = 64
_MOST_MISSING: Final = 1 << 16
_YOUNG: Final = 64
"""Connections that are made at their first use come before so many collectives."""


class GlooLife:
    """Follows one process group, from its first collective on or from the middle."""

    def __init__(
        self,
        job: JobDescription,
        emit: Callable[[Event], None],
        serials: Iterator[int],
        begun: Callable[[GlooLife, bool], bool],
        ranks: RankFinder,
        known: Buckets | None,
    ) -> None:
        self._job = job
        self._emit = emit
        self._begun = begun
        self._sequence = CollectiveSequence(job, known)
        self._seen = GlooSeen(job, emit, serials, ranks)
        self._next = 0
        self.dead: str | None = None
        self._ended = False
        self._known = known
        self._late: bool | None = None
        self._late_start: LateStart | None = None
        """While it is looked for where a step begins."""
        self._wrong: str | None = None
        """What is not as described in the start that is seen now."""
        self._strangers = 0
        self._unsure = False
        self._crossed = False
        self._clean = False
        self._step_open = -1
        self._buckets: tuple[int, Buckets] | None = None
        self._resynced = False
        self._last_gradients: Item | None = None
        """If nothing of the training came since: a stranger of its size may have been taken for it."""
        self._missed = -2
        self._run = 0
        """How many tags in a row are missing, up to `_missed`."""

    @property
    def started(self) -> bool:
        """Whether it is the training's: its steps are told."""
        return self._seen.tells_losses

    @property
    def ranks(self) -> RankFinder:
        """Which ranks the addresses are."""
        return self._seen.ranks

    @property
    def flows(self) -> dict[int, GlooFlow]:
        """Its connections, one for each direction, by index."""
        return self._seen.flows

    # -- flows -----------------------------------------------------------------------------------------------------

    def takes(self, flow: Flow) -> bool:
        """Whether a new connection between these two may be one of this group."""
        pair = {flow.source, flow.destination}
        mine = ({one.flow.source, one.flow.destination} for one in self.flows.values())
        return self.dead is None and self._seen.highest < _YOUNG and pair not in mine

    def opened(self, flow: Flow) -> None:
        """A flow of this group."""
        self.flows[flow.index] = here = GlooFlow(flow)
        if not flow.detail.get("from_the_beginning", True):
            here.resync()
            self._resynced = True

    def closed(self, flow: int) -> None:
        """Nothing more comes in it."""
        self.flows[flow].closed = True
        self._close_old()

    def resynced(self, flow: int) -> None:
        """Messages are missing in it."""
        self.flows[flow].resync_pending = True
        self._resynced = True
        for item in self._seen.lookalikes.take():
            self._seen.lose_to_stranger(item)

    def taken(self) -> None:
        """What was parsed together with heads so far was said."""
        for flow in self.flows.values():
            flow.resync_pending = False

    def head(self, flow: int, message: int, slot: int, opcode: int, nbytes: int) -> None:
        """A message begins."""
        prefix, tag, delta = slot >> 56, slot >> 24 & 0xFFFFFFFF, slot & 0xFFFFFF
        silent = self.dead is not None or self._ended
        if silent or delta or not prefix or opcode not in (DATA, READY_TO_SEND, READY_TO_RECEIVE):
            return
        if tag >= self._next + _WINDOW and not self._jump(tag):
            return
        here = self.flows[flow]
        here.saw(tag, message)
        self._seen.highest = max(self._seen.highest, tag)
        known = self._seen.tags.get(tag)
        if known is None:
            if tag < self._next:
                return
            known = self._seen.begin(tag, prefix)
        if known.op != OPERATIONS.get(prefix):
            self._die(f"tag {tag} is of two operations: this is no process group of torch, or two in one connection")
            return
        if flow not in known.flows:
            known.flows.add(flow)
            if known.item is not None:
                self._reached(here, known.item.phase)
        if opcode == DATA:
            ordinal = here.data(message, tag, nbytes)
            here.rings = here.rings or known.op == "allreduce"
            if known.state == "open":
                known.note(flow, ordinal, nbytes)
            elif known.state == "item":
                self._check(known, here, ordinal, nbytes)
            elif known.state == "stranger":
                self._compare(tag, flow, ordinal, nbytes)
        self._resolve()

    def place(self, flow: int, message: int) -> Answer:
        """Where a message's payload belongs."""
        return IGNORED if self.dead is not None else self._seen.place(flow, message)

    def lost(self, flow: int, message: int) -> None:
        """Bytes of a message are lost here. If nobody else sends them to where we look, so is the step."""
        if self.dead is None:
            self._seen.bytes_lost(flow, message)

    # -- tags in order ---------------------------------------------------------------------------------------------

    def _resolve(self) -> None:
        while self.dead is None and (self._late_start is None or self._found_step(self._late_start)):
            known = self._seen.tags.get(self._next)
            if known is None or (known.op is not None and not known.sizes):
                if not self._is_missing(known):
                    return
                self._miss(known)
                continue
            candidates = self._sequence.candidates()
            if not candidates:
                if self._seen.highest >= self._next + _AHEAD_IF_SEEN:
                    self._die("the order of the rebuilt buckets was lost")
                return
            found = next((one for one in candidates if self._seen.fits(known, one)), None)
            if found is not None:
                self._accept(known, self._next, found)
                self._next += 1
            elif self._sequence.inside in ("start", "rebuild", "buffers"):
                self._given_up()
            else:
                self._pass(known)
                self._next += 1

    def _is_missing(self, known: Tag | None) -> bool:
        candidates = self._sequence.candidates()
        if candidates and candidates[0].nbytes == 0 and candidates[0].op == "allreduce":
            return self._seen.highest > self._next  # nothing is sent at all
        ahead = _AHEAD if known is None or self._resynced else _AHEAD_IF_SEEN
        return self._seen.highest >= self._next + ahead

    def _accept(self, known: Tag, tag: int, item: Item) -> None:
        begins = item.group != "start" and self._sequence.inside is None
        if item.group == "buffers" and item.index == 0 and self._sequence.buffers_repeated:
            self._seen.lose(item.step, "buffers", "buffers were broadcast more than once before it")
        self._advance(item, begins)
        for flow in known.flows:
            self._reached(self.flows[flow], item.phase)
        for number, ordinal, nbytes in self._seen.accept(tag, item):
            self._check(known, self.flows[number], ordinal, nbytes)
        self._close_old()

    def _advance(self, item: Item, begins: bool) -> None:
        """The sequence goes on by this collective, seen or missing."""
        if item.group == "start":
            if item.index == 2 and not self.started:
                self._seen.tells_losses = self._begun(self, True)
                if self._wrong is not None:
                    self._die(self._wrong, loud=True)
        elif item.step > self._step_open:
            self._step_open = item.step
            self._seen.open_step(item.step)
        if item.group == "gradients" and begins:
            self._clean = True
            if self._buckets is None or self._buckets[1] is not self._sequence.buckets:
                rebuilt = self._buckets is not None
                self._buckets = item.step, self._sequence.buckets
                self._emit(BucketsEvent(item.step, self._sequence.buckets, rebuilt))
            if self._unsure:
                self._seen.lose(
                    item.step, "gradients", "a collective before it is missing, and which one is not certain"
                )
        before = self._sequence.reduction
        self._sequence.accept(item)
        self._last_gradients = item if item.group == "gradients" else None
        ended = self._sequence.reduction > before
        anchored = item.group == "buffers" and self._sequence.inside is None
        if self._unsure and (anchored or (ended and self._clean and self._sequence.cycle_is_unique())):
            self._unsure = self._crossed = False

    def _pass(self, known: Tag) -> None:
        """A stranger."""
        last = self._last_gradients
        if last is not None:
            if self._seen.fits(known, last):
                if self._resynced:  # messages of it may be missing
                    self._seen.lose_to_stranger(last)
                else:
                    self._seen.lookalikes.add(self._next, last)
                for flow, sizes in known.sizes.items():
                    for ordinal, nbytes in sizes:
                        self._compare(self._next, flow, ordinal, nbytes)
            elif self._sequence.inside == "gradients" and any(
                self._seen.fits(known, one) for one in self._sequence.buffers[:1]
            ):
                self._seen.lose(last.step, "gradients", "buffers were broadcast between its buckets")
                self._unsure = True
        known.state, known.sizes = "stranger", {}
        if not self._sequence.started:
            return
        self._strangers += 1
        self._clean = False
        if known.op == "allreduce" and not self._sequence.reduction:
            self._check_world()
        if self._crossed:
            self._die("collectives are missing, and strangers came: steps cannot be counted any more")

    def _compare(self, tag: int, flow: int, ordinal: int, nbytes: int) -> None:
        """A data message of a stranger: if it is as large as what was taken for gradients, either may be them."""
        ranks = self.ranks.candidates(self.flows[flow].flow.source)
        item = self._seen.lookalikes.message(tag, ranks, ordinal, nbytes)
        if item is not None:
            self._seen.lose_to_stranger(item)

    def _given_up(self) -> None:
        """The group that began does not go on: what was taken for its first collectives were strangers."""
        items = self._sequence.give_up()
        group, count = items[0].group, len(items)
        if group == "start" and count >= 2:
            # A count and shapes, and then something else: a training starts, but not the one that is described.
            wanted = self._sequence.candidates_at_start()[count]
            self._seen.contradict(
                f"a training begins whose broadcast number {count} is not one of {wanted.nbytes} bytes of "
                f"{wanted.dtype} ({', '.join(wanted.tensors[:3])}, ...), as the job description has it"
            )
            if self.started:
                self._die("its first broadcasts are not those of the job description")
        for item in items:
            if item.group == "buffers":
                self._seen.lose(item.step, "buffers", "a broadcast of their size came before them")
        self._strangers += self._sequence.started
        self._wrong = None
        for tag in range(self._next - count, self._next):
            known = self._seen.tags.get(tag)
            if known is not None and known.state == "item":
                known.stale = group == "start"
                known.state = "item" if known.stale else "lost"

    def _miss(self, known: Tag | None) -> None:
        """The next tag was not seen at all, or none of its data."""
        if known is not None:
            known.state = "lost"
        run = self._run + 1 if self._missed == self._next - 1 else 1
        self._missed, self._run = self._next, run
        self._next += 1
        sequence = self._sequence
        if not sequence.started and sequence.inside is None and not self._began_late():
            return
        candidates = sequence.candidates()
        if not candidates:
            self._die("the order of the rebuilt buckets was lost")
            return
        item = candidates[0]
        if item.nbytes == 0 and item.op == "allreduce":
            self._advance(item, sequence.inside is None)
            return
        if item.group == "gradients":
            self._unsure = True
        if run >= len(sequence.cycle()):
            self._unsure = self._crossed = True
            # A training that had none of its own before is taken to have had none in the gap.
            if self._strangers:
                self._die("collectives of a whole step are missing, and strangers came before: steps cannot be counted")
                return
        self._advance(item, item.group != "start" and sequence.inside is None)
        self._clean = False
        if item.group == "rebuild" and not sequence.has_known:
            self._die("the order of the rebuilt buckets was lost")
        elif item.kind != "other":
            self._seen.lose(max(item.step, 0), kind_of_loss(item), f"a collective is missing ({item.kind})")

    def _began_late(self) -> bool:
        """The capture began in the middle: whether its steps can be followed all the same."""
        if self._late is None:
            self._late = self._seen.tells_losses = self._begun(self, False)
            self._seen.lose(0, "gradients", "the capture began in the middle of the training")
            if self._late and self._known is None:
                self._look_for_step()
        known = self._known is not None and self._late
        self._unsure = self._crossed = self._unsure or known
        return known

    def _look_for_step(self) -> None:
        """From here on only where a step begins matters."""
        if self._job.reductions_per_step > 1:
            why = "a step has several reductions, so where one begins cannot be told"
            self._seen.lose(1, "gradients", why)
            self._die(why)
            return
        steady = copy.copy(self._sequence)
        steady.assume(likely_buckets(self._job))
        self._late_start = LateStart(steady.cycle(), self._seen.fits)

    def _found_step(self, late: LateStart) -> bool:
        """Whether the conversation goes on, at the first collective of a step."""
        first = late.look(self._seen.tags, self._seen.highest)
        if late.why:
            self._late_start = None
            self._seen.lose(1, "gradients", late.why)
            self._die(late.why)
        if first is None or self.dead is not None:
            return False
        self._late_start = None
        self._seen.forget_before(first)
        self._next = first
        begins = self._sequence.assume(likely_buckets(self._job))
        for step in range(begins):
            self._seen.lose(step, "gradients", "the capture began in the middle of the training")
        return True

    def _jump(self, tag: int) -> bool:
        """A tag far ahead: all before it is missing. Returns whether the conversation goes on."""
        here = self._sequence.step
        if self._seen.tags and tag - self._next > _MOST_MISSING:
            self._die("more collectives are missing than can be followed")
            return False
        if not self._sequence.started and not self._began_late():
            self._seen.drop_ahead()
            self._next = max(0, tag - 1)
            return True
        if self._strangers or not self._sequence.skip(tag - 1 - self._next):
            self._die("collectives of many steps are missing: steps cannot be counted")
            return False
        self._seen.drop_ahead()
        self._next, self._unsure, self._crossed = tag - 1, True, True
        if self._sequence.step - here > MOST_LOST:
            self._seen.lose(here, "gradients", "its collectives are missing, and those of many steps after it")
            return True
        for step in range(here, self._sequence.step):
            self._seen.lose(step, "gradients", "its collectives are missing")
        return True

    # -- one collective --------------------------------------------------------------------------------------------

    def _check(self, known: Tag, flow: GlooFlow, ordinal: int, nbytes: int) -> None:
        """Whether a data message is what the collective must send here; learns ranks of it."""
        item = known.item
        assert item is not None
        source, destination = flow.flow.source, flow.flow.destination
        good = True
        if item.op == "broadcast":
            good = size_fits(item, nbytes)
            if good and item.group == "start":
                self.ranks.edge(source, destination, "tree")
        elif item.op == "allgather":
            self.ranks.edge(source, destination, "up")
            if ordinal >= 2 * (self._job.ranks - 1):
                self._die(f"the training has more ranks than the {self._job.ranks} of the job description", loud=True)
        else:
            self.ranks.edge(source, destination, "down")
            if ordinal != UNKNOWN:
                good = self.ranks.keep(
                    source, lambda rank: reduction_fits(item, self._job.ranks, rank, [(ordinal, nbytes)])
                )
        if self.ranks.changed:
            self.ranks.changed = False
            self._emit(Learned(self._job.ranks, self.ranks.known()))
        if not good:
            known.state = "lost"
            self._unsure = True
            self._seen.lose(
                max(item.step, 0), kind_of_loss(item), f"a collective taken for its {item.kind} is another one"
            )

    def _reached(self, flow: GlooFlow, phase: int) -> None:
        if phase > flow.phase:
            flow.phase = phase
            self._close_old()

    def _close_old(self) -> None:
        self._seen.close_old(self._next, 2 * self._sequence.reduction - 5)

    def _check_world(self) -> None:
        found = None if self._resynced else self._seen.found_world()
        if found is not None:
            self._die(f"the training has {found} ranks, and the job description {self._job.ranks}", loud=True)

    # -- what the caller and the events need -----------------------------------------------------------------------

    def content(self, collective: int, data: bytes) -> None:
        """All bytes of a small collective."""
        known = self._seen.of(collective)
        if known is None or known.item is None or known.item.kind not in CONTENT_KINDS or self.dead is not None:
            return
        kind = known.item.kind
        if kind in ("count", "sizes"):
            fault = content_fault(self._job, self._sequence, kind, data)
            if not known.stale:
                self._wrong = fault or self._wrong
            elif fault is not None and kind == "sizes":
                self._seen.contradict(f"a training begins that is not the one described: {fault}")
        elif known.state == "item" and not known.stale:
            self._wrong = content_fault(self._job, self._sequence, kind, data)
        if self.started and self._wrong is not None:
            self._die(self._wrong, loud=True)
        self._resolve()

    def finish(self) -> None:
        """Nothing more comes."""
        for flow in self.flows.values():
            flow.closed = True
        self._seen.close_all()
        self._ended = True

    def _die(self, why: str, *, loud: bool = False) -> None:
        if self.dead is None:
            self._seen.lose(max(self._sequence.step, 0), "gradients", why)
            self.dead = why
            if loud:
                self._seen.contradict(why)
            self._seen.close_all()
