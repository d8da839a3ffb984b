"""Reading along a ring's link: whose it is, and which records are for shadows, however its bytes are cut."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import LastgoodError
from lastgood.gradients.switch.parser import LinkParser, relay_proof
from lastgood.ports import free_ports
from lastgood.wire.frames import NO_PROOF, message_frame, proof
from lastgood.wire.gate import Gate, Guest, open_listener
from lastgood.wire.records import FINAL, DType, Record, RecordKind, pack_header
from lastgood.wire.ring_link import RING_GREETING, Hello
from tests.wire.support.ring_helpers import JOB, TOKEN, WAIT_S

GREETED = Hello(JOB, 1, 2, 3, "ab" * 32, "host")
NONCE, ANSWER_NONCE = bytes(range(32)), bytes(range(32, 64))


def greeting() -> bytes:
    return message_frame(GREETED.content())


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
    stream = greeting() + b"".join(pieces)
    hellos: list[Hello] = []
    found: list[tuple[Record, bytes]] = []
    parser = LinkParser("a test", hellos.append, lambda record, content: found.append((record, content)))
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
        bytes(28),
        b"LGM1\x02".ljust(20, b"\0") + (1 << 20).to_bytes(8, "little"),  # a chunk, of which nothing came
        message_frame({"kind": "ring"}),
        message_frame({**GREETED.content(), "job": list(JOB)}),
        message_frame({**GREETED.content(), "layout": list("ab" * 32)}),
        message_frame({**GREETED.content(), "host": "h" * 300}),
        message_frame({**GREETED.content(), "rank": 3}),
        message_frame({**GREETED.content(), "epoch": 1.0}),
        greeting() + bytes(64),
        greeting() + pack_header(Record(RecordKind.GRADIENT, 1, 1, 1, 1))[:-1] + b"\0",
    ],
)
def test_nothing_is_copied_for_those_who_do_not_speak_properly(stream: bytes) -> None:
    seen: list[object] = []
    parser = LinkParser("a test", lambda hello: None, lambda record, content: seen.append(record))
    with pytest.raises(LastgoodError, match="a test"):
        parser.feed(memoryview(stream))
    assert not seen


class Way:
    """A gate that passes proofs on to a next rank, which this test plays."""

    def __init__(self, stack: ExitStack) -> None:
        self.next = stack.enter_context(open_listener())
        self.said: list[str] = []
        self.errors: list[OSError] = []
        self.guests: list[Guest[socket.socket]] = []
        self.targets = [self._target(self.next)]
        listener = open_listener()
        self.where = listener.getsockname()
        self.gate: Gate[socket.socket] = stack.enter_context(
            Gate(
                listener,
                lambda other: relay_proof(other, TOKEN, lambda: self.targets, self.errors.append),
                "a link",
                self.said.append,
            )
        )

    @staticmethod
    def _target(listener: socket.socket) -> tuple[object, ...]:
        return (socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname())

    def until(self, found: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not found():
            assert time.monotonic() < deadline, (self.said, self.errors)
            self.guests += self.gate.step(0.02)

    def hears(self, connection: socket.socket, content: bytes) -> None:
        """Until this has come over the link."""
        connection.setblocking(False)
        got = bytearray()

        def more() -> bool:
            with suppress(BlockingIOError):
                got.extend(connection.recv(len(content) - len(got)))
            return len(got) == len(content)

        self.until(more)
        assert bytes(got) == content


@pytest.fixture
def way() -> Iterator[Way]:
    with ExitStack() as stack:
        yield Way(stack)


def test_a_rank_and_the_next_one_prove_themselves_through_the_switch(way: Way) -> None:
    nobody = free_ports()[0]
    way.targets.insert(0, (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", nobody)))  # a name of two addresses
    with socket.create_connection(way.where, WAIT_S) as rank:
        rank.sendall(RING_GREETING + NONCE[:5])
        way.until(lambda: way.gate.strangers)
        rank.sendall(NONCE[5:])
        way.until(lambda: select.select([way.next], [], [], 0)[0])
        following, _ = way.next.accept()
        with following:
            way.hears(following, RING_GREETING + NONCE)
            following.sendall(ANSWER_NONCE[:20])
            way.gate.step(0.02)
            following.sendall(ANSWER_NONCE[20:])
            way.hears(rank, ANSWER_NONCE)
            rank.sendall(proof(TOKEN, b"trainer", NONCE, ANSWER_NONCE) + b"and more")
            way.until(lambda: way.guests)
            way.hears(following, proof(TOKEN, b"trainer", NONCE, ANSWER_NONCE))
            (guest,) = way.guests
            guest.known.sendall(guest.connection.recv(100))
            way.hears(following, b"and more")
            for one in (guest.known, guest.connection):
                one.close()
    assert not way.said and not way.errors


def test_who_does_not_know_the_token_is_not_relayed(way: Way) -> None:
    with socket.create_connection(way.where, WAIT_S) as rank:
        rank.sendall(RING_GREETING + NONCE)
        way.until(lambda: select.select([way.next], [], [], 0)[0])
        following, _ = way.next.accept()
        with following:
            following.sendall(ANSWER_NONCE)
            way.hears(rank, ANSWER_NONCE)
            rank.sendall(proof(b"another token", b"trainer", NONCE, ANSWER_NONCE))
            way.hears(rank, NO_PROOF)
            way.until(lambda: way.said)
            following.settimeout(WAIT_S)
            assert following.recv(48, socket.MSG_WAITALL) == RING_GREETING + NONCE
            assert following.recv(1) == b"", "the connection to the next rank ends with it"
    assert "does not know the token" in way.said[0]


def test_what_is_no_ring_costs_the_next_rank_nothing(way: Way) -> None:
    with socket.create_connection(way.where, WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
        way.until(lambda: way.said)
    assert "no ring of Lastgood's speaks there" in way.said[0]
    assert not select.select([way.next], [], [], 0)[0]


@pytest.mark.parametrize("why", ["refused", "closed", "no address"])
def test_a_rank_tries_again_when_the_next_one_is_not_there(way: Way, why: str) -> None:
    if why == "refused":
        way.next.close()
    if why == "no address":
        way.targets.clear()
    with socket.create_connection(way.where, WAIT_S) as rank:
        rank.sendall(RING_GREETING + NONCE)
        if why == "closed":
            way.until(lambda: select.select([way.next], [], [], 0)[0])
            way.next.accept()[0].close()
        way.until(lambda: way.errors)
        assert rank.recv(1) == b""
    assert not way.gate.strangers and not way.guests and not way.said
