from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from receiver_twin import TwinConnection, TwinReceiver
from record_stream import EPOCH, JOB, TIMEOUT_S, Slots, connect, end, gradient, pair, wait_until

from lastgood._native import Receiver, ReceiverEvent, crc32c
from lastgood.wire.records import (
    HEADER_BYTES,
    MAX_ITERATION,
    MAX_PAYLOAD_BYTES,
    DType,
    Record,
    RecordKind,
    pack_header,
)

BUCKETS = [(1, 16, int(DType.float32)), (4, 24, int(DType.float64)), (7, 6, int(DType.bfloat16)), (9, 0, 1)]


def make(slots: Slots, **options: object) -> Receiver:
    return Receiver(JOB, EPOCH, slots.buckets, slots.addresses, owner=slots, **options)


def told(event: ReceiverEvent) -> tuple[str, int, int, int, int, str]:
    return (event.kind, event.connection, event.rank, event.bucket, event.iteration, event.cause)


class Both:
    """The native receiver and its twin, given the same bytes in the same order."""

    def __init__(self, count: int) -> None:
        self.slots = Slots(BUCKETS, count)
        self.native = make(self.slots)
        self.twin = TwinReceiver(JOB, EPOCH, BUCKETS, count)
        self.open: list[tuple[socket.socket, TwinConnection]] = []
        self._probes = 0

    def add(self, rank: int) -> None:
        near, number = connect(self.native, rank)
        twin = self.twin.add(rank)
        assert number == twin.number
        self.open.append((near, twin))

    def feed(self, place: int, data: bytes) -> None:
        near, twin = self.open[place]
        self.twin.feed(twin, data)
        # The receiver has closed it, as the twin has.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            near.sendall(data)
        self.settle()

    def close(self, place: int) -> None:
        near, twin = self.open.pop(place)
        self.twin.close(twin)
        near.close()
        self.settle()

    def control(self) -> None:
        """See that the native one's thread has done what follows from a call: it looks at new connections last."""
        self.add(99)
        self.close(len(self.open) - 1)

    def settle(self) -> None:
        wanted = (
            self.twin.read_bytes,
            sum(connection.parked for connection in self.twin.connections),
            sum(not connection.ended for connection in self.twin.connections),
        )
        names = ("read_bytes", "parked", "connections")
        wait_until(lambda: tuple(map(self.native.counters().get, names)) == wanted, f"{names} to be {wanted}")

    def compare(self) -> None:
        counters = self.native.counters()
        for name in ("read_bytes", "records", "bytes", "drained_bytes", "ends"):
            assert counters[name] == getattr(self.twin, name), name
        assert self.native.refused() == dict(self.twin.refused)
        for place, (index, _, _) in enumerate(BUCKETS):
            bucket = self.twin.buckets[index]
            assert self.native.first(index) == bucket.first
            for iteration in range(12):
                assert self.native.complete(index, iteration) == self.twin.complete(index, iteration)
                if bucket.inside(iteration):
                    slot, content = bucket.slot(iteration), self.slots.content(place, iteration)
                    for at, held in enumerate(slot.held):
                        assert not held or content[at] == slot.content[at]
        for iteration in range(12):
            assert self.native.missing(iteration) == self.twin.missing(iteration)

    def reopen(self) -> None:
        """Another connection for each that has ended."""
        for place, (_, twin) in reversed(list(enumerate(self.open))):
            if twin.ended:
                self.close(place)
                self.add(twin.rank)

    def events(self) -> None:
        got = list(map(told, self.native.poll(0)))
        assert got == self.twin.events
        self.twin.events = []

    def end(self) -> None:
        for near, _ in self.open:
            near.close()
        assert self.native.close(TIMEOUT_S)


