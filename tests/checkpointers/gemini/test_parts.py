"""Gemini's parts without any peer: placement, partition, marks of traffic, frames on a connection."""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.checkpointers.gemini.address_file import Address
from lastgood.checkpointers.gemini.partition import LEAST_CHUNK_BYTES, Network, chunks_for_gap, partition
from lastgood.checkpointers.gemini.placement import groups_and_ring, placement
from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, WaitTimeout
from lastgood.wire.frames import (
    MAX_CHUNK_BYTES,
    Kind,
    Wire,
    chunk_checksum,
    prove_trainer,
)
from tests.wire.support.answering import prove_peer

# -- placement ---------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 40).flatmap(lambda machines: st.tuples(st.just(machines), st.integers(1, machines)))


@given(sizes)
def test_every_checkpoint_has_its_holders_and_every_machine_the_same_load(size):
    machines, replicas = size
    holders = placement(machines, replicas)
    assert len(holders) == machines
    for machine, own in enumerate(holders):
        assert own[0] == machine
        assert len(own) == len(set(own)) == replicas
        assert all(0 <= holder < machines for holder in own)
    load = [sum(machine in own for own in holders) for machine in range(machines)]
    assert load == [replicas] * machines


@given(sizes)
def test_groups_are_closed_and_what_is_left_is_one_ring(size):
    machines, replicas = size
    holders = placement(machines, replicas)
    groups, ring = groups_and_ring(machines, replicas)
    assert sorted(itertools.chain(*groups, ring)) == list(range(machines))
    for group in groups:
        assert len(group) == replicas
        assert all(set(holders[own]) == set(group) for own in group)
    assert bool(ring) == (machines % replicas != 0)
    if ring:
        assert replicas < len(ring) < 2 * replicas
        successors = {own: [ring[(place + ahead) % len(ring)] for ahead in range(replicas)]
                      for place, own in enumerate(ring)}  # fmt: skip
        assert all(list(holders[own]) == expected for own, expected in successors.items())


def test_placements_of_the_papers_kind():
    assert placement(4, 2) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert placement(5, 2) == [(0, 1), (1, 0), (2, 3), (3, 4), (4, 2)]
    with pytest.raises(ConfigError, match=r"3 replicas.*2 machines"):
        placement(2, 3)


def survived(machines, replicas, failed):
    """By trying every set of failed machines."""
    holders = [set(own) for own in placement(machines, replicas)]
    lost = [set(gone) for gone in itertools.combinations(range(machines), failed)]
    return sum(not any(own <= gone for own in holders) for gone in lost) / math.comb(machines, failed)


