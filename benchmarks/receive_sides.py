"""The two processes of receive.py: one receives gradient records natively, the other one sends them.

    python receive_sides.py receive HOST STREAMS BUCKET_BYTES THREADS      (prints its port, then its result as JSON)
    python receive_sides.py keep HOST STREAMS BUCKET_BYTES THREADS         (the same)
    python receive_sides.py send HOST PORT STREAMS BUCKET_BYTES RECORD_BYTES SECONDS
    python receive_sides.py blast HOST PORT STREAMS BUCKET_BYTES RECORD_BYTES SECONDS

`keep` only reads, into memory as large as the slots of `receive`: no records, no checksums, one thread. `send` is the
native sender, over memory as large as the bucket. `blast` sends one payload again and again, whose checksum is known
before, as iperf3 does with its message: what it costs is the kernel's work alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import socket
import sys
import time

from lastgood import _native
from lastgood.host_memory import map_memory
from lastgood.wire.records import FINAL, DType, Record, RecordKind, pack_header

JOB, EPOCH, SLOTS = 1, 1, 4
TIMEOUT_S = 60.0
VIEWS = 16
"""Of `blast`, in one call: eight records."""
PIECE_BYTES, TURNS = 256 << 10, 16
"""Of `keep`, as the native receiver reads."""


def mapped(nbytes: int) -> mmap.mmap:
    """Memory as a shadow has it, written once so that nothing faults later."""
    memory = map_memory(nbytes)
    memory.write(os.urandom(1 << 20) * (nbytes >> 20))
    return memory


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def share(stream: int, streams: int, nbytes: int) -> tuple[int, int]:
    """The bytes of the bucket that one stream carries."""
    step = nbytes // streams // 64 * 64
    return stream * step, nbytes if stream + 1 == streams else (stream + 1) * step


def receive(host: str, streams: int, bucket_bytes: int, threads: int) -> None:
    """Receive until all streams have ended; every iteration is let go as soon as it is complete."""
    slots = [mapped(bucket_bytes) for _ in range(SLOTS)]
    receiver = _native.Receiver(
        JOB,
        EPOCH,
        [(0, bucket_bytes, DType.float32)],
        [[address_of(slot)] for slot in slots],
        threads=threads,
        owner=slots,
    )
    receiver.set_first(0, 1)
    with socket.create_server((host, 0)) as server:
        server.settimeout(TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        for _ in range(streams):
            connection, _ = server.accept()
            with connection:
                # The rank is what the first byte says: connections may come in another order than they were made.
                receiver.add(connection.fileno(), connection.recv(1)[0])
    begin = time.perf_counter()
    left = streams
    while left:
        events = receiver.poll(TIMEOUT_S)
        if not events:
            raise SystemExit(f"nothing has come for {TIMEOUT_S:g} s")
        for event in events:
            if event.kind == "complete":
                receiver.advance(event.iteration + 1)
            elif event.kind == "closed":
                left -= 1
                if event.cause:
                    raise SystemExit(f"stream {event.rank}: {event.cause}")
    seconds = time.perf_counter() - begin
    if receiver.refused():
        raise SystemExit(f"refused: {receiver.refused()}")
    counters = receiver.counters()
    result = {"bytes_per_s": counters["bytes"] / seconds, "checksum_share": counters["checksum_s"] / seconds}
    print(json.dumps(result), flush=True)
    receiver.close(TIMEOUT_S)


def keep(host: str, streams: int, bucket_bytes: int, threads: int) -> None:
    """Read all streams into the slots' memory, one part after the other, until they have ended."""
    del threads
    memory = memoryview(mapped(SLOTS * bucket_bytes))
    poll = select.epoll()
    open_streams: dict[int, socket.socket] = {}
    with socket.create_server((host, 0)) as server:
        server.settimeout(TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        for _ in range(streams):
            connection, _ = server.accept()
            connection.setblocking(False)
            poll.register(connection, select.EPOLLIN)
            open_streams[connection.fileno()] = connection
    begin = time.perf_counter()
    at = count = 0
    while open_streams:
        ready = poll.poll(TIMEOUT_S)
        if not ready:
            raise SystemExit(f"nothing has come for {TIMEOUT_S:g} s")
        for descriptor, _ in ready:
            for _ in range(TURNS):
                try:
                    got = open_streams[descriptor].recv_into(memory[at : at + PIECE_BYTES])
                except BlockingIOError:
                    break
                if got == 0:
                    open_streams.pop(descriptor).close()
                    break
                count += got
                at = at + got if at + got + PIECE_BYTES <= len(memory) else 0
    print(json.dumps({"bytes_per_s": count / (time.perf_counter() - begin), "checksum_share": 0.0}), flush=True)


def send(host: str, port: int, streams: int, bucket_bytes: int, record_bytes: int, seconds: float) -> None:
    """Send whole iterations from lent memory for `seconds`."""
    source = mapped(bucket_bytes)
    address = address_of(source)
    senders = []
    for stream in range(streams):
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
            connection.sendall(bytes([stream]))
            senders.append(
                _native.Sender(
                    connection.fileno(), JOB, EPOCH, stream, f"{host}:{port}", queue=4, record_bytes=record_bytes
                )
            )
    end = time.monotonic() + seconds
    iteration = 0
    while time.monotonic() < end:
        iteration += 1
        for stream, sender in enumerate(senders):
            begin, stop = share(stream, streams, bucket_bytes)
            where = (iteration, 0, DType.float32, begin, address + begin, stop - begin)
            if not sender.put(*where, borrowed=True, timeout_s=TIMEOUT_S):
                raise SystemExit(f"stream {stream} took nothing for {TIMEOUT_S:g} s")
    for sender in senders:
        if not sender.close(TIMEOUT_S):
            raise SystemExit(f"a stream could not be ended: {os.strerror(sender.errno)}")


def blast(host: str, port: int, streams: int, bucket_bytes: int, record_bytes: int, seconds: float) -> None:
    """Send whole iterations of records that were made before: all streams from one thread, as iperf3 does, in turn."""
    payload = os.urandom(record_bytes)
    checksum = _native.crc32c(payload)
    with contextlib.ExitStack() as opened:
        connections = []
        for number in range(streams):
            connection = opened.enter_context(socket.create_connection((host, port), timeout=TIMEOUT_S))
            connection.sendall(bytes([number]))
            connections.append(connection)
        end = time.monotonic() + seconds
        iteration = 0
        while time.monotonic() < end:
            iteration += 1
            waiting = [records_of(iteration, n, streams, bucket_bytes, payload, checksum) for n in range(streams)]
            while any(waiting):
                for connection, views in zip(connections, waiting, strict=True):
                    send_views(connection, views[:VIEWS])
                    del views[:VIEWS]


def records_of(
    iteration: int, number: int, streams: int, bucket_bytes: int, payload: bytes, checksum: int
) -> list[memoryview]:
    """Headers and payloads of one iteration of one stream."""
    views = []
    begin, stop = share(number, streams, bucket_bytes)
    for offset in range(begin, stop, len(payload)):
        length = min(len(payload), stop - offset)
        piece = memoryview(payload)[:length]
        known = checksum if length == len(payload) else _native.crc32c(piece)
        where = (JOB, EPOCH, number, iteration, 0, DType.float32, offset, length, known, FINAL)
        views += [memoryview(pack_header(Record(RecordKind.GRADIENT, *where))), piece]
    return views


def send_views(connection: socket.socket, views: list[memoryview]) -> None:
    """Send them one after another."""
    while views:
        count = connection.sendmsg(views)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


if __name__ == "__main__":
    side, where, *numbers = sys.argv[1:]
    if side in ("receive", "keep"):
        {"receive": receive, "keep": keep}[side](where, *map(int, numbers))
    else:
        {"send": send, "blast": blast}[side](where, *map(int, numbers[:-1]), float(numbers[-1]))