@dataclass(frozen=True)
class Plan:
    """A record, but for the rank, which is the connection's."""

    bucket: tuple[int, int, int]
    begin: int
    payload: bytes
    iteration: int
    what: str
    """``good``, ``end``, or what is odd about it."""
    place: int
    cuts: tuple[int, ...]

    def pieces(self, rank: int) -> list[bytes]:
        made = bytes(self._made(rank))
        cuts = [0, *sorted(min(cut, len(made)) for cut in self.cuts), len(made)]
        return [made[a:b] for a, b in itertools.pairwise(cuts) if a < b]

    def _made(self, rank: int) -> bytes | bytearray:
        index, nbytes, dtype = self.bucket
        begin, payload, changed = self.begin, self.payload, {"rank": rank, "dtype": DType(dtype)}
        match self.what:
            case "end":
                return end(self.iteration, rank=rank)
            case "rank":
                changed["rank"] = rank + 1
            case "epoch":
                changed["epoch"] = EPOCH - 1 + 3 * (self.place % 2)
            case "flags":
                changed["flags"] = 0
            case "bucket":
                index += 1
            case "dtype":
                changed["dtype"] = DType.float64 if dtype == 1 else DType.float32
                begin, payload = 0, bytes(8)
            case "range":
                begin, payload = begin + nbytes, payload or bytes(8)
            case "payload":
                changed["checksum"] = self.place
            case "job":
                changed["job"] = JOB ^ 1
        made = bytearray(gradient(self.iteration, index, begin, payload, **changed))
        if self.what == "header":
            made[self.place % HEADER_BYTES] ^= 1 << self.place % 8
        elif self.what == "text":
            made[:HEADER_BYTES] = b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES)
        return made


