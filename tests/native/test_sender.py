from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import select
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
from record_stream import EPOCH, JOB, TIMEOUT_S, Memory, Slots, pair, wait_until

from lastgood._native import Receiver, Sender, crc32c_portable
from lastgood.wire.records import (
    FINAL,
    HEADER_BYTES,
    ITEM_BYTES,
    MAX_ITERATION,
    DType,
    Record,
    RecordKind,
    parse_header,
)

RANK = 6


def make(near: socket.socket, **options: object) -> Sender:
    return Sender(near.fileno(), JOB, EPOCH, RANK, "shadow 10.9.8.7:6", **options)


def read_exactly(far: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = far.recv(count - len(content))
        if not piece:
            raise EOFError(f"{len(content)} of {count} bytes")
        content += piece
    return content


def next_record(far: socket.socket) -> tuple[Record, bytes]:
    record = parse_header(read_exactly(far, HEADER_BYTES), "the sender")
    payload = read_exactly(far, record.length)
    assert crc32c_portable(payload) == record.checksum
    assert (record.job, record.epoch, record.rank) == (JOB, EPOCH, RANK)
    return record, payload


@dataclass(frozen=True)
class Put:
    iteration: int
    bucket: int
    dtype: DType
    offset: int
    payload: bytes
    borrowed: bool
    final: bool

    @property
    def flags(self) -> int:
        return FINAL if self.final else 0


@st.composite
def puts(draw: st.DrawFn) -> Put | int:
    """A gradient, or the iteration of an END."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.integers(0, MAX_ITERATION - 1))
    dtype = draw(st.sampled_from(DType))
    item = ITEM_BYTES[dtype]
    length = draw(st.sampled_from([0, 1, 2, 5, 20, 31])) * item
    return Put(
        draw(st.integers(0, MAX_ITERATION - 1)),
        draw(st.integers(0, 2**32 - 1)),
        dtype,
        draw(st.integers(0, 2**40)) * item,
        draw(st.binary(min_size=length, max_size=length)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@settings(max_examples=100)
@given(
    calls=st.lists(puts(), max_size=30),
    record_bytes=st.sampled_from([8, 16, 64, 1 << 20]),
    pool_bytes=st.integers(248, 600),
    queue=st.integers(1, 8),
)
def test_all_goes_out_in_order(calls: list[Put | int], record_bytes: int, pool_bytes: int, queue: int) -> None:
    near, far = pair()
    sender = make(near, record_bytes=record_bytes, pool_bytes=pool_bytes, queue=queue)
    near.close()
    got: list[tuple[Record, bytes]] = []

    def read() -> None:
        with contextlib.suppress(EOFError):
            while True:
                got.append(next_record(far))

    reader = threading.Thread(target=read)
    reader.start()
    lent = []
    for number, call in enumerate(calls):
        if isinstance(call, int):
            assert sender.end(call, timeout_s=TIMEOUT_S) == number + 1
            continue
        memory = Memory(call.payload)
        ticket = sender.put(
            call.iteration,
            call.bucket,
            call.dtype,
            call.offset,
            memory.address,
            len(call.payload),
            borrowed=call.borrowed,
            timeout_s=TIMEOUT_S,
            final=call.final,
        )
        assert ticket == number + 1 == sender.last_ticket
        if call.borrowed:
            lent.append(memory)
        else:
            memory.raw[:] = b"\xff" * len(memory.raw)
    assert sender.wait_returned(len(calls), TIMEOUT_S)
    for memory in lent:
        memory.raw[:] = b"\xff" * len(memory.raw)
    counters = sender.counters()
    assert (counters["queued"], counters["queued_bytes"]) == (0, 0)
    assert sender.close(TIMEOUT_S) and sender.errno == 0
    reader.join(TIMEOUT_S)
    assert counters["records"] == len(got)
    assert counters["bytes"] == sum(len(payload) for _, payload in got)
    far.close()
    for call in calls:
        if isinstance(call, int):
            record, _ = got.pop(0)
            assert (record.kind, record.iteration, record.length) == (RecordKind.END, call, 0)
            continue
        at = 0
        while True:
            record, payload = got.pop(0)
            assert (record.kind, record.iteration, record.bucket) == (RecordKind.GRADIENT, call.iteration, call.bucket)
            assert (record.dtype, record.offset, record.flags) == (call.dtype, call.offset + at, call.flags)
            assert payload == call.payload[at : at + record_bytes]
            at += record_bytes
            if at >= len(call.payload):
                break
    assert got == []


BULK = Memory(bytes(1 << 20))


def fill(near: socket.socket, sender: Sender) -> int:
    """Lend BULK until the kernel takes no more, and close `near`, which is the sender's; return the last ticket."""
    full = 0
    deadline = time.monotonic() + TIMEOUT_S
    while full < 5:
        assert time.monotonic() < deadline, "the kernel takes everything"
        # Not how long nothing was sent: the sender's thread may get no processor for a while.
        full = 0 if select.select([], [near], [], 0)[1] else full + 1
        if sender.counters()["queued"] < 8:
            assert sender.put(1, 0, 1, 0, BULK.address, len(BULK.raw), borrowed=True, timeout_s=TIMEOUT_S)
        else:
            threading.Event().wait(0.01)
    near.close()
    return sender.last_ticket


def test_lent_memory_is_sent_from_where_it_lies_and_copies_are_not() -> None:
    near, far = pair()
    sender = make(near)
    last = fill(near, sender)
    lent, copied = Memory(b"before"), Memory(b"before")
    for memory, borrowed in ((lent, True), (copied, False)):
        sender.put(2, 0, 4, 0, memory.address, 6, borrowed=borrowed, timeout_s=0)
        memory.raw[:] = b"behind"
    assert not sender.returned(last + 1) and not sender.wait_returned(last + 1, 0.01)
    records = [next_record(far) for _ in range(last + 2)]
    assert [payload for _, payload in records[-2:]] == [b"behind", b"before"]
    assert sender.wait_returned(last + 2, TIMEOUT_S) and sender.returned(last + 2)
    assert sender.counters()["blocked_s"] > 0
    assert sender.close(TIMEOUT_S)
    far.close()


def test_a_full_queue_says_so_and_has_room_again() -> None:
    near, far = pair()
    sender = make(near, queue=40, pool_bytes=100)
    full = fill(near, sender)
    while sender.put(1, 0, 1, 0, BULK.address, len(BULK.raw), borrowed=True, timeout_s=0):
        full += 1
    assert sender.put(1, 0, 1, 0, BULK.address, 4, borrowed=False, timeout_s=0) == 0
    assert sender.end(1, timeout_s=0) == 0
    assert sender.last_ticket == full and sender.counters()["queued"] == 40
    assert sender.put(1, 0, 1, 0, BULK.address, 4, borrowed=False, timeout_s=0.01) == 0
    for _ in range(full):
        next_record(far)
    assert sender.wait_returned(full, TIMEOUT_S)
    small = Memory(bytes(range(100)))
    assert sender.put(2, 0, 1, 0, small.address, 100, borrowed=False, timeout_s=0)
    assert next_record(far)[1] == bytes(range(100))
    assert sender.close(TIMEOUT_S)
    far.close()


def test_the_pool_bounds_copies_and_not_lent_memory() -> None:
    near, far = pair()
    sender = make(near, pool_bytes=64)
    last = fill(near, sender)
    small = Memory(bytes(64))
    assert sender.put(1, 0, 1, 0, small.address, 40, borrowed=False, timeout_s=0)
    assert not sender.put(1, 0, 1, 0, small.address, 28, borrowed=False, timeout_s=0.01)
    assert sender.put(1, 0, 1, 0, small.address, 24, borrowed=False, timeout_s=0)
    assert not sender.put(1, 0, 1, 0, small.address, 4, borrowed=False, timeout_s=0)
    assert sender.put(1, 0, 1, 0, small.address, 64, borrowed=True, timeout_s=0) == last + 3
    sender.abort()
    far.close()


def test_small_records_go_out_together() -> None:
    near, far = pair()
    sender = make(near)
    last = fill(near, sender)
    before = sender.counters()["sends"]
    word = Memory(b"word")
    for number in range(2000):
        sender.put(2, number, 1, 0, word.address, 4, borrowed=False, timeout_s=0)
    for _ in range(last):
        next_record(far)
    assert [next_record(far)[0].bucket for _ in range(2000)] == list(range(2000))
    assert sender.wait_returned(last + 2000, TIMEOUT_S)
    # What was before takes a few more calls, as the other side reads it.
    assert sender.counters()["sends"] - before < 1000
    assert sender.close(TIMEOUT_S)
    far.close()


@pytest.mark.parametrize("reset", [False, True])
def test_a_closed_connection_comes_out_of_the_next_call(reset: bool) -> None:
    near, far = pair()
    sender = make(near)
    near.close()
    sender.end(1, timeout_s=0)
    next_record(far)
    if reset:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    number = errno.ECONNRESET if reset else errno.EPIPE
    wait_until(lambda: sender.errno == number, "the failure")
    for call in (lambda: sender.end(2, timeout_s=0), lambda: sender.wait_returned(2, 0)):
        with pytest.raises(OSError, match=r"sending to shadow 10\.9\.8\.7:6") as caught:
            call()
        assert caught.value.errno == number
    assert sender.returned(100)
    assert not sender.close(TIMEOUT_S)


def test_a_failure_ends_waiting_and_gives_memory_back() -> None:
    near, far = pair()
    sender = make(near, queue=60)
    last = fill(near, sender)
    failures: list[int | None] = []

    def wait() -> None:
        try:
            sender.wait_returned(last, TIMEOUT_S)
        except OSError as error:
            failures.append(error.errno)

    waiter = threading.Thread(target=wait)
    waiter.start()
    far.close()
    waiter.join(TIMEOUT_S)
    assert failures in ([errno.ECONNRESET], [errno.EPIPE])
    assert sender.returned(last)


def test_another_side_that_takes_nothing_is_a_failure_after_a_while() -> None:
    near, far = pair()
    sender = make(near, stall_s=0.2)
    near.close()
    memory = Memory(bytes(64 << 20))
    ticket = sender.put(1, 0, 1, 0, memory.address, 64 << 20, borrowed=True, timeout_s=0)
    with pytest.raises(OSError, match="sending to shadow") as caught:
        sender.wait_returned(ticket, TIMEOUT_S)
    assert caught.value.errno == errno.ETIMEDOUT
    # An idle one waits for nothing.
    other, end = pair()
    idle = make(other, stall_s=0.1)
    assert not threading.Event().wait(0.3) and idle.errno == 0
    assert idle.close(TIMEOUT_S)
    for connection in (far, other, end):
        connection.close()


def test_close_and_abort_are_bounded() -> None:
    memory = Memory(bytes(64 << 20))
    for way in ("close", "abort"):
        near, far = pair()
        sender = make(near)
        near.close()
        ticket = sender.put(1, 0, 1, 0, memory.address, 64 << 20, borrowed=True, timeout_s=0)
        if way == "close":
            assert not sender.close(0.1)
        else:
            sender.abort()
        assert sender.join(TIMEOUT_S) and sender.returned(ticket)
        assert sender.errno == errno.ECANCELED
        with pytest.raises(OSError, match="sending to shadow"):
            sender.end(1, timeout_s=0)
        with pytest.raises(EOFError):
            while True:
                next_record(far)
        far.close()


def test_misuse_is_refused() -> None:
    near, far = pair()
    with near, far:
        for options in ({"queue": 0}, {"pool_bytes": 0}, {"record_bytes": 0}, {"record_bytes": 12}, {"stall_s": 0.0}):
            with pytest.raises(ValueError, match=r"Sender: .* must be"):
                make(near, **options)
        with pytest.raises(ValueError, match="record_bytes must be"):
            make(near, record_bytes=(64 << 20) + 8)
        with pytest.raises(OSError, match="descriptor"):
            Sender(-1, JOB, EPOCH, RANK, "nowhere")
        sender = make(near, pool_bytes=8)
        memory = Memory(bytes(16))
        for dtype, offset, nbytes in ((1, 2, 4), (1, 0, 6), (9, 0, 4), (2, 4, 8)):
            with pytest.raises(ValueError, match=f"{nbytes} bytes at offset {offset} of dtype {dtype} make no record"):
                sender.put(1, 0, dtype, offset, memory.address, nbytes, borrowed=True, timeout_s=0)
        with pytest.raises(ValueError, match="16 bytes never fit the pool of 8"):
            sender.put(1, 0, 1, 0, memory.address, 16, borrowed=False, timeout_s=0)
        with pytest.raises(ValueError, match="address 0"):
            sender.put(1, 0, 1, 0, 0, 16, borrowed=True, timeout_s=0)
        assert sender.last_ticket == 0
        assert sender.close(TIMEOUT_S) and sender.close(TIMEOUT_S)
        with pytest.raises(RuntimeError, match=r"put\(\) after close\(\)"):
            sender.end(1, timeout_s=0)


def test_a_processor_that_is_not_there_is_refused() -> None:
    near, far = pair()
    with near, far:
        with pytest.raises(OSError, match="pinning of a sender thread"):
            make(near, cpu=1023)
        assert far.recv(1) == b""


def threads_now() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_its_thread_ends_with_it() -> None:
    near, far = pair()
    before = threads_now()
    sender = make(near, cpu=0)
    (fresh,) = threads_now() - before
    assert os.sched_getaffinity(int(fresh)) == {0}
    near.close()
    sender.put(1, 0, 1, 0, (memory := Memory(bytes(64 << 20))).address, 64 << 20, borrowed=True, timeout_s=0)
    del sender
    gc.collect()
    wait_until(lambda: fresh not in threads_now(), "the thread to end")
    del memory
    far.close()


def test_a_fork_leaves_it_alone() -> None:
    near, far = pair()
    sender = make(near)
    near.close()
    child = os.fork()
    if child == 0:
        del sender
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sender.end(1, timeout_s=0)
    assert next_record(far)[0].kind is RecordKind.END
    assert sender.close(TIMEOUT_S)
    assert far.recv(1) == b""
    far.close()


def test_waiting_can_be_interrupted() -> None:
    program = (
        "import socket\nfrom lastgood._native import Sender\n"
        "near, far = socket.socketpair()\nsender = Sender(near.fileno(), 1, 1, 1, 'far')\n"
        "print('ready', flush=True)\nsender.wait_returned(1, 60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, text = child.communicate(timeout=TIMEOUT_S)
    assert "KeyboardInterrupt" in text and child.returncode == -signal.SIGINT


def test_several_threads_put_at_once() -> None:
    """Copies into a small pool from four threads: every record is whole, and each thread's are in order."""
    near, far = pair()
    sender = make(near, pool_bytes=5000, queue=7)
    near.close()
    got: list[tuple[Record, bytes]] = []
    reader = threading.Thread(target=lambda: got.extend(next_record(far) for _ in range(4 * 100)))
    reader.start()

    def put(bucket: int) -> None:
        for number in range(100):
            memory = Memory(bytes([bucket, number] * (2 + 13 * number)))
            assert sender.put(
                number, bucket, 4, 0, memory.address, len(memory.raw), borrowed=False, timeout_s=TIMEOUT_S
            )

    threads = [threading.Thread(target=put, args=(bucket,)) for bucket in range(4)]
    for thread in [*threads]:
        thread.start()
    for thread in [*threads, reader]:
        thread.join(TIMEOUT_S)
    for bucket in range(4):
        mine = [(record, payload) for record, payload in got if record.bucket == bucket]
        assert [record.iteration for record, _ in mine] == list(range(100))
        for record, payload in mine:
            assert payload == bytes([bucket, record.iteration] * (2 + 13 * record.iteration))
    assert sender.close(TIMEOUT_S)
    far.close()


def test_what_is_sent_is_received() -> None:
    """Both native sides, with records long enough to be split and to arrive in pieces."""
    nbytes = 9 << 20
    slots = Slots([(0, nbytes, 1)], 2)
    receiver = Receiver(JOB, EPOCH, slots.buckets, slots.addresses, owner=slots, threads=2)
    receiver.set_first(0, 1)
    senders = []
    for _ in range(3):
        near, far = pair()
        receiver.add(far.fileno(), RANK)
        senders.append(make(near))
        near.close()
        far.close()
    content = os.urandom(nbytes)
    memory = Memory(content)
    third = nbytes // 12 * 4
    for iteration in range(1, 8):
        for number, sender in enumerate(senders):
            begin, stop = number * third, nbytes if number == 2 else (number + 1) * third
            assert sender.put(
                iteration, 0, 1, begin, memory.address + begin, stop - begin, borrowed=number != 1, timeout_s=TIMEOUT_S
            )
            assert sender.end(iteration, timeout_s=TIMEOUT_S)
        left = {"complete": 1, "end": 3}
        while any(left.values()):
            for event in receiver.poll(TIMEOUT_S, 1):
                assert event.iteration == iteration
                left[event.kind] -= 1
        assert slots.content(0, iteration) == content
        ctypes.memset(slots.memory[iteration % 2][0].address, 0, nbytes)
        receiver.advance(iteration + 1)
    assert receiver.refused() == {} and receiver.counters()["bytes"] == 7 * nbytes
    for sender in senders:
        assert sender.close(TIMEOUT_S)
    wait_until(lambda: receiver.counters()["connections"] == 0, "the connections to end")
    assert receiver.close(TIMEOUT_S)
