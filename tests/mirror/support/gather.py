"""Buffers of collectives, filled by what a conversation answers about messages that were parsed before."""

from __future__ import annotations

from lastgood.mirror.conversation.places import CONTENT_KINDS, Closed, Conversation, Event, Expect, Place
from tests.mirror.support.frames import Message, Messages


class Gathered:
    """All collectives of a capture, by serial."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.events: list[Event] = []
        self.expected: dict[int, Expect] = {}
        self.bytes: dict[int, bytearray] = {}
        self.known: dict[int, bytearray] = {}
        self.closed: set[int] = set()
        self._told: set[int] = set()
        self._waiting: list[Message] = []

    def read(self, found: Messages, batch: int = 20) -> None:
        """Heads in the order of their time, a few at once; then the end."""
        for flow in found.flows.values():
            self._conversation.opened(flow)
        heads = sorted(found.all.values(), key=lambda one: (one.time_ns, one.flow, one.number))
        for at in range(0, len(heads), batch):
            for index in {index for index, _ in found.resynced}:  # where, is not kept: every gap counts
                self._conversation.resynced(index, "a hole")
            for one in heads[at : at + batch]:
                self._conversation.head(one.flow, one.number, one.slot, one.opcode, one.nbytes)
                self._waiting.append(one)
            self._listen()
            self._place()
            for one in heads[at : at + batch]:
                if 2 in one.known:
                    self._conversation.lost(one.flow, one.number, 0, one.nbytes)
            self._listen()
        self._conversation.finish()
        self._listen()

    def _listen(self) -> None:
        for event in self._conversation.take():
            self.events.append(event)
            if isinstance(event, Expect):
                self.expected[event.collective] = event
                self.bytes[event.collective] = bytearray(event.nbytes)
                self.known[event.collective] = bytearray(event.nbytes)
            elif isinstance(event, Closed):
                self.closed.add(event.collective)

    def _place(self) -> None:
        again = True
        while again:
            again, left = False, []
            for one in self._waiting:
                answer = self._conversation.place(one.flow, one.number)
                if answer is None:
                    left.append(one)
                elif isinstance(answer, Place):
                    again |= self._put(answer, one)
            self._waiting = left

    def _put(self, place: Place, one: Message) -> bool:
        size, number = place.end - place.begin, place.collective
        before = bytes(self.bytes[number][place.begin : place.end])
        mask = bytes(self.known[number][place.begin : place.end])
        for at in range(size):
            assert not mask[at] or one.known[at] != 1 or before[at] == one.content[at], "two copies are the same"
        for at in range(size):
            if one.known[at] == 1:
                self.bytes[number][place.begin + at] = one.content[at]
                self.known[number][place.begin + at] = 1
        if self.expected[number].kind in CONTENT_KINDS and self.complete(number) and number not in self._told:
            self._told.add(number)
            self._conversation.content(number, bytes(self.bytes[number]))
            self._listen()
            return True
        return False

    def complete(self, number: int) -> bool:
        """Whether all bytes are there."""
        return all(self.known[number])

    def of(self, kind: str) -> list[tuple[Expect, bytes]]:
        """Collectives of a kind, in order; every byte of them is there."""
        found = [number for number, one in sorted(self.expected.items()) if one.kind == kind]
        assert all(self.complete(number) for number in found)
        return [(self.expected[number], bytes(self.bytes[number])) for number in found]
