from __future__ import annotations

import ctypes
import gc
import itertools
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood._native import ChunkPool, SlotWriter, chunk_seed, crc32c_portable, prefill, read_verify

BLOCK = 4096
TIMEOUT_S = 60.0


@pytest.fixture()
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "slot", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def threads_now() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def no_threads_left(before: set[str]) -> bool:
    """The kernel may list a thread for a moment after it was joined; one of an earlier test may end meanwhile."""
    never = threading.Event()
    return any(threads_now() <= before or never.wait(0.01) for _ in range(1000))


class Memory:
    def __init__(self, content: bytes) -> None:
        self.raw = bytearray(content) or bytearray(1)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))


def expected_table(stream: bytes, chunk: int, sequence: int) -> bytes:
    sums = []
    for index in range(-(-len(stream) // chunk)):
        piece = stream[index * chunk : (index + 1) * chunk]
        sums.append(crc32c_portable(piece + bytes(-len(piece) % BLOCK), chunk_seed(sequence, index)))
    return struct.pack(f"<{len(sums)}I", *sums)


@st.composite
def writes(draw: st.DrawFn) -> dict[str, object]:
    chunk = BLOCK * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.one_of(st.integers(0, 64), st.integers(0, 40000)), max_size=12))
    return {
        "chunk": chunk,
        "lengths": lengths,
        "cuts": draw(st.lists(st.integers(0, 12), max_size=3)),
        "buffers": draw(st.integers(1, 5)),
        "writers": draw(st.integers(1, 4)),
        "copiers": draw(st.integers(1, 3)),
        "sequence": draw(st.integers(0, 2**64 - 1)),
        "reader": draw(st.tuples(st.integers(1, 4), st.integers(0, 3))),
    }