def papers_probability(machines, replicas, failed):
    """The paper's corollary for group placement: exact below 2 m failures, else a lower bound."""
    if failed < replicas:
        return 1.0
    lost = (machines // replicas) * math.comb(machines - replicas, failed - replicas)
    return max(0.0, 1 - lost / math.comb(machines, failed))


@pytest.mark.parametrize("machines", range(1, 10))
def test_groups_survive_as_the_paper_says(machines):
    for replicas in (m for m in range(1, machines + 1) if machines % m == 0):
        for failed in range(machines + 1):
            exact, formula = survived(machines, replicas, failed), papers_probability(machines, replicas, failed)
            assert formula <= exact + 1e-12
            if failed < 2 * replicas:
                assert formula == pytest.approx(exact, abs=1e-12)


# -- partition ---------------------------------------------------------------------------------------------------------


def test_chunks_of_a_gap_by_hand():
    network = Network(bytes_per_s=1e6, latency_s=0.01)
    # A part of 100,000 bytes takes 0.11 s: two of them leave 0.03 s, of which 0.02 s carry bytes.
    assert list(chunks_for_gap(0.25, 10**9, 100_000, network))[:2] == [100_000, 100_000]
    assert list(chunks_for_gap(0.25, 10**9, 100_000, network))[2] == pytest.approx(20_000, abs=1)
    assert list(chunks_for_gap(0.25, 10**9, 100_000, network))[3:] == []
    assert list(chunks_for_gap(0.25, 150_000, 100_000, network)) == [100_000, 50_000]
    assert list(chunks_for_gap(0.012, 10**9, 100_000, network)) == []
    assert list(chunks_for_gap(math.inf, 250, 100, network)) == [100, 100, 50]


@given(
    gaps_s=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    nbytes=st.integers(1, 10**7),
    part_bytes=st.integers(LEAST_CHUNK_BYTES, 10**6),
    bytes_per_s=st.floats(1e6, 1e10),
    latency_s=st.floats(0, 0.1),
    gamma=st.floats(0.1, 0.9),
)
def test_a_partition_fits_its_gaps(gaps_s, nbytes, part_bytes, bytes_per_s, latency_s, gamma):
    network = Network(bytes_per_s, latency_s)
    chunks = partition(gaps_s, nbytes, part_bytes, network, gamma)
    assert sum(size for _, size in chunks) == nbytes
    assert all(0 < size <= part_bytes for _, size in chunks)
    numbers = [number for number, _ in chunks]
    assert numbers == sorted(numbers)
    for number in set(numbers):
        used_s = sum(network.seconds(size) for other, size in chunks if other == number)
        endless = number == numbers[-1] and number % len(gaps_s) == len(gaps_s) - 1
        assert endless or used_s <= gamma * gaps_s[number % len(gaps_s)] + 1e-6
    if any(network.least_span_s(LEAST_CHUNK_BYTES) < gamma * gap_s * 0.99 for gap_s in gaps_s):
        first = [size for number, size in chunks if number < len(gaps_s)]
        assert first, "a gap that can hold a chunk must be used"


# -- traffic -----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0
        self.read = threading.Event()

    def __call__(self):
        now = self.now
        self.read.set()
        return now


def iteration(traffic, clock, moved=0):
    """Gaps of 0.4, 0.1 and 0.2 s around communications of 0.2 and 0.3 s; the second one overlaps a third."""
    clock.now += 0.4
    traffic.moved(moved)
    with traffic.busy():
        clock.now += 0.2
    clock.now += 0.1
    traffic.moved(2 * moved)
    traffic.begin()
    clock.now += 0.1
    with traffic.busy():
        clock.now += 0.1
    clock.now += 0.1
    traffic.end()
    clock.now += 0.2
    traffic.update()


def test_gaps_and_communication_are_what_the_marks_say():
    clock = Clock()
    traffic = Traffic(3, clock)
    traffic.update()
    assert traffic.profile == () and traffic.wait_for_gap(0.01, 0.5, 1) == math.inf, "nothing is known yet"
    for _ in range(3):
        iteration(traffic, clock)
    for moved in (10, 30):
        iteration(traffic, clock, moved)
    assert traffic.profile == pytest.approx((0.4, 0.1, 0.2))
    facts = traffic.facts()
    assert facts["bytes_per_idle_gap"] == {"gaps": 4, "median": 25.0, "max": 60}
    communication = facts["communication_s"]
    assert communication["without_checkpoint_traffic"] == pytest.approx(0.5)
    assert communication["with_checkpoint_traffic"] == pytest.approx(0.5)
    assert (communication["iterations_without"], communication["iterations_with"]) == (3, 2)


def profiled():
    clock = Clock()
    traffic = Traffic(5, clock)
    traffic.update()
    for _ in range(2):
        iteration(traffic, clock)
    return traffic, clock


def test_a_gap_is_used_for_what_is_left_of_its_share():
    traffic, clock = profiled()
    clock.now += 0.05
    assert traffic.wait_for_gap(0.01, 0.5, 1) == pytest.approx(0.4 * 0.5 - 0.05)
    clock.now += 0.16
    with pytest.raises(WaitTimeout, match="0 of its marks are open"):
        waits_in_fake_time(traffic, clock, 0.3)
    traffic.begin()
    traffic.end()
    assert traffic.wait_for_gap(0.01, 0.5, 1) == pytest.approx(0.1 * 0.5)


def waits_in_fake_time(traffic, clock, seconds):
    """Fail as the wait would, with the clock put forward while it waits."""

    def forward():
        assert clock.read.wait(60), "nobody waits"
        clock.now += seconds

    clock.read.clear()
    thread = threading.Thread(target=forward)
    thread.start()
    try:
        return traffic.wait_for_gap(0.01, 0.5, seconds)
    finally:
        thread.join()


def test_training_that_pauses_or_waits_leaves_the_network_to_the_checkpoint():
    traffic, clock = profiled()
    clock.now += 0.3
    with traffic.hurried():
        assert traffic.wait_for_gap(0.01, 0.5, 1) == math.inf
    clock.now += 0.56
    assert traffic.wait_for_gap(0.01, 0.5, 1) == math.inf


def test_where_no_gap_is_long_enough_the_last_one_is_endless():
    traffic, clock = profiled()
    with traffic.busy():
        clock.now += 0.1
    with traffic.busy():
        clock.now += 0.1
    assert traffic.wait_for_gap(0.9, 0.5, 1) == math.inf


def test_a_sender_waits_until_communication_ends():
    traffic = Traffic(5)
    traffic.begin()
    ended = []

    def end():
        time.sleep(0.1)
        ended.append(True)
        traffic.end()

    thread = threading.Thread(target=end)
    thread.start()
    traffic.wait_for_gap(0.0, 0.5, 60)
    assert ended
    thread.join()
    traffic.begin()
    with pytest.raises(WaitTimeout, match="1 of its marks"):
        traffic.wait_for_gap(0.0, 0.5, 0.05)
    traffic.cancel()
    with pytest.raises(CheckpointError, match="given up"):
        traffic.wait_for_gap(0.0, 0.5, 10)
    traffic.end()
    with pytest.raises(RuntimeError, match="without begin"):
        traffic.end()


def test_the_end_of_a_device_s_communication_is_waited_for_elsewhere():
    class Event:
        happened = threading.Event()

        def synchronize(self):
            assert self.happened.wait(60)

    traffic = Traffic(5)
    traffic.begin()
    traffic.end_after(Event())
    assert traffic.is_busy
    Event.happened.set()
    traffic.wait_for_gap(0.0, 0.5, 60)
    assert not traffic.is_busy
    traffic.close()


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname(), 60)
        right, _ = listener.accept()
    wires = Wire(left, "the right end", 60), Wire(right, "the left end", 60)
    yield wires
    for wire in wires:
        wire.close()


