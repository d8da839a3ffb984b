"""Records as bytes, sockets and memory, as the tests of receiver and sender need them."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable

from lastgood._native import Receiver, crc32c
from lastgood.wire.records import FINAL, DType, Record, RecordKind, pack_header

JOB, EPOCH = 0x1122334455667788, 5
TIMEOUT_S = 60.0


def gradient(
    iteration: int,
    bucket: int,
    offset: int,
    payload: bytes,
    *,
    rank: int = 0,
    dtype: DType = DType.float32,
    job: int = JOB,
    epoch: int = EPOCH,
    flags: int = FINAL,
    checksum: int | None = None,
) -> bytes:
    return (
        pack_header(
            Record(
                RecordKind.GRADIENT,
                job,
                epoch,
                rank,
                iteration,
                bucket,
                dtype,
                offset,
                len(payload),
                crc32c(payload) if checksum is None else checksum,
                flags,
            )
        )
        + payload
    )


def end(iteration: int, *, rank: int = 0, epoch: int = EPOCH) -> bytes:
    return pack_header(Record(RecordKind.END, JOB, epoch, rank, iteration))


class Memory:
    def __init__(self, content: bytes) -> None:
        self.raw = bytearray(content) or bytearray(1)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))


class Slots:
    """Memory of `slots` iterations of buckets (index, bytes, dtype)."""

    def __init__(self, buckets: list[tuple[int, int, int]], slots: int) -> None:
        self.buckets = buckets
        self.memory = [[Memory(b"\xee" * nbytes) for _, nbytes, _ in buckets] for _ in range(slots)]

    @property
    def addresses(self) -> list[list[int]]:
        return [[memory.address for memory in slot] for slot in self.memory]

    def content(self, place: int, iteration: int) -> bytes:
        return bytes(self.memory[iteration % len(self.memory)][place].raw[: self.buckets[place][1]])


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=TIMEOUT_S)
        far, _ = server.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.settimeout(TIMEOUT_S)
    return near, far


def connect(receiver: Receiver, rank: int) -> tuple[socket.socket, int]:
    """A connection of `rank` to the receiver, and its number."""
    near, far = pair()
    with far:
        return near, receiver.add(far.fileno(), rank)


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not done():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {what}"
        pause.wait(0.0002)