@settings(max_examples=60)
@given(plan=writes())
def test_roundtrip(tmp_path_factory: pytest.TempPathFactory, plan: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip"
    chunk, lengths, sequence = plan["chunk"], plan["lengths"], plan["sequence"]
    stream = os.urandom(sum(lengths))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        pool = ChunkPool(0, plan["buffers"] * chunk, chunk)
        writer = SlotWriter(pool, descriptor, 2 * BLOCK, len(stream), chunk, sequence, plan["writers"])
        source = Memory(stream)
        ranges, at = [], 0
        for length in lengths:
            ranges.append((source.address + at, length))
            at += length
        cuts = [0, *sorted(plan["cuts"]), len(ranges)]
        for begin, end in itertools.pairwise(cuts):
            writer.copy_host(ranges[begin:end], TIMEOUT_S, plan["copiers"])
        source.raw[:] = bytes(len(source.raw))
        table = writer.finish(TIMEOUT_S)
        assert table == expected_table(stream, chunk, sequence)
        assert pool.free == pool.count
        padded = stream + bytes(-len(stream) % BLOCK)
        assert os.pread(descriptor, len(padded) + 1, 2 * BLOCK) == padded

        threads, first = plan["reader"]
        first = min(first, -(-len(stream) // chunk))
        target = Memory(bytes(len(stream)))
        pieces, at = [], min(first * chunk, len(stream))
        wanted = bytearray(len(stream))
        for number, length in enumerate([*lengths, len(stream)]):
            step = min(length, len(stream) - at)
            pieces.append((target.address + at if number % 3 else 0, step))
            if number % 3:
                wanted[at : at + step] = stream[at : at + step]
            at += step
        place = (descriptor, 2 * BLOCK, len(stream), chunk, sequence, table)
        assert read_verify(*place, pieces, first, threads, TIMEOUT_S) is None
        assert target.raw[: len(stream)] == wanted
    finally:
        os.close(descriptor)


def test_large_copy_by_several_threads(fd: int) -> None:
    chunk, length = 1 << 20, (24 << 20) + 12345
    stream = os.urandom(1 << 20) * 25
    stream = stream[:length]
    pool = ChunkPool(0, 3 * chunk, chunk)
    writer = SlotWriter(pool, fd, 0, length, chunk, 9, 2)
    source = Memory(stream)
    head = 12 * chunk + 77
    writer.copy_host([(source.address, head)], TIMEOUT_S, 3)
    writer.copy_host([(source.address + head, 5), (source.address + head + 5, length - head - 5)], TIMEOUT_S, 3)
    assert writer.finish(TIMEOUT_S) == expected_table(stream, chunk, 9)


def test_acquire_and_put_in_any_order(fd: int) -> None:
    stream = os.urandom(3 * BLOCK + 100)
    pool = ChunkPool(0, 4 * BLOCK, BLOCK)
    writer = SlotWriter(pool, fd, 0, len(stream), BLOCK, 3, 2)
    taken = [writer.acquire(TIMEOUT_S) for _ in range(4)]
    assert [(index, length) for _, index, length in taken] == [(0, BLOCK), (1, BLOCK), (2, BLOCK), (3, 100)]
    with pytest.raises(ValueError, match="still lent"):
        writer.finish(TIMEOUT_S)
    for address, index, length in reversed(taken):
        ctypes.memset(address, 0xEE, BLOCK)
        ctypes.memmove(address, stream[index * BLOCK : index * BLOCK + length], length)
        writer.put(index)
    with pytest.raises(ValueError, match="not lent"):
        writer.put(0)
    assert writer.finish(TIMEOUT_S) == expected_table(stream, BLOCK, 3)
    assert os.pread(fd, 4 * BLOCK, 0) == stream + bytes(BLOCK - 100)


def test_misuse_is_refused(fd: int) -> None:
    pool = ChunkPool(0, 2 * BLOCK, BLOCK)
    with pytest.raises(ValueError, match="4096"):
        ChunkPool(0, 8192, 1000)
    with pytest.raises(ValueError, match="at least one"):
        ChunkPool(0, 100, BLOCK)
    with pytest.raises(ValueError, match="buffers hold"):
        SlotWriter(pool, fd, 0, 100, 2 * BLOCK, 1, 1)
    with pytest.raises(ValueError, match="at least 1"):
        SlotWriter(pool, fd, 0, 100, BLOCK, 1, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        SlotWriter(pool, -1, 0, 100, BLOCK, 1, 1)
    writer = SlotWriter(pool, fd, 0, 100, BLOCK, 1, 1)
    source = Memory(bytes(200))
    with pytest.raises(ValueError, match="longer than the rest"):
        writer.copy_host([(source.address, 101)], TIMEOUT_S)
    writer.copy_host([(source.address, 50)], TIMEOUT_S)
    with pytest.raises(ValueError, match="50 of 100 bytes"):
        writer.finish(TIMEOUT_S)
    with pytest.raises(ValueError, match="middle of a chunk"):
        writer.acquire(TIMEOUT_S)
    with pytest.raises(ValueError, match="4096"):
        prefill(fd, 1, BLOCK)


def test_pool_over_given_memory_keeps_its_owner() -> None:
    memory = Memory(bytes(10 * BLOCK))
    alive = threading.Event()

    class Owner:
        def __del__(self) -> None:
            alive.set()

    pool = ChunkPool(memory.address + 1, 10 * BLOCK - 1, BLOCK, Owner())
    gc.collect()
    assert not alive.is_set()
    assert pool.count in (8, 9) and pool.address % BLOCK == 0 and pool.address > memory.address
    del pool
    gc.collect()
    assert alive.is_set()


def test_pool_wait_is_bounded_and_first_come_first_served(fd: int) -> None:
    pool = ChunkPool(0, BLOCK, BLOCK)
    holder = SlotWriter(pool, fd, 0, BLOCK, BLOCK, 1, 1)
    holder.acquire(TIMEOUT_S)
    other = SlotWriter(pool, fd, BLOCK, BLOCK, BLOCK, 2, 1)
    with pytest.raises(TimeoutError, match="free buffer"):
        other.acquire(0.01)
    got = threading.Event()

    def wait() -> None:
        _, index, _ = other.acquire(TIMEOUT_S)
        got.set()
        other.put(index)

    waiter = threading.Thread(target=wait)
    waiter.start()
    holder.put(0)
    assert got.wait(TIMEOUT_S)
    waiter.join(TIMEOUT_S)
    holder.finish(TIMEOUT_S)
    other.finish(TIMEOUT_S)
    assert pool.free == 1


def test_an_error_stops_and_wakes_everybody() -> None:
    before = threads_now()
    pool = ChunkPool(0, 2 * BLOCK, BLOCK)
    full = os.open("/dev/full", os.O_RDWR)
    writer = SlotWriter(pool, full, 0, 50 * BLOCK, BLOCK, 1, 2)
    os.close(full)  # the writer has its own
    source = Memory(bytes(50 * BLOCK))
    with pytest.raises(OSError, match="No space left") as caught:
        writer.copy_host([(source.address, 50 * BLOCK)], TIMEOUT_S)
    assert caught.value.operation == "write" and caught.value.nbytes == BLOCK
    for call in (lambda: writer.finish(TIMEOUT_S), lambda: writer.acquire(TIMEOUT_S)):
        with pytest.raises(OSError, match="No space left"):
            call()
    assert writer.join(TIMEOUT_S)
    assert pool.free == 2
    assert no_threads_left(before)


def test_abort_wakes_a_waiting_copy(fd: int) -> None:
    before = threads_now()
    pool = ChunkPool(0, BLOCK, BLOCK)
    holder = SlotWriter(pool, fd, 0, BLOCK, BLOCK, 1, 1)
    holder.acquire(TIMEOUT_S)
    writer = SlotWriter(pool, fd, 0, BLOCK, BLOCK, 2, 1)
    entered, outcome = threading.Event(), []

    def copy() -> None:
        source = Memory(bytes(BLOCK))
        entered.set()
        try:
            writer.copy_host([(source.address, BLOCK)], TIMEOUT_S)
        except OSError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=copy)
    thread.start()
    assert entered.wait(TIMEOUT_S)
    writer.abort()
    thread.join(TIMEOUT_S)
    assert outcome and "canceled" in outcome[0]
    assert pool.free == 0
    with pytest.raises(OSError, match="canceled"):
        holder.abort()
        holder.put(0)
    assert pool.free == 1
    assert writer.join(TIMEOUT_S) and holder.join(TIMEOUT_S)
    assert no_threads_left(before)


def test_dropping_an_unfinished_writer_gives_everything_back(fd: int) -> None:
    before = threads_now()
    pool = ChunkPool(0, 3 * BLOCK, BLOCK)
    writer = SlotWriter(pool, fd, 0, 10 * BLOCK, BLOCK, 1, 3)
    writer.acquire(TIMEOUT_S)
    source = Memory(bytes(100))
    writer.acquire(TIMEOUT_S)
    writer.copy_host([(source.address, 100)], TIMEOUT_S)
    del writer
    assert pool.free == 3
    assert no_threads_left(before)


def test_a_forked_child_may_drop_a_writer(fd: int) -> None:
    pool = ChunkPool(0, BLOCK, BLOCK)
    writer = SlotWriter(pool, fd, 0, BLOCK, BLOCK, 1, 2)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        del writer
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    source = Memory(bytes(BLOCK))
    writer.copy_host([(source.address, BLOCK)], TIMEOUT_S)
    assert len(writer.finish(TIMEOUT_S)) == 4


def test_ctrl_c_ends_a_wait() -> None:
    script = """
import os, signal, threading
from lastgood._native import ChunkPool, SlotWriter
pool = ChunkPool(0, 4096, 4096)
fd = os.open(os.devnull, os.O_RDWR)
writer = SlotWriter(pool, fd, 0, 8192, 4096, 1, 1)
writer.acquire(5.0)
try:
    print("waiting", flush=True)
    writer.acquire(60.0)
except KeyboardInterrupt:
    print("interrupted")
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=TIMEOUT_S)[0] == "interrupted\n"


def test_short_write_at_a_size_limit(tmp_path: Path) -> None:
    """The kernel first writes a part, in the middle of a block, and refuses the rest."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK + 100, 3 * BLOCK + 100))
            descriptor = os.open(tmp_path / "limited", os.O_RDWR | os.O_CREAT)
            writer = SlotWriter(ChunkPool(0, 8 * BLOCK, 8 * BLOCK), descriptor, 0, 8 * BLOCK, 8 * BLOCK, 1, 1)
            source = Memory(bytes(8 * BLOCK))
            writer.copy_host([(source.address, 8 * BLOCK)], TIMEOUT_S)
            writer.finish(TIMEOUT_S)
        except OSError as error:
            os._exit(0 if error.offset == 3 * BLOCK else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_reading_finds_the_first_bad_chunk_and_the_end_of_the_file(fd: int) -> None:
    stream = os.urandom(20 * BLOCK)
    table = expected_table(stream, BLOCK, 7)
    os.pwrite(fd, stream, 0)
    os.pwrite(fd, b"\0", 5 * BLOCK + 17) if stream[5 * BLOCK + 17] else os.pwrite(fd, b"\1", 5 * BLOCK + 17)
    os.pwrite(fd, bytes(10), 12 * BLOCK)
    target = Memory(bytes(20 * BLOCK))
    for threads in (1, 4):
        bad = read_verify(fd, 0, 20 * BLOCK, BLOCK, 7, table, [(target.address, 20 * BLOCK)], 0, threads, TIMEOUT_S)
        assert bad is not None and bad[0] == 5
        assert bad[1] == struct.unpack_from("<I", table, 20)[0] != bad[2]
        assert target.raw[: 5 * BLOCK] == stream[: 5 * BLOCK]
        assert target.raw[5 * BLOCK : 6 * BLOCK] == bytes(BLOCK)
    os.ftruncate(fd, 4 * BLOCK + 1)
    with pytest.raises(OSError, match="No data") as caught:
        read_verify(fd, 0, 20 * BLOCK, BLOCK, 7, table, [(0, 20 * BLOCK)], 0, 1, TIMEOUT_S)
    assert caught.value.offset == 4 * BLOCK
    with pytest.raises(TimeoutError, match="20 chunks"):
        read_verify(fd, 0, 20 * BLOCK, BLOCK, 7, table, [(0, 20 * BLOCK)], 0, 1, 0.0)
    with pytest.raises(ValueError, match="longer than the stream"):
        read_verify(fd, 0, 20 * BLOCK, BLOCK, 7, table, [(0, 20 * BLOCK + 1)], 0, 1, TIMEOUT_S)
    with pytest.raises(ValueError, match="19 checksums for 20 chunks"):
        read_verify(fd, 0, 20 * BLOCK, BLOCK, 7, table[:-4], [], 0, 1, TIMEOUT_S)


def test_prefill(fd: int) -> None:
    os.pwrite(fd, b"\xff" * (3 * BLOCK), 0)
    prefill(fd, BLOCK, BLOCK)
    assert os.pread(fd, 3 * BLOCK, 0) == b"\xff" * BLOCK + bytes(BLOCK) + b"\xff" * BLOCK
