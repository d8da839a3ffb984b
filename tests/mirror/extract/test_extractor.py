"""Pieces into buffers: complete only at full coverage, healed by another source, or gone; memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from lastgood.mirror.conversation.places import IGNORED, Closed, Expect, Incarnation, Place
from lastgood.mirror.extract.extractor import Extractor
from lastgood.mirror.extract.scatter import scatter
from lastgood.mirror.extract.slots import Filled, Gone, GradientSlots
from lastgood.mirror.streams.messages import HEAD, LOST, PIECE, Flow, Parsed
from tests.mirror.support.plain.scatter import scatter_plain


class Scripted:
    """A conversation that says what a test put in."""

    def __init__(self):
        self.places, self.events, self.heard = {}, [], []

    def opened(self, flow):
        self.heard.append(("opened", flow.index))

    def closed(self, flow):
        self.heard.append(("closed", flow))

    def head(self, flow, message, slot, opcode, nbytes):
        self.heard.append(("head", flow, message, nbytes))

    def lost(self, flow, message, offset, nbytes):
        self.heard.append(("lost", flow, message, offset, nbytes))

    def resynced(self, flow, why):
        self.heard.append(("resynced", flow, why))

    def place(self, flow, message):
        return self.places.get((flow, message))

    def content(self, collective, data):
        self.heard.append(("content", collective, data))

    def finish(self):
        self.heard.append(("finish",))

    def take(self):
        events, self.events = self.events, []
        return events


CONTENT = np.random.default_rng(3).integers(0, 256, 1000, dtype=np.uint8)


def pieces(*rows):
    """(flow, message, offset, bytes): of CONTENT, from the place where they lie in it."""
    table = np.zeros(len(rows), PIECE)
    for row, (flow, message, offset, at, nbytes) in zip(table, rows, strict=True):
        row["flow"], row["message"], row["offset"], row["nbytes"] = flow, message, offset, nbytes
        row["address"] = CONTENT.ctypes.data + at
    return table


def losses(*rows):
    table = np.zeros(len(rows), LOST)
    for row, (flow, message, offset, nbytes) in zip(table, rows, strict=True):
        row["flow"], row["message"], row["offset"], row["nbytes"] = flow, message, offset, nbytes
    return table


def gradient(collective, nbytes=1000, kind="gradient"):
    return Expect(collective, kind, nbytes, "float32", 0, 0)


@pytest.fixture
def two_flows():
    """Flow 0 brings all of collective 5 in message 1, flow 1 its second half in message 7."""
    conversation = Scripted()
    conversation.places = {(0, 1): Place(5, 0, 1000, True), (1, 7): Place(5, 500, 1000, True), (0, 0): IGNORED}
    conversation.events = [Incarnation(0, True), gradient(5)]
    return conversation, Extractor(conversation, GradientSlots(10_000), 1000)


def kinds(events):
    return [type(one).__name__ for one in events]


def test_a_buffer_is_filled_in_any_order(two_flows):
    _, extractor = two_flows
    parsed = Parsed(pieces=pieces((0, 1, 600, 600, 400), (0, 0, 0, 0, 50), (0, 1, 0, 0, 600)))
    events = extractor.feed(parsed)
    assert kinds(events) == ["Incarnation", "Expect", "Filled"]
    assert np.array_equal(events[-1].memory, CONTENT)


def test_one_missing_byte_keeps_it_open_and_closing_says_which(two_flows):
    conversation, extractor = two_flows
    events = extractor.feed(Parsed(pieces=pieces((0, 1, 0, 0, 333), (0, 1, 334, 334, 666))))
    assert "Filled" not in kinds(events)
    assert extractor.slots.missing(5) == [(333, 334)]
    conversation.events = [Closed(5)]
    (_, gone) = extractor.feed(Parsed())
    assert isinstance(gone, Gone) and "1 of 1000 bytes" in gone.why and "333 to 334" in gone.why


def test_what_one_source_loses_another_one_heals(two_flows):
    _, extractor = two_flows
    parsed = Parsed(pieces=pieces((0, 1, 0, 0, 700), (1, 7, 0, 500, 500)), lost=losses((0, 1, 700, 300)))
    extractor.feed(Parsed(lost=losses((0, 1, 700, 300))))
    assert kinds(extractor.feed(parsed))[-1] == "Filled"
    counters = extractor.slots.counters
    assert (counters["placed"], counters["again"], counters["healed"]) == (1000, 200, 300)


def test_bytes_of_a_batch_count_before_what_closes_in_it(two_flows):
    conversation, extractor = two_flows
    extractor.feed(Parsed())
    conversation.events = [Closed(5)]
    assert kinds(extractor.feed(Parsed(pieces=pieces((0, 1, 0, 0, 1000))))) == ["Closed", "Filled"]


def test_pieces_wait_for_their_place_as_copies():
    conversation = Scripted()
    extractor = Extractor(conversation, GradientSlots(10_000), 1000)
    held = CONTENT.copy()
    table = pieces((0, 1, 0, 0, 400))
    table["address"] = held.ctypes.data
    extractor.feed(Parsed(pieces=table))
    held[:] = 0
    conversation.events, conversation.places = [gradient(0, 400)], {(0, 1): Place(0, 0, 400, True)}
    events = extractor.feed(Parsed())
    assert isinstance(events[-1], Filled) and np.array_equal(events[-1].memory, CONTENT[:400])


def test_what_finds_no_room_while_it_waits_is_lost_and_said():
    conversation = Scripted()
    extractor = Extractor(conversation, GradientSlots(10_000), 500)
    extractor.feed(Parsed(pieces=pieces((0, 1, 0, 0, 400), (0, 1, 400, 400, 400))))
    assert ("lost", 0, 1, 400, 400) in conversation.heard
    assert extractor.counters["unplaced"] == 400
    extractor.feed(Parsed(closed=[0]))
    extractor.feed(Parsed(pieces=pieces((1, 1, 0, 0, 500))))
    assert extractor.counters["unplaced"] == 400, "what a closed flow had waiting is given up"


def test_the_conversation_gets_small_collectives_and_may_place_more_by_them():
    conversation = Scripted()
    conversation.events = [gradient(0, 8, "bucket-order")]
    conversation.places = {(0, 0): Place(0, 0, 8, True)}

    def content(collective, data):
        conversation.heard.append(("content", collective, data))
        conversation.events = [gradient(1, 100)]
        conversation.places[0, 1] = Place(1, 0, 100, True)

    conversation.content = content
    extractor = Extractor(conversation, GradientSlots(10_000), 1000)
    events = extractor.feed(Parsed(pieces=pieces((0, 1, 0, 8, 100), (0, 0, 0, 0, 8))))
    assert ("content", 0, CONTENT[:8].tobytes()) in conversation.heard
    assert isinstance(events[-1], Filled) and events[-1].expected.collective == 1
    assert extractor.counters["staged"] == 0, "within one batch nothing is copied twice"


def test_collectives_that_find_no_room_are_gone_at_once():
    slots = GradientSlots(1500)
    slots.expect(gradient(0))
    slots.expect(gradient(1))
    (gone,) = slots.take()
    assert isinstance(gone, Gone) and gone.expected.collective == 1 and "no room" in gone.why
    slots.place(0, 0, 0, 1000, pieces((0, 0, 0, 0, 1000)))
    (filled,) = slots.take()
    slots.free(filled.memory)
    slots.expect(gradient(2))
    slots.place(2, 0, 0, 1000, pieces((0, 0, 0, 0, 1000)))
    assert slots.take()[0].memory is filled.memory, "buffers are used again"


def test_a_new_incarnation_forgets_what_was_open(two_flows):
    conversation, extractor = two_flows
    extractor.feed(Parsed(pieces=pieces((0, 1, 0, 0, 600))))
    conversation.events = [Incarnation(1, True)]
    extractor.feed(Parsed())
    assert extractor.slots.missing(5) == []
    extractor.feed(Parsed(pieces=pieces((0, 1, 600, 600, 400))))
    assert extractor.slots.counters["late"] == 400


@pytest.mark.parametrize("copy", [scatter, scatter_plain])
def test_nothing_is_written_outside_of_a_message_s_range(copy):
    memory = np.zeros(100, np.uint8)
    assert copy(memory, 20, 60, pieces((0, 0, 30, 0, 500), (0, 0, 40, 0, 8), (0, 0, 1 << 40, 0, 8))) == [(50, 60)]
    assert copy(memory, 20, 160, pieces((0, 0, 0, 0, 8))) == []
    assert not memory[:50].any() and not memory[60:].any() and np.array_equal(memory[50:60], CONTENT[:10])


def test_heads_and_flows_reach_the_conversation(two_flows):
    conversation, extractor = two_flows
    heads = np.zeros(1, HEAD)
    heads["flow"], heads["message"], heads["nbytes"] = 3, 9, 12
    flow = Flow(3, "gloo", "10.0.0.1", 1, "10.0.0.2", 2)
    extractor.feed(Parsed(opened=[flow], heads=heads, resynced=[(3, "a hole")], closed=[3]))
    extractor.finish()
    assert conversation.heard == [
        ("opened", 3),
        ("resynced", 3, "a hole"),
        ("head", 3, 9, 12),
        ("closed", 3),
        ("finish",),
    ]


def test_what_waited_for_its_place_comes_before_what_came_later():
    """The first weights wait until gradients tell which rank each flow is: all of both may be there at once then."""
    conversation = Scripted()
    extractor = Extractor(conversation, GradientSlots(10_000), 1000)
    extractor.feed(Parsed(pieces=pieces((0, 1, 0, 0, 400))))
    conversation.events = [gradient(0, 400, "parameters"), gradient(1, 200)]
    conversation.places = {(0, 1): Place(0, 0, 400, True), (1, 0): Place(1, 0, 200, True)}
    events = extractor.feed(Parsed(pieces=pieces((1, 0, 0, 0, 200))))
    assert [one.expected.kind for one in events if isinstance(one, Filled)] == ["parameters", "gradient"]


def test_what_waited_for_its_place_counts_before_an_incarnation_begins():
    conversation = Scripted()
    extractor = Extractor(conversation, GradientSlots(10_000), 1000)
    extractor.feed(Parsed(pieces=pieces((0, 0, 0, 0, 16))))
    conversation.events = [gradient(0, 16, "count"), Closed(0), Incarnation(0, True)]
    conversation.places = {(0, 0): Place(0, 0, 16, True)}
    assert "Gone" not in kinds(extractor.feed(Parsed()))
    assert ("content", 0, CONTENT[:16].tobytes()) in conversation.heard