def test_frames_come_as_they_went(ends):
    left, right = ends
    left.send_message(op="hello", number=3)
    assert right.receive_message("hello") == {"op": "hello", "number": 3}
    data = memoryview(os.urandom(1000))
    left.send_chunk(data, 77, 5)
    frame = right.receive_frame("a chunk")
    assert (frame.kind, frame.offset, frame.length, frame.checksum) == (Kind.CHUNK, 77, 1000, 5)
    got = bytearray(1000)
    right.read_into(memoryview(got), "its bytes")
    assert got == data
    assert not right.ended() and not right.wait_readable(0.01)
    left.close()
    assert right.wait_readable(60) and right.ended()
    with pytest.raises(CheckpointError, match=r"left end closed the connection"):
        right.receive_frame("more")


def test_what_is_declared_too_long_or_is_no_frame_is_refused(ends):
    left, right = ends
    left.write("a header", b"LGM1\2\0\0\0" + bytes(4) + bytes(8) + (MAX_CHUNK_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(CorruptCheckpoint, match=f"declared {MAX_CHUNK_BYTES + 1} bytes"):
        right.receive_frame("a chunk")
    left.write("a header", b"HTTP" + bytes(24))
    with pytest.raises(CorruptCheckpoint, match="no frame"):
        right.receive_frame("a chunk")
    left.write("a header", b"LGM1\1\0\0\0" + bytes(4) + bytes(8) + (2).to_bytes(8, "little"), b"{}")
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        right.receive_message("a message")


def test_waits_end_and_say_for_what(ends):
    left, right = ends
    left.timeout_s = right.timeout_s = 0.5
    with pytest.raises(WaitTimeout, match=r"waited 0\.5 s for the answer, the left end"):
        right.receive_frame("the answer")
    with pytest.raises(WaitTimeout, match="to go out"):
        for _ in range(10):
            left.send_chunk(memoryview(bytes(16 << 20)), 0, 0)


def test_both_sides_must_know_the_token(ends):
    left, right = ends
    results = {}

    def peer(token):
        try:
            prove_peer(right, token)
            results["peer"] = None
        except CheckpointError as error:
            results["peer"] = error

    for token, fine in ((b"a" * 32, True), (b"b" * 32, False)):
        thread = threading.Thread(target=peer, args=(token,))
        thread.start()
        if fine:
            prove_trainer(left, b"a" * 32)
        else:
            with pytest.raises(MismatchError, match="does not know this job's token"):
                prove_trainer(left, b"a" * 32)
        thread.join(60)
        assert (results["peer"] is None) == fine


def test_a_trainer_without_the_token_is_refused(ends):
    left, right = ends
    left.write("a greeting", b"lastgood peer 2\n", bytes(32))
    thread = threading.Thread(target=lambda: left.write("a false proof", bytes(32)))
    thread.start()
    with pytest.raises(MismatchError, match="does not know the token"):
        prove_peer(right, b"a" * 32)
    thread.join(60)
    left.write("noise", b"GET / HTTP/1.1\r\n", bytes(32))
    with pytest.raises(MismatchError, match="does not speak"):
        prove_peer(right, b"a" * 32)


def test_a_checksum_knows_its_place():
    data = memoryview(b"some bytes")
    assert len({chunk_checksum(data, 1, 0), chunk_checksum(data, 2, 0), chunk_checksum(data, 1, 64)}) == 3


def test_an_address_file_is_private_and_checked(tmp_path):
    path = Address.path_of(tmp_path, 3, 1)
    address = Address(path, "127.0.0.1", 1234, b"t" * 32, 99)
    address.write()
    assert Address.read(path) == address
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]
    for text in ("", "[]", '{"host": "127.0.0.1", "port": 0, "pid": 1, "token": ""}', "x" * 5000):
        path.write_text(text)
        with pytest.raises(CorruptCheckpoint, match="not the address of a peer"):
            Address.read(path)
