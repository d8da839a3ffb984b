"""From parsed messages to complete buffers: asks the conversation where bytes belong, and puts them there.

Heads are said first, then pieces are placed; a piece whose place is not known yet is asked for again as soon as the
conversation knows more, and kept (as a copy, in bounded memory) until then. Memory never follows a length that a packet
says, only what the job description makes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from ctypes import c_uint8
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lastgood.mirror.conversation.places import (
    CONTENT_KINDS,
    IGNORED,
    Answer,
    Closed,
    Conversation,
    Event,
    Expect,
    Incarnation,
    Place,
)
from lastgood.mirror.extract.slots import Filled, Gone, GradientSlots
from lastgood.mirror.streams.messages import PIECE, Parsed

__all__ = ["Extracted", "Extractor"]

Extracted = Event | Filled | Gone
Table = npt.NDArray[Any]


class Extractor:
    """One conversation's buffers. Not thread-safe.

    Args:
        staged_bytes: memory for pieces whose place is not known yet; what finds no room in it is lost.
    """

    def __init__(self, conversation: Conversation, slots: GradientSlots, staged_bytes: int) -> None:
        self.conversation = conversation
        self.slots = slots
        self._staged_limit = staged_bytes
        self._staged: dict[tuple[int, int], list[tuple[int, npt.NDArray[np.uint8]]]] = {}
        self._staged_bytes = 0
        self._closing: list[int] = []
        self._waiting: list[tuple[int, int, Table]] = []
        """Pieces of the batch that are not placed yet: (flow, message, rows)."""
        self._out: list[Extracted] = []
        self.counters: Counter[str] = Counter()

    def feed(self, parsed: Parsed) -> list[Extracted]:
        """What follows from a batch of messages, in order. Addresses in it are not used after this returns."""
        conversation = self.conversation
        self._waiting = list(_runs(parsed.pieces))
        for flow in parsed.opened:
            conversation.opened(flow)
        for flow_index, why in parsed.resynced:
            self.counters["resynced"] += 1
            conversation.resynced(flow_index, why)
        fields = (parsed.heads[name].tolist() for name in ("flow", "message", "slot", "opcode", "nbytes"))
        for flow_index, message, slot, opcode, nbytes in zip(*fields, strict=True):
            conversation.head(flow_index, message, slot, opcode, nbytes)
        self._listen()
        count = -1
        while len(self._waiting) != count:  # what one collective brings may tell the place of another one's bytes
            count = len(self._waiting)
            self._place_known()
        for flow_index, message, rows in self._waiting:
            self._stage(flow_index, message, rows)
        self._waiting = []
        self._hear_losses(parsed)
        for flow_index in parsed.closed:
            conversation.closed(flow_index)
        self._listen()
        self._close_all()
        return self._taken()

    def finish(self, parsed: Parsed | None = None) -> list[Extracted]:
        """The source has ended; `parsed` is the parser's last word."""
        found = [] if parsed is None else self.feed(parsed)
        self.conversation.finish()
        self._listen()
        self._close_all()
        return found + self._taken()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _taken(self) -> list[Extracted]:
        out, self._out = self._out, []
        return out

    def _listen(self) -> None:
        """Take the conversation's events, and what became of buffers, until there is nothing new."""
        while True:
            events = self.conversation.take()
            for event in events:
                if isinstance(event, Incarnation):
                    # Heads are heard first: what the incarnation before had complete is among the bytes of this batch.
                    self._place_known(only_open=True)
                    self._close_all()
                    self.slots.forget()
                self._out.append(event)
                if isinstance(event, Expect):
                    self.slots.expect(event)
                    self._hear_slots()
                elif isinstance(event, Closed):
                    # Its bytes may be among those that are still to be placed in this turn.
                    self._closing.append(event.collective)
            if not events and not self._hear_slots():
                return

    def _hear_slots(self) -> bool:
        found = self.slots.take()
        for one in found:
            self._out.append(one)
            if isinstance(one, Filled) and one.expected.kind in CONTENT_KINDS:
                self.conversation.content(one.expected.collective, one.memory.tobytes())
        return bool(found)

    def _close_all(self) -> None:
        closing, self._closing = self._closing, []
        for collective in closing:
            self.slots.close(collective)
        if closing and self._hear_slots():
            self._listen()

    def _place_known(self, *, only_open: bool = False) -> None:
        """Place all whose place is known, oldest first; with `only_open`, only into buffers that are there already."""
        self._retry_staged(only_open=only_open)
        waiting, self._waiting = self._waiting, []
        left = []
        for flow, message, rows in waiting:
            answer = self._answer(flow, message, only_open=only_open)
            if answer is None:
                left.append((flow, message, rows))
            else:
                self._put(flow, answer, rows)
        self._waiting = left + self._waiting

    def _answer(self, flow: int, message: int, *, only_open: bool) -> Answer:
        answer = self.conversation.place(flow, message)
        later = only_open and isinstance(answer, Place) and not self.slots.has(answer.collective)
        return None if later else answer

    def _put(self, flow: int, answer: Answer, rows: Table) -> None:
        if answer is IGNORED or answer is None or not answer.final:
            return
        self.slots.place(answer.collective, flow, answer.begin, answer.end, rows)
        self._listen()

    def _stage(self, flow: int, message: int, rows: Table) -> None:
        """Keep copies of pieces."""
        for row in rows:
            nbytes, offset = int(row["nbytes"]), int(row["offset"])
            if self._staged_bytes + nbytes > self._staged_limit:
                self.counters["unplaced"] += nbytes
                self.conversation.lost(flow, message, offset, nbytes)
                continue
            copy = np.empty(nbytes, np.uint8)
            if nbytes:
                copy[:] = _view(int(row["address"]), nbytes)
            self._staged.setdefault((flow, message), []).append((offset, copy))
            self._staged_bytes += nbytes
            self.counters["staged"] += nbytes

    def _retry_staged(self, *, only_open: bool) -> None:
        for flow, message in list(self._staged):
            answer = self._answer(flow, message, only_open=only_open)
            if answer is None or (flow, message) not in self._staged:  # what is placed may lead here again
                continue
            kept = self._staged.pop((flow, message))
            self._staged_bytes -= sum(len(copy) for _, copy in kept)
            rows = np.zeros(len(kept), PIECE)
            rows["offset"] = [offset for offset, _ in kept]
            rows["address"] = [copy.ctypes.data for _, copy in kept]
            rows["nbytes"] = [len(copy) for _, copy in kept]
            self._put(flow, answer, rows)

    def _hear_losses(self, parsed: Parsed) -> None:
        fields = (parsed.lost[name].tolist() for name in ("flow", "message", "offset", "nbytes"))
        for flow, message, offset, nbytes in zip(*fields, strict=True):
            self.counters["lost"] += nbytes
            answer = self.conversation.place(flow, message)
            if answer is not None and answer is not IGNORED and answer.final:
                begin = answer.begin + offset
                end = answer.end if nbytes == 0 else min(begin + nbytes, answer.end)
                self.slots.lost(answer.collective, begin, end)
            self.conversation.lost(flow, message, offset, nbytes)
        for flow in parsed.closed:
            for key in [key for key in self._staged if key[0] == flow]:
                self._staged_bytes -= sum(len(copy) for _, copy in self._staged.pop(key))


def _runs(pieces: Table) -> Iterator[tuple[int, int, Table]]:
    """Pieces of one message that follow each other: (flow, message, rows)."""
    if not len(pieces):
        return
    flows, messages = pieces["flow"], pieces["message"]
    edges = np.flatnonzero((flows[1:] != flows[:-1]) | (messages[1:] != messages[:-1])) + 1
    bounds = [0, *edges.tolist(), len(pieces)]
    for begin, end in pairwise(bounds):
        yield int(flows[begin]), int(messages[begin]), pieces[begin:end]


def _view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that somebody else owns."""
    return np.ctypeslib.as_array((c_uint8 * nbytes).from_address(address))