ODD = "rank epoch flags bucket dtype range payload payload job header text"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Mostly good ones, often whole buckets; now and then one that is refused, or ends the connection."""
    bucket = draw(st.sampled_from(BUCKETS[:3] * 3 + BUCKETS))
    _, nbytes, dtype = bucket
    item = {1: 4, 2: 8, 4: 2}[dtype]
    whole, half = (0, nbytes), nbytes // item // 2 * item
    parts = st.tuples(st.integers(0, nbytes // item), st.integers(0, nbytes // item))
    begin, stop = draw(
        st.one_of(
            st.sampled_from([whole, whole, (0, half), (half, nbytes)]),
            parts.map(lambda part: (min(part) * item, max(part) * item)),
        )
    )
    odd = st.sampled_from(ODD.split())
    return Plan(
        bucket,
        begin,
        draw(st.binary(min_size=stop - begin, max_size=stop - begin)),
        draw(st.integers(0, 5)),
        draw(st.one_of(st.just("good"), st.just("good"), st.just("good"), st.just("good"), st.just("end"), odd)),
        draw(st.integers(0, 511)),
        tuple(draw(st.lists(st.integers(0, 90), max_size=2))),
    )


KINDS = "record " * 12 + "piece " * 5 + "open close advance advance set_first set_first reset begin events"


@st.composite
def operations(draw: st.DrawFn) -> tuple:
    numbers, index = st.integers(0, 5), st.sampled_from([1, 4, 7, 9])
    match draw(st.sampled_from(KINDS.split())):
        case "record":
            return "record", draw(st.integers(0, 3)), draw(plans())
        case ("piece" | "close") as name:
            return name, draw(st.integers(0, 3))
        case "open":
            return "open", draw(st.integers(0, 1))
        case "advance":
            return "advance", draw(numbers)
        case "set_first":
            return "set_first", draw(index), draw(numbers)
        case "reset":
            return "reset", draw(index)
        case "begin":
            return "begin", draw(st.integers(0, 1)), draw(st.booleans())
    return ("events",)


@settings(max_examples=100)
@given(count=st.integers(1, 3), placed=st.booleans(), steps=st.lists(operations(), min_size=10, max_size=60))
def test_as_its_twin(count: int, placed: bool, steps: list[tuple]) -> None:
    both = Both(count)
    # What connections have still to send of records that were begun, so that records of several mix.
    waiting: dict[int, list[bytes]] = {}
    try:
        for rank in (0, 1, 0):
            both.add(rank)
        for index, _, _ in BUCKETS * placed:
            assert both.native.set_first(index, 1) and both.twin.set_first(index, 1)
        for name, *given in steps:
            place = given[0] % len(both.open) if name in ("record", "piece", "close") and both.open else None
            if name == "open":
                both.add(given[0])
            elif place is not None:
                pieces = waiting.setdefault(both.open[place][1].number, [])
                if name == "record":
                    pieces += given[1].pieces(both.open[place][1].rank)
                if name != "close" and pieces:
                    both.feed(place, pieces.pop(0))
                elif name == "close":
                    both.close(place)
            elif name == "advance":
                both.native.advance(given[0])
                both.twin.advance(given[0])
            elif name == "set_first":
                assert both.native.set_first(*given) == both.twin.set_first(*given)
            elif name == "reset":
                both.native.reset(given[0])
                both.twin.reset(given[0])
            elif name == "begin":
                epoch = both.twin.epoch + given[0]
                both.native.begin(epoch, keep=given[1])
                both.twin.begin(epoch, given[1])
            elif name == "events":
                both.events()
            if name in ("advance", "set_first", "reset", "begin"):
                both.control()
            both.reopen()
        both.compare()
        both.events()
    finally:
        both.end()


def next_events(receiver: Receiver, count: int) -> list[tuple[str, int, int, int, int, str]]:
    """The next `count` events."""
    events: list[ReceiverEvent] = []
    while len(events) < count:
        more = receiver.poll(TIMEOUT_S, count - len(events))
        assert more, f"{TIMEOUT_S:g} s without an event; {list(map(told, events))} before"
        events += more
    return list(map(told, events))


def counter(receiver: Receiver, name: str, value: float) -> None:
    wait_until(lambda: receiver.counters()[name] == value, f"{name} to be {value}")


def test_split_at_every_byte() -> None:
    """The stream of an iteration is cut in two at each of its bytes; the parts arrive apart."""
    slots = Slots([(0, 8, 1), (1, 4, 4)], 2)
    receiver = make(slots)
    near, _ = connect(receiver, 3)
    for index in (0, 1):
        assert receiver.set_first(index, 0)
    parts = [bytes([number, 255 - number, 7, 0]) for number in range(3)]
    length = len(b"".join(parts)) + 4 * HEADER_BYTES
    read = 0
    for cut in range(length + 1):
        stream = (
            gradient(cut, 0, 4, parts[0], rank=3)
            + gradient(cut, 1, 0, parts[1], rank=3, dtype=DType.bfloat16)
            + gradient(cut, 0, 0, parts[2], rank=3)
            + end(cut, rank=3)
        )
        assert len(stream) == length
        for part in (stream[:cut], stream[cut:]):
            near.sendall(part)
            read += len(part)
            counter(receiver, "read_bytes", read)
        got = next_events(receiver, 3)
        assert got == [("complete", 1, 3, 1, cut, ""), ("complete", 1, 3, 0, cut, ""), ("end", 1, 3, 0, cut, "")]
        assert slots.content(0, cut) == parts[2] + parts[0] and slots.content(1, cut) == parts[1]
        assert receiver.missing(cut) == {}
        receiver.advance(cut + 1)
    assert receiver.refused() == {}
    near.close()
    assert next_events(receiver, 1) == [("closed", 1, 3, 0, 0, "")]
    assert receiver.close(TIMEOUT_S)


def test_a_byte_has_one_record() -> None:
    """Ranges that are held, in part or whole, or reserved by a record that is still on its way, are refused by name."""
    slots = Slots([(0, 16, 1)], 2)
    receiver = make(slots)
    receiver.set_first(0, 1)
    first, _ = connect(receiver, 0)
    second, _ = connect(receiver, 1)
    first.sendall(gradient(1, 0, 0, b"AAAABBBB") + gradient(1, 0, 8, b"CCCC")[:-2])
    counter(receiver, "read_bytes", 2 * HEADER_BYTES + 10)
    refused: dict[str, int] = {}
    for begin, nbytes, cause in (
        (0, 8, "duplicate"),
        (4, 4, "duplicate"),
        (4, 8, "overlapping"),
        (8, 4, "overlapping"),
        (8, 8, "overlapping"),
        (0, 16, "overlapping"),
        (12, 8, "out_of_range"),
    ):
        second.sendall(gradient(1, 0, begin, b"x" * nbytes, rank=1))
        refused[cause] = refused.get(cause, 0) + 1
        wait_until(lambda: receiver.refused() == refused, f"{refused}, and not {receiver.refused()}")
    second.sendall(gradient(1, 0, 12, b"DDDD", rank=1, checksum=7))
    refused["damaged_payload"] = 1
    wait_until(lambda: receiver.refused() == refused, f"{refused}, and not {receiver.refused()}")
    assert receiver.missing(1) == {0: [(8, 16)]}
    second.sendall(gradient(1, 0, 12, b"DDDD", rank=1))
    counter(receiver, "records", 2)
    first.sendall(b"CC")
    assert next_events(receiver, 1) == [("complete", 1, 0, 0, 1, "")]
    assert slots.content(0, 1) == b"AAAABBBBCCCCDDDD"
    receiver.close(TIMEOUT_S)


def test_a_connection_beyond_the_window_waits_and_others_go_on() -> None:
    nbytes = 1 << 10  # sent at once: between two parts of a record a busy machine may let more than `stall_s` pass
    slots = Slots([(0, nbytes, 1)], 2)
    receiver = make(slots, stall_s=0.2)
    receiver.set_first(0, 1)
    ahead, _ = connect(receiver, 0)
    behind, _ = connect(receiver, 1)
    ahead.settimeout(0.5)
    payloads = {iteration: os.urandom(nbytes) for iteration in range(1, 5)}
    later = b"".join(gradient(iteration, 0, 0, payloads[iteration]) for iteration in (3, 4))
    ahead.sendall(gradient(2, 0, 0, payloads[2]) + later)
    counter(receiver, "parked", 1)
    # It is not read: a sender that goes on comes to a stop in the kernel. Waiting is no stalling either.
    with pytest.raises(TimeoutError):
        for _ in range(10_000):
            ahead.sendall(bytes(64 << 10))
    assert receiver.counters()["read_bytes"] == 2 * HEADER_BYTES + nbytes
    behind.sendall(gradient(1, 0, 0, payloads[1], rank=1))
    assert next_events(receiver, 2) == [("complete", 1, 0, 0, 2, ""), ("complete", 2, 1, 0, 1, "")]
    assert slots.content(0, 1) == payloads[1] and slots.content(0, 2) == payloads[2]
    receiver.advance(2)
    assert next_events(receiver, 1) == [("complete", 1, 0, 0, 3, "")]
    assert slots.content(0, 3) == payloads[3] and slots.content(0, 2) == payloads[2]
    counter(receiver, "parked", 1)
    receiver.advance(3)
    assert next_events(receiver, 2)[0] == ("complete", 1, 0, 0, 4, "")
    assert slots.content(0, 4) == payloads[4]
    receiver.close(TIMEOUT_S)


def test_rolling_seeds() -> None:
    """A bucket without a seed blocks nobody, and what it keeps is there when the seed comes."""
    slots = Slots([(0, 4, 1), (1, 4, 1)], 2)
    receiver = make(slots)
    near, _ = connect(receiver, 0)
    receiver.set_first(0, 1)
    for iteration in range(1, 6):
        for index in (0, 1):
            near.sendall(gradient(iteration, index, 0, struct.pack("<I", iteration)))
        got = next_events(receiver, 2)
        assert got == [("complete", 1, 0, index, iteration, "") for index in (0, 1)]
        receiver.advance(iteration + 1)
    # Bucket 1 holds 4 and 5: a seed as of iteration 3 is new enough, one of 2 is not.
    assert receiver.first(1) == 4
    assert not receiver.set_first(1, 3)
    assert receiver.first(1) == 4 and receiver.complete(1, 4) and receiver.complete(1, 5)
    assert receiver.missing(3) == {1: [(0, 4)]}
    assert receiver.set_first(1, 5)
    assert not receiver.complete(1, 4) and receiver.complete(1, 5)
    assert receiver.missing(4) == {}
    assert slots.content(1, 5) == struct.pack("<I", 5)
    # Placed, it makes connections wait; let go again, it does not, and they are read on at once.
    near.sendall(b"".join(gradient(iteration, 1, 0, bytes(4)) for iteration in (6, 7, 8)))
    assert next_events(receiver, 1) == [("complete", 1, 0, 1, 6, "")]
    counter(receiver, "parked", 1)
    receiver.reset(1)
    assert next_events(receiver, 2) == [("complete", 1, 0, 1, iteration, "") for iteration in (7, 8)]
    assert receiver.first(1) == 7 and receiver.first(0) == 6
    receiver.close(TIMEOUT_S)


def test_a_full_queue_loses_no_event() -> None:
    slots = Slots([(0, 4, 1)], 2)
    receiver = make(slots, queue=3)
    connections = [connect(receiver, rank)[0] for rank in range(5)]
    for rank, near in enumerate(connections):
        near.sendall(b"".join(end(iteration, rank=rank) for iteration in range(50)))
        near.close()
    counter(receiver, "parked", 5)
    wanted = [[("end", rank + 1, rank, 0, iteration, "") for iteration in range(50)] for rank in range(5)]
    got = next_events(receiver, 5 * 51)
    for rank in range(5):
        assert [event for event in got if event[2] == rank] == [*wanted[rank], ("closed", rank + 1, rank, 0, 0, "")]
    counter(receiver, "connections", 0)
    assert receiver.counters()["parked"] == 0 and receiver.counters()["ends"] == 250
    assert receiver.poll(0) == []
    receiver.close(TIMEOUT_S)


def test_a_new_life_keeps_what_is_complete_and_nothing_else() -> None:
    slots = Slots([(0, 8, 1)], 2)
    receiver = make(slots)
    receiver.set_first(0, 1)
    old, _ = connect(receiver, 0)
    idle, _ = connect(receiver, 1)
    old.sendall(gradient(1, 0, 0, b"whole...") + gradient(2, 0, 0, b"part") + end(1))
    counter(receiver, "ends", 1)
    with pytest.raises(ValueError, match=f"epoch {EPOCH - 1} after epoch {EPOCH}"):
        receiver.begin(EPOCH - 1, keep=True)
    receiver.begin(EPOCH + 1, keep=True)
    assert sorted(next_events(receiver, 2)) == [("closed", 1, 0, 0, 0, "fenced"), ("closed", 2, 1, 0, 0, "fenced")]
    for near in (old, idle):
        assert near.recv(1) == b""
    assert receiver.complete(0, 1) and slots.content(0, 1) == b"whole..."
    assert receiver.missing(2) == {0: [(0, 8)]}
    new, _ = connect(receiver, 0)
    new.sendall(gradient(2, 0, 4, b"late", epoch=EPOCH) + gradient(2, 0, 0, b"other...", epoch=EPOCH + 1))
    assert next_events(receiver, 1) == [("complete", 3, 0, 0, 2, "")]
    assert slots.content(0, 2) == b"other..." and receiver.refused() == {"wrong_epoch": 1}
    receiver.begin(EPOCH + 1, keep=False)
    assert next_events(receiver, 1) == [("closed", 3, 0, 0, 0, "fenced")]
    assert receiver.first(0) is None and not receiver.complete(0, 1) and not receiver.complete(0, 2)
    receiver.close(TIMEOUT_S)


def test_a_record_that_stalls_ends_its_connection_and_gives_its_range_back() -> None:
    slots = Slots([(0, 8, 1)], 2)
    receiver = make(slots, stall_s=0.1)
    receiver.set_first(0, 1)
    near, _ = connect(receiver, 0)
    idle, _ = connect(receiver, 1)
    idle.sendall(end(1, rank=1))
    assert next_events(receiver, 1)[0][0] == "end"
    near.sendall(gradient(1, 0, 0, b"12345678")[:-1])
    assert next_events(receiver, 1) == [("closed", 1, 0, 0, 0, "stalled")]
    near.close()
    # One that is idle between records is not stalled.
    idle.sendall(gradient(1, 0, 0, b"abcdefgh", rank=1))
    assert next_events(receiver, 1) == [("complete", 2, 1, 0, 1, "")]
    assert receiver.refused() == {"stalled": 1}
    receiver.close(TIMEOUT_S)


def test_a_broken_connection_gives_its_range_back() -> None:
    slots = Slots([(0, 8, 1)], 2)
    receiver = make(slots)
    receiver.set_first(0, 1)
    near, _ = connect(receiver, 0)
    near.sendall(gradient(1, 0, 0, b"12345678")[:-1])
    counter(receiver, "read_bytes", HEADER_BYTES + 7)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    (event,) = receiver.poll(TIMEOUT_S)
    assert told(event) == ("closed", 1, 0, 0, 0, "broken") and event.errno == errno.ECONNRESET
    other, _ = connect(receiver, 1)
    other.sendall(gradient(1, 0, 0, b"abcdefgh", rank=1))
    assert next_events(receiver, 1) == [("complete", 2, 1, 0, 1, "")]
    assert slots.content(0, 1) == b"abcdefgh"
    receiver.close(TIMEOUT_S)


def test_a_length_over_the_limit_ends_the_connection() -> None:
    slots = Slots([(0, 8, 1)], 2)
    receiver = make(slots)
    near, _ = connect(receiver, 0)
    near.sendall(pack_header(Record(RecordKind.GRADIENT, JOB, EPOCH, 0, 1, 0, length=MAX_PAYLOAD_BYTES + 4, flags=1)))
    assert next_events(receiver, 1) == [("closed", 1, 0, 0, 0, "too_long")]
    assert receiver.refused() == {"too_long": 1}
    receiver.close(TIMEOUT_S)


@pytest.mark.parametrize("kind", list(RecordKind))
def test_an_iteration_has_room_above_it(kind: RecordKind) -> None:
    """For a bucket without a state moves its window along to whatever iteration a record says."""
    slots = Slots([(0, 8, 1)], 2)
    receiver = make(slots)
    for number, iteration in enumerate((MAX_ITERATION, (1 << 64) - 1), 1):
        near, _ = connect(receiver, 0)
        length = 8 if kind is RecordKind.GRADIENT else 0
        near.sendall(pack_header(Record(kind, JOB, EPOCH, 0, iteration, 0, length=length, flags=1)))
        assert next_events(receiver, 1) == [("closed", number, 0, 0, 0, "malformed")]
    near, _ = connect(receiver, 0)
    near.sendall(end(MAX_ITERATION - 1))
    assert next_events(receiver, 1) == [("end", 3, 0, 0, MAX_ITERATION - 1, "")]
    receiver.close(TIMEOUT_S)


def test_as_many_records_as_elements_may_be_on_their_way_at_once() -> None:
    """A small bucket that many ranks share out: each sends one element, and none has come whole yet."""
    slots = Slots([(0, 16, 1)], 2)
    receiver = make(slots)
    receiver.set_first(0, 1)
    ranks = [connect(receiver, rank)[0] for rank in range(4)]
    records = [gradient(1, 0, 4 * rank, bytes([rank] * 4), rank=rank) for rank in range(4)]
    for near, record in zip(ranks, records, strict=True):
        near.sendall(record[:-1])
    counter(receiver, "read_bytes", sum(map(len, records)) - 4)
    for near, record in zip(ranks, records, strict=True):
        near.sendall(record[-1:])
    wait_until(lambda: receiver.complete(0, 1) or receiver.refused() != {}, "the bucket, or a refusal")
    assert receiver.refused() == {}
    assert slots.content(0, 1) == b"".join(bytes([rank] * 4) for rank in range(4))
    receiver.close(TIMEOUT_S)


def test_too_many_separate_ranges_are_refused_until_they_join() -> None:
    most = 4096
    slots = Slots([(0, 8 * (most + 1), 1)], 1)
    receiver = make(slots)
    receiver.set_first(0, 1)
    near, _ = connect(receiver, 0)
    near.sendall(b"".join(gradient(1, 0, 8 * number, b"even") for number in range(most + 1)))
    counter(receiver, "records", most)
    near.sendall(gradient(1, 0, 4, b"odd."))
    counter(receiver, "records", most)
    wait_until(lambda: receiver.refused() == {"fragmented": 2}, "a second refusal")
    receiver.begin(EPOCH, keep=False)
    receiver.set_first(0, 1)
    assert next_events(receiver, 1)[0][-1] == "fenced"
    near, _ = connect(receiver, 0)
    near.sendall(b"".join(gradient(1, 0, 4 * number, b"word") for number in reversed(range(2 * most + 2))))
    assert next_events(receiver, 1) == [("complete", 2, 0, 0, 1, "")]
    receiver.close(TIMEOUT_S)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_connections_at_once(threads: int) -> None:
    """Real concurrency: disjoint records, repeated, torn and damaged ones on six connections; no byte is wrong."""
    rng = random.Random(threads)
    sizes = [40_000, 8, 300_000, 1_000_000]
    buckets = [(index, nbytes, 1) for index, nbytes in enumerate(sizes)]
    slots = Slots(buckets, 2)
    receiver = make(slots, threads=threads, queue=8)
    iterations = 6
    content = {
        (iteration, index): rng.randbytes(nbytes) for iteration in range(iterations) for index, nbytes, _ in buckets
    }
    streams: list[list[bytes]] = [[] for _ in range(6)]
    for iteration in range(iterations):
        for index, nbytes, _ in buckets:
            cuts = sorted({0, nbytes, *(4 * rng.randrange(nbytes // 4) for _ in range(rng.randrange(8)))})
            for begin, stop in itertools.pairwise(cuts):
                rank = rng.randrange(6)
                good = content[iteration, index][begin:stop]
                bad = bytes(byte ^ 1 for byte in good)
                # What is damaged or torn comes before the good one on its connection, what is repeated behind it.
                if rng.random() < 0.2:
                    streams[rank].append(gradient(iteration, index, begin, bad, rank=rank, checksum=crc32c(good)))
                streams[rank].append(gradient(iteration, index, begin, good, rank=rank))
                if rng.random() < 0.2:
                    streams[rank].append(gradient(iteration, index, begin, bad, rank=rank))
        for rank in range(6):
            streams[rank].append(end(iteration, rank=rank))
    for index, _, _ in buckets:
        receiver.set_first(index, 0)
    connections = [connect(receiver, rank)[0] for rank in range(6)]
    senders = [
        threading.Thread(target=lambda near, stream: near.sendall(b"".join(stream)), args=(near, stream))
        for near, stream in zip(connections, streams, strict=True)
    ]
    for sender in senders:
        sender.start()
    done: set[tuple[int, int]] = set()
    for iteration in range(iterations):
        while not {(iteration, index) for index, _, _ in buckets} <= done:
            (event,) = next_events(receiver, 1)
            assert event[0] in ("complete", "end")
            if event[0] == "complete":
                assert (event[4], event[3]) not in done
                done.add((event[4], event[3]))
        for index, _, _ in buckets:
            assert slots.content(index, iteration) == content[iteration, index]
        receiver.advance(iteration + 1)
    for sender in senders:
        sender.join(TIMEOUT_S)
    refused = receiver.refused()
    assert set(refused) <= {"duplicate", "damaged_payload", "old_iteration"} and refused["damaged_payload"] > 5
    assert receiver.counters()["bytes"] == iterations * sum(sizes)
    assert receiver.close(TIMEOUT_S)


@settings(max_examples=60)
@given(data=st.lists(st.binary(max_size=200), max_size=5), good=st.integers(0, 3), cut=st.integers(0, 400))
def test_garbage_harms_nobody(data: list[bytes], good: int, cut: int) -> None:
    garbage_harms_nobody(b"".join(gradient(1, 0, 4 * number, b"bad!") for number in range(good))[:cut], data)


def garbage_harms_nobody(begin: bytes, data: list[bytes]) -> None:
    """A connection brings some of a good stream and then anything; another one is served, and its bytes are right."""
    slots = Slots([(0, 12, 1), (1, 12, 1)], 2)
    receiver = make(slots, stall_s=5.0)
    receiver.set_first(0, 1)
    wild, _ = connect(receiver, 0)
    tame, _ = connect(receiver, 1)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for piece in (begin, *data):
            wild.sendall(piece)
    tame.sendall(gradient(1, 1, 0, b"twelve bytes", rank=1) + end(1, rank=1))
    wild.close()
    tame.close()
    counter(receiver, "connections", 0)
    got = list(map(told, receiver.poll(0)))
    assert [event for event in got if event[2] == 1] == [
        ("complete", 2, 1, 1, 1, ""),
        ("end", 2, 1, 0, 1, ""),
        ("closed", 2, 1, 0, 0, ""),
    ]
    assert slots.content(1, 1) == b"twelve bytes"
    first = slots.content(0, 1)
    held = set(range(12)) - {at for a, b in receiver.missing(1).get(0, []) for at in range(a, b)}
    assert all(first[at] == b"bad!"[at % 4] for at in held)
    assert sum(event[0] == "closed" for event in got) == 2
    assert receiver.close(TIMEOUT_S)


@pytest.mark.fuzz
def test_fuzz() -> None:
    """For ten minutes, or LASTGOOD_FUZZ_S: good streams with flipped, lost, repeated and strange bytes."""
    rng = random.Random(int.from_bytes(os.urandom(8), "little"))
    until = time.monotonic() + float(os.environ.get("LASTGOOD_FUZZ_S", "600"))
    while time.monotonic() < until:
        good = bytearray(b"".join(gradient(rng.randrange(3), 0, 4 * rng.randrange(3), b"bad!") for _ in range(6)))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(good))
            match rng.randrange(4):
                case 0:
                    good[at] ^= 1 << rng.randrange(8)
                case 1:
                    del good[at : at + rng.randrange(80)]
                case 2:
                    good[at:at] = good[at : at + rng.randrange(80)]
                case _:
                    good[at:at] = rng.randbytes(rng.randrange(80))
        cut = rng.randrange(len(good) + 1)
        garbage_harms_nobody(bytes(good[:cut]), [bytes(good[cut:])])


# -- a receiver's life -------------------------------------------------------------------------------------------------


def threads_now() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_threads_end_with_it() -> None:
    before = threads_now()
    slots = Slots([(0, 8, 1)], 2)
    receiver = make(slots, threads=3, cpus=[0])
    fresh = threads_now() - before
    assert len(fresh) == 3 and all(os.sched_getaffinity(int(task)) == {0} for task in fresh)
    near, _ = connect(receiver, 0)
    near.sendall(gradient(1, 0, 0, b"12345678")[:-1])
    del receiver
    gc.collect()
    wait_until(lambda: not threads_now() & fresh, "the threads to end")
    # A reset where the end came before all was read.
    with contextlib.suppress(ConnectionResetError):
        assert near.recv(1) == b""


def test_misuse_is_refused() -> None:
    slots = Slots([(0, 8, 1)], 2)
    for what, buckets, addresses in (
        ("at least one slot", slots.buckets, []),
        ("has 0 addresses for 1 buckets", slots.buckets, [[]]),
        ("bucket 0 is there twice", slots.buckets * 2, [[1, 1]]),
        ("bucket 3 of dtype 9", [(3, 8, 9)], [[1]]),
        ("bucket 3 of dtype 1 and 7 bytes", [(3, 7, 1)], [[1]]),
    ):
        with pytest.raises(ValueError, match=what):
            Receiver(JOB, EPOCH, buckets, addresses)
    with pytest.raises(ValueError, match="threads and queue"):
        make(slots, threads=0)
    with pytest.raises(ValueError, match="stall_s"):
        make(slots, stall_s=0.0)
    with pytest.raises(OSError, match="pinning of a receiver thread"):
        make(slots, cpus=[1023])
    receiver = make(slots)
    with pytest.raises(OSError, match="descriptor"):
        receiver.add(-1, 0)
    for call in (lambda: receiver.set_first(5, 1), lambda: receiver.reset(5), lambda: receiver.complete(5, 1)):
        with pytest.raises(ValueError, match="bucket 5 is not one of its own"):
            call()
    assert receiver.close(TIMEOUT_S) and receiver.close(TIMEOUT_S)
    near, far = pair()
    with near, far, pytest.raises(RuntimeError, match=r"add\(\) after close\(\)"):
        receiver.add(far.fileno(), 0)
    assert receiver.poll(TIMEOUT_S) == []


def test_memory_lives_as_long_as_the_receiver() -> None:
    gone = threading.Event()

    class Owner(Slots):
        def __del__(self) -> None:
            gone.set()

    slots = Owner([(0, 8, 1)], 2)
    receiver = make(slots)
    del slots
    gc.collect()
    assert not gone.is_set()
    del receiver
    gc.collect()
    assert gone.is_set()


KEEPS = """
import ctypes, gc, os, sys, weakref
from lastgood._native import Receiver

