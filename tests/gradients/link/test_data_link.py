"""A rank's data connection to a shadow, with the native sender on real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.gradients.layout.spans import Span
from lastgood.gradients.link.data_link import DataLink, Ticket
from lastgood.wire.records import HEADER_BYTES, DType, Record, RecordKind, parse_header
from tests.gradients.support.data_links import LARGE, SETTINGS, WAIT_S, address_of, connected
from tests.support.patience import wait_until


def span(nbytes: int) -> Span:
    return Span(0, DType.float32, 0, 0, nbytes)


@pytest.fixture
def stuck() -> Iterator[tuple[DataLink, socket.socket]]:
    """Of a shadow that reads nothing."""
    link, far = connected(SETTINGS)
    yield link, far
    link.cut("the test has ended")
    far.close()


class Overtaken:
    """A real sender whose first `put` comes back only once a later one has."""

    def __init__(self, sender: object) -> None:
        self._sender = sender
        self.entered = threading.Event()
        self.overtaken = threading.Event()

    def put(self, *what: object, **how: object) -> int:
        first = not self.entered.is_set()
        self.entered.set()
        ticket = self._sender.put(*what, **how)
        if first:
            assert self.overtaken.wait(WAIT_S)
        return ticket

    def __getattr__(self, name: str) -> object:
        return getattr(self._sender, name)


def test_lent_memory_is_waited_for_whichever_thread_comes_back_last(stuck: tuple[DataLink, socket.socket]) -> None:
    # Two reductions end at once in threads of torch's, and each lends its bucket.
    link, far = stuck
    sender = link._sender = Overtaken(link._sender)
    small = threading.Thread(target=lambda: link.put(1, span(4), address_of(LARGE), borrowed=True))
    small.start()
    assert sender.entered.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while sender.last_ticket < 3:  # twice the end of iteration 0, and the small one
        assert time.monotonic() < deadline
    large = link.put(1, span(len(LARGE)), address_of(LARGE), borrowed=True)
    assert isinstance(large, Ticket)
    sender.overtaken.set()
    small.join(WAIT_S)
    waiter = threading.Thread(target=link.wait_returned)
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive() and not large.returned, "memory that is still to be read may not be overwritten"
    left = len(LARGE)
    while left > 0:
        left -= len(far.recv(1 << 20))
    waiter.join(WAIT_S)
    assert not waiter.is_alive() and large.returned


def test_a_link_that_ends_while_a_thread_waits_for_room_swallows_what_it_had(
    stuck: tuple[DataLink, socket.socket],
) -> None:
    # As where another life fences this one off, in the midst of an optimizer's step: the training goes on.
    link, far = stuck
    assert link.put(1, span(len(LARGE)), address_of(LARGE), borrowed=True)
    caught: list[object] = []

    def fill() -> None:
        try:
            caught.append([link.put(1, span(1 << 18), address_of(LARGE), borrowed=False) for _ in range(6)][-1])
            link.end(1)
        except Exception as error:
            caught.append(error)

    full = threading.Thread(target=fill)
    full.start()
    wait_until(lambda: link.waits, "the link to wait", WAIT_S)
    ending = threading.Thread(target=link.close)
    ending.start()
    full.join(WAIT_S)
    assert caught == [None]
    far.close()
    ending.join(WAIT_S)
    assert link.cuts == 0 and not ending.is_alive()


@pytest.mark.parametrize("borrowed", [True, False])
def test_a_bucket_without_elements_needs_no_record(stuck: tuple[DataLink, socket.socket], borrowed: bool) -> None:
    link, _ = stuck
    assert link.put(1, span(0), address_of(LARGE), borrowed=borrowed) is None


@pytest.mark.parametrize("queue_bytes", [1 << 20, (1 << 20) + 10, 1_100_010, 3_333_333])
def test_long_runs_are_cut_between_elements_whatever_the_queue_s_size(queue_bytes: int) -> None:
    settings = CheckmateOptions(queue_bytes=queue_bytes).data_settings()
    link, far = connected(settings)
    try:
        longest = Span(0, DType.float64, 0, 0, 1 << 20)
        reader = threading.Thread(target=lambda: all(iter(lambda: far.recv(1 << 20), b"")), daemon=True)
        reader.start()
        assert link.put(1, longest, address_of(LARGE), borrowed=False)
    finally:
        link.close()
        reader.join(WAIT_S)
        far.close()


def record_from(connection: socket.socket) -> Record:
    content = b""
    while len(content) < HEADER_BYTES:
        got = connection.recv(HEADER_BYTES - len(content))
        assert got, "the connection ended"
        content += got
    return parse_header(content, "the link")


def test_a_new_connection_says_at_once_what_goes_without_it() -> None:
    """The next iteration may never begin: another rank can wait in this one for what the shadow waits for."""
    mine, theirs = socket.socketpair()
    link = DataLink("shadow", 1, 1, 3, SETTINGS)
    with theirs:
        theirs.settimeout(WAIT_S)
        try:
            link.begin_iteration(7)
            link.connect(mine.detach())
            said = record_from(theirs)
            assert (said.kind, said.rank, said.iteration) == (RecordKind.END, 3, 7)
            link.begin_iteration(8)
            assert record_from(theirs).iteration == 7
            link.end(8)
            assert record_from(theirs).iteration == 8
        finally:
            link.close()


def test_a_connection_that_is_gone_already_does_no_harm() -> None:
    mine, theirs = socket.socketpair()
    theirs.close()
    link = DataLink("shadow", 1, 1, 0, SETTINGS)
    try:
        link.connect(mine.detach())
        link.begin_iteration(1)
        deadline = time.monotonic() + WAIT_S
        while link.connected:
            assert time.monotonic() < deadline, "the link did not notice that its connection is gone"
            link.end(1)
        assert link.cuts == 1
    finally:
        link.close()
