"""Reading along a ring's link: whose it is, and which records are for shadows, however its bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import LastgoodError
from lastgood.gradients.link_parser import LinkParser
from lastgood.wire.frames import message_frame, proof
from lastgood.wire.records import FINAL, DType, Record, RecordKind, pack_header
from lastgood.wire.ring_link import RING_GREETING, Hello
from tests.wire.ring_helpers import JOB, TOKEN

GREETED = Hello(JOB, 1, 2, 3, "ab" * 32, "host")
NONCE, ANSWER_NONCE = bytes(range(32)), bytes(range(32, 64))


def opening(token: bytes = TOKEN) -> bytes:
    return RING_GREETING + NONCE + proof(token, b"trainer", NONCE, ANSWER_NONCE) + message_frame(GREETED.content())


records = st.lists(
    st.builds(
        lambda kind, flags, bucket, length: Record(
            RecordKind(kind), 1, 1, 2, 9, bucket, DType.float32, 0, 0 if kind == 2 else 4 * length, flags=flags
        ),
        st.sampled_from([1, 1, 2]),
        st.sampled_from([0, FINAL]),
        st.integers(0, 5),
        st.integers(0, 40),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(records=records, cuts=st.lists(st.integers(0, 4000), max_size=30))
def test_records_are_found_however_the_bytes_are_cut(records: list[Record], cuts: list[int]) -> None:
    pieces = [pack_header(record) + bytes([index]) * record.length for index, record in enumerate(records)]
    stream = opening() + b"".join(pieces)
    hellos: list[Hello] = []
    found: list[tuple[Record, bytes]] = []
    parser = LinkParser("a test", TOKEN, hellos.append, lambda record, content: found.append((record, content)))
    parser.feed_back(memoryview(ANSWER_NONCE[:7]))
    parser.feed_back(memoryview(ANSWER_NONCE[7:] + bytes(32) + b"and more"))
    borders = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for begin, end in pairwise(borders):
        parser.feed(memoryview(stream)[begin:end])
    assert hellos == [GREETED]
    wanted = [
        piece for record, piece in zip(records, pieces, strict=True) if record.kind is RecordKind.END or record.flags
    ]
    assert [content for _, content in found] == wanted


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n" + bytes(100),
        opening(b"another token"),
        opening()[:80] + bytes(28),
        opening()[:80]
        + b"LGM1\x02".ljust(20, b"\0")
        + (1 << 20).to_bytes(8, "little"),  # a chunk, of which nothing came
        opening()[:80] + message_frame({"kind": "ring"}),
        opening()[:80] + message_frame({**GREETED.content(), "job": list(JOB)}),
        opening()[:80] + message_frame({**GREETED.content(), "layout": list("ab" * 32)}),
        opening()[:80] + message_frame({**GREETED.content(), "host": "h" * 300}),
        opening()[:80] + message_frame({**GREETED.content(), "rank": 3}),
        opening()[:80] + message_frame({**GREETED.content(), "epoch": 1.0}),
        opening() + bytes(64),
        opening() + pack_header(Record(RecordKind.GRADIENT, 1, 1, 1, 1))[:-1] + b"\0",
    ],
)
def test_nothing_is_copied_for_those_who_do_not_speak_properly(stream: bytes) -> None:
    seen: list[object] = []
    parser = LinkParser("a test", TOKEN, lambda hello: None, lambda record, content: seen.append(record))
    parser.feed_back(memoryview(ANSWER_NONCE + bytes(32)))
    with pytest.raises(LastgoodError, match="a test"):
        parser.feed(memoryview(stream))
    assert not seen