class Owner:
    memory = ctypes.create_string_buffer(8)

owner = Owner()
before = set(os.listdir("/proc/self/task"))
receiver = Receiver(1, 1, [(0, 8, 1)], [[ctypes.addressof(owner.memory)]], owner=owner)
(thread,) = set(os.listdir("/proc/self/task")) - before
alive = weakref.ref(owner)
del owner
print(thread, flush=True)
sys.stdin.readline()
del receiver
gc.collect()
print("kept" if alive() else "freed", flush=True)
sys.stdin.readline()
os._exit(0)
"""
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 17, 0x4206, 0x4207, 0x40000000


def trace(request: int, thread: int) -> int:
    """The operating system's number of what went wrong, or 0."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    ptrace.restype = ctypes.c_long
    return ctypes.get_errno() if ptrace(request, thread, None, None) else 0


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [True, False])
def test_memory_that_a_thread_may_write_into_for_ever_is_never_freed(stopped: bool) -> None:
    """A thread that is stopped (as a debugger does) does not end in the time that the receiver's end gives it."""
    child = subprocess.Popen([sys.executable, "-c", KEEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdin is not None and child.stdout is not None
        thread = int(child.stdout.readline())
        if stopped:
            if number := trace(PTRACE_SEIZE, thread):
                pytest.skip(f"no thread can be stopped here: {os.strerror(number)}")
            assert trace(PTRACE_INTERRUPT, thread) == 0
            assert os.WIFSTOPPED(os.waitpid(thread, WALL)[1])
        child.stdin.write("\n")
        child.stdin.flush()
        said = child.stdout.readline()
        if stopped:
            assert trace(PTRACE_DETACH, thread) == 0
        child.communicate("\n", timeout=TIMEOUT_S)
        assert said == ("kept\n" if stopped else "freed\n")
    finally:
        child.kill()
        child.communicate()


def test_poll_can_be_interrupted() -> None:
    program = (
        "import signal\nfrom lastgood._native import Receiver\n"
        "receiver = Receiver(1, 1, [(0, 0, 1)], [[0]])\n"
        "print('ready', flush=True)\nreceiver.poll(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, text = child.communicate(timeout=TIMEOUT_S)
    assert "KeyboardInterrupt" in text and child.returncode == -signal.SIGINT


def test_a_fork_leaves_it_alone() -> None:
    slots = Slots([(0, 4, 1)], 1)
    receiver = make(slots)
    receiver.set_first(0, 1)
    near, _ = connect(receiver, 0)
    child = os.fork()
    if child == 0:
        del receiver
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    near.sendall(gradient(1, 0, 0, b"1234"))
    assert next_events(receiver, 1) == [("complete", 1, 0, 0, 1, "")]
    receiver.close(TIMEOUT_S)
