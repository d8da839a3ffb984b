from __future__ import annotations

import random

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from lastgood import _native
from lastgood.mirror.streams.own_ring import OwnRingParser
from lastgood.wire.frames import message_frame
from lastgood.wire.records import FINAL, DType, Record, RecordKind, pack_header
from lastgood.wire.ring_link import RING_GREETING, Hello
from tests.mirror.support.frames import read
from tests.mirror.support.gloo_wire import Line, Script, Turn

HELLO = Hello("ab" * 16, 1, 2, 3, "cd" * 32, "host")


class Link:
    def __init__(self, name: str) -> None:
        self.name = name
        self.hellos: list[Hello] = []
        self.records: list[tuple[Record, bytes]] = []
        self.lost_records: list[Record | None] = []
        self.ended = 0

    def hello(self, hello: Hello) -> None:
        self.hellos.append(hello)

    def record(self, record: Record, content: bytes) -> None:
        self.records.append((record, content))

    def lost(self, record: Record | None) -> None:
        self.lost_records.append(record)

    def end(self) -> None:
        self.ended += 1


def script(seed: int) -> tuple[Script, list[bytes]]:
    draw = random.Random(seed)
    turns = [Turn(0, RING_GREETING + draw.randbytes(32)), Turn(1, draw.randbytes(32)), Turn(0, draw.randbytes(32))]
    turns += [Turn(1, draw.randbytes(32)), Turn(0, message_frame(HELLO.content()))]
    marked = []
    for iteration in range(4):
        for bucket in range(3):
            payload = draw.randbytes(4 * draw.randrange(1, 80))
            flags = draw.choice([0, FINAL])
            record = Record(RecordKind.GRADIENT, 1, 1, 2, iteration, bucket, DType.float32, 0, len(payload))
            record = Record(**{**record.__dict__, "checksum": _native.crc32c(payload), "flags": flags})
            turns.append(Turn(0, pack_header(record) + payload))
            if flags:
                marked.append(turns[-1].content)
        turns.append(Turn(0, pack_header(Record(RecordKind.END, 1, 1, 2, iteration))))
        marked.append(turns[-1].content)
    return Script(turns), marked


@examples(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 90))
def test_marked_records_come_as_a_switch_reads_them(seed, size):
    spoken, marked = script(seed)
    links: list[Link] = []

    def open_link(name: str) -> Link:
        links.append(Link(name))
        return links[-1]

    found = read(OwnRingParser(open_link), Line(spoken, seed).frames(), size)
    (link,) = links
    assert link.hellos == [HELLO] and [content for _, content in link.records] == marked
    assert link.lost_records == [] and link.ended == 1 and not found.refused
    assert "10.0.0.1 port 40001" in link.name


@examples(max_examples=25)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from([0.01, 0.1, 0.4]))
def test_after_loss_each_record_is_right_or_lost(seed, rate):
    spoken, marked = script(seed)
    links: list[Link] = []

    def open_link(name: str) -> Link:
        links.append(Link(name))
        return links[-1]

    draw = random.Random(seed)
    frames = Line(spoken, seed).frames()
    found = read(OwnRingParser(open_link), [one for one in frames if draw.random() >= rate])
    if not links:
        assert found.refused
        return
    (link,) = links
    at = 0
    for _, content in link.records:
        at = marked.index(content, at) + 1
    missing = len(marked) - len(link.records)
    named = [pack_header(one) for one in link.lost_records if one is not None]
    assert all(any(content.startswith(header) for content in marked) for header in named), "a record of the link"
    assert not any(content.startswith(tuple(named)) for _, content in link.records), "what is lost does not come"
    # Where headers are missing too, a loss stands for any number of records; what is refused tells of nothing.
    if not missing:
        assert named == []
    elif not found.refused and None not in link.lost_records:
        assert missing == len(named), f"{missing} records are missing, {len(named)} are told"
    assert link.hellos == [HELLO] or found.refused
    assert link.ended == 1
