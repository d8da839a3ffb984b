"""A peer: a small process that keeps checkpoints of others in its memory, and outlives the training that sent them.

Run as ``python -m lastgood.checkpointers.gemini.peer``; `Peers` (peers.py) does. It imports no torch. For each
machine it has two areas of memory: the last complete checkpoint is in one, the next one is received into the other.

It ends when its address file is gone (with the directory, or replaced), when it is asked to, or when nobody was
connected for `idle_s` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lastgood import _native
from lastgood.checkpointers.gemini.address_file import Address
from lastgood.checkpointers.gemini.areas import DESCRIBED, Area, Memory, Store
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, WaitTimeout
from lastgood.wire.frames import MAX_CHUNK_BYTES, Frame, Kind, Wire, keep_alive, peer_handshake
from lastgood.wire.gate import PROOF_S, Gate, Guest, open_listener

__all__ = ["main"]

_log = logging.getLogger("lastgood.peer")
_TICK_S = 0.2
_MAX_CONNECTIONS = 64
_MAX_PARTS = 64


class Connection:
    """One trainer that has proved itself, served in a thread of its own."""

    def __init__(self, peer: Peer, connection: socket.socket, where: str) -> None:
        self.wire = Wire(connection, where, peer.timeout_s)
        self._peer = peer
        self._store = peer.store
        self._landing: Landing | None = None
        self._parts: list[Memory] = []

    def serve(self) -> None:
        """Answer requests until the other side closes, breaks the protocol, or falls silent within a frame."""
        try:
            while not self._peer.ending.is_set():
                if not self.wire.wait_readable(_TICK_S):
                    if self._landing is not None and self._landing.silent_s() > self._peer.timeout_s:
                        raise WaitTimeout(f"waited {self._peer.timeout_s:g} s for {self._landing.what} to go on")
                    continue
                if self.wire.ended():
                    break
                self._answer(self.wire.receive_frame("a request"))
        except LastgoodError as error:
            _log.info("%s", error)
        finally:
            self._end_landing()
            self.wire.close()

    def _answer(self, frame: Frame) -> None:
        if frame.kind is Kind.CHUNK:
            if self._landing is None:
                raise CorruptCheckpoint(f"{self.wire.other} sent a chunk of no checkpoint")
            self._landing.receive(frame)
            return
        message = self.wire.read_message(frame)
        operation = _OPERATIONS.get(str(message.get("op")))
        try:
            if operation is None:
                raise CheckpointError(f"a peer knows no request {message.get('op')!r}")
            operation(self, message)
        except CheckpointError as error:
            self._end_landing()
            self.wire.send_message(ok=False, why=str(error))

    def _begin(self, message: dict[str, Any]) -> None:
        self._end_landing()
        number = _integer(message, "owner", 1 << 31)
        sizes = {key: _integer(message, key, (1 << 63) - 1) for key in DESCRIBED}
        part_bytes = _integer(message, "part_bytes", MAX_CHUNK_BYTES)
        parts = _integer(message, "parts", _MAX_PARTS)
        if not (parts and part_bytes and 0 < sizes["meta_bytes"] <= sizes["nbytes"]):
            raise CheckpointError(f"these sizes make no checkpoint: {message}")
        area = self._store.begin(number, self.wire, sizes)
        try:
            if [part.size for part in self._parts] != [part_bytes] * parts:
                self._parts = [Memory(part_bytes) for _ in range(parts)]
            self._landing = Landing(self.wire, self._store, number, area, self._parts)
        except (RuntimeError, OSError, MemoryError) as error:  # no thread, or no memory for buffers: it may pass
            self._store.end(number, self.wire)
            raise CheckpointError(f"this peer cannot take a checkpoint in now: {error or repr(error)}") from error
        self.wire.send_message(ok=True)

    def _commit(self, message: dict[str, Any]) -> None:
        del message
        if self._landing is None:
            raise CheckpointError("there is no checkpoint to complete")
        self._landing.complete()
        self._end_landing()
        self.wire.send_message(ok=True)

    def _list(self, message: dict[str, Any]) -> None:
        with self._store.change:
            held = self._store.owner(_integer(message, "owner", 1 << 31)).complete()
            self.wire.send_message(ok=True, checkpoints=[area.describe() for area in held])

    def _read(self, message: dict[str, Any]) -> None:
        area = self._store.hold(_integer(message, "owner", 1 << 31), _integer(message, "sequence", (1 << 63) - 1))
        try:
            assert area.memory is not None
            self.wire.send_message(ok=True, **area.describe())
            for offset, length, checksum in area.chunks:
                self.wire.send_chunk(area.memory.view[offset : offset + length], offset, checksum)
        finally:
            self._store.let_go(area)

    def _forget(self, message: dict[str, Any]) -> None:
        """The ranks go on from an older checkpoint: what is newer, some of them do not have."""
        self._store.forget(_integer(message, "owner", 1 << 31), _integer(message, "after", (1 << 63) - 1))
        self.wire.send_message(ok=True)

    def _check(self, message: dict[str, Any]) -> None:
        """A reader found damage: look, and give the checkpoint up if it is here."""
        area = self._store.hold(_integer(message, "owner", 1 << 31), _integer(message, "sequence", (1 << 63) - 1))
        try:
            whole = area.whole()
            if not whole:
                area.complete = False
                _log.error("the checkpoint of step %d is damaged in this peer's memory; given up", area.step)
        finally:
            self._store.let_go(area)
        self.wire.send_message(ok=True, whole=whole)

    def _probe(self, message: dict[str, Any]) -> None:
        """Take bytes in and forget them, so that a trainer can measure the way here."""
        del message
        frame = self.wire.receive_frame("a probe")
        if frame.kind is not Kind.CHUNK:
            raise CorruptCheckpoint(f"{self.wire.other} sent no probe")
        self.wire.read_into(memoryview(bytearray(frame.length)), "a probe's bytes")
        self.wire.send_message(ok=True)

    def _stop(self, message: dict[str, Any]) -> None:
        del message
        self.wire.send_message(ok=True)
        self._peer.ending.set()

    def _end_landing(self) -> None:
        if self._landing is not None:
            self._landing.close()
            self._store.end(self._landing.owner, self.wire)
            self._landing = None


_OPERATIONS: dict[str, Callable[[Connection, dict[str, Any]], None]] = {
    "begin": Connection._begin,
    "commit": Connection._commit,
    "list": Connection._list,
    "read": Connection._read,
    "forget": Connection._forget,
    "check": Connection._check,
    "probe": Connection._probe,
    "stop": Connection._stop,
}


def _integer(message: dict[str, Any], key: str, limit: int) -> int:
    value = message.get(key)
    if type(value) is not int or not 0 <= value <= limit:
        raise CheckpointError(f"{key} must be an integer from 0 to {limit}, not {value!r}")
    return value


class Landing:
    """A checkpoint on its way in: chunks are received into a few buffers while earlier ones are copied to their area.

    The paper's pipeline (section 5): of the buffer's p parts one is filled from the network, the others are emptied by
    a thread that copies and checks. If all are full the network waits.
    """

    def __init__(self, wire: Wire, store: Store, owner: int, area: Area, parts: Sequence[Memory]) -> None:
        self.owner = owner
        self.what = f"the checkpoint of step {area.step} from {wire.other}"
        self._wire = wire
        self._store = store
        self._area = area
        self._received = 0
        self._heard = time.monotonic()
        self._failure: LastgoodError | None = None
        self._part_bytes = parts[0].size
        self._empty: queue.Queue[Memory] = queue.Queue()
        self._full: queue.Queue[tuple[Memory, Frame] | None] = queue.Queue()
        for part in parts:
            self._empty.put(part)
        self._thread = threading.Thread(target=self._land, daemon=True)
        self._thread.start()

    def silent_s(self) -> float:
        """Seconds since the last chunk."""
        return time.monotonic() - self._heard

    def receive(self, frame: Frame) -> None:
        """Read a chunk's bytes into the next empty buffer."""
        self._heard = time.monotonic()
        room = self._area.nbytes - self._received
        if frame.offset != self._received or not 0 < frame.length <= min(room, self._part_bytes):
            raise CorruptCheckpoint(
                f"{self.what}: a chunk of {frame.length} bytes at {frame.offset}, where at most "
                f"{min(room, self._part_bytes)} bytes at {self._received} were due"
            )
        try:
            part = self._empty.get(timeout=self._wire.timeout_s)
        except queue.Empty:
            raise WaitTimeout(f"waited {self._wire.timeout_s:g} s for an empty buffer, {self.what}") from None
        self._wire.read_into(part.view[: frame.length], f"the chunk at byte {frame.offset}")
        self._received += frame.length
        self._full.put((part, frame))

    def complete(self) -> None:
        """All has been sent: from now on this is the newest checkpoint. Raises CheckpointError if that is not so."""
        self.close()
        if self._failure is not None:
            raise self._failure
        landed = sum(length for _, length, _ in self._area.chunks)
        if landed != self._area.nbytes:
            raise CorruptCheckpoint(f"{self.what}: {landed} of {self._area.nbytes} bytes have arrived")
        with self._store.change:
            self._area.complete = True

    def close(self) -> None:
        """Wait until what was received is copied, and end the thread. Safe to call twice."""
        self._full.put(None)
        self._thread.join()  # it only copies memory, and writes that end by themselves

    def _land(self) -> None:
        memory = self._area.memory
        assert memory is not None
        while (arrived := self._full.get()) is not None:
            part, frame = arrived
            try:
                if self._failure is None:
                    seed = _native.chunk_seed(self._area.sequence, frame.offset)
                    target, source = memory.at(frame.offset, frame.length), part.at(0, frame.length)
                    found = _native.copy_crc32c(target, source, frame.length, seed)
                    if found != frame.checksum:
                        raise CorruptCheckpoint(
                            f"{self.what}: the chunk at byte {frame.offset} has checksum {found:08x}, "
                            f"{frame.checksum:08x} was sent"
                        )
                    self._area.chunks.append((frame.offset, frame.length, found))
                    self._wire.send_ack(frame.offset)
            except LastgoodError as error:
                self._failure = error
                with contextlib.suppress(LastgoodError):  # the trainer may have gone
                    self._wire.send_message(ok=False, why=str(error))
            finally:
                self._empty.put(part)


class Peer:
    """The process: a listening socket, and the watch over its own end."""

    def __init__(self, listener: socket.socket, address: Address, limit_bytes: int, timeout_s: float) -> None:
        self.token = address.token
        self.timeout_s = timeout_s
        self.store = Store(limit_bytes, timeout_s)
        self.ending = threading.Event()
        self._address = address
        self._connections: list[threading.Thread] = []
        self._gate = Gate(
            listener,
            lambda other: peer_handshake(other, self.token),
            "a peer's port",
            _log.warning,
            proof_s=min(PROOF_S, timeout_s),
        )

    def run(self, idle_s: float) -> str:
        """Serve until it is time to end, and say why that is."""
        with self._gate:
            return self._serve(idle_s)

    def _serve(self, idle_s: float) -> str:
        own = self._address.path.stat().st_ino
        alone_since = time.monotonic()
        while not self.ending.is_set():
            for guest in self._gate.step(_TICK_S):
                self._take(guest)
            try:
                if self._address.path.stat().st_ino != own:
                    return "the address file is another peer's now"
            except OSError:
                return "the address file is gone"
            self._connections = [thread for thread in self._connections if thread.is_alive()]
            if self._connections:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > idle_s:
                self._address.path.unlink(missing_ok=True)
                return f"nobody was connected for {idle_s:g} s"
        self._address.path.unlink(missing_ok=True)
        return "asked to"

    def _take(self, guest: Guest[int]) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._gate.lines(f"{guest.other}: {_MAX_CONNECTIONS} trainers are connected already")
            guest.connection.close()
            return
        thread = self._gate.serve_in_thread(guest, self._serve_one)
        if thread is not None:
            self._connections.append(thread)

    def _serve_one(self, guest: Guest[int]) -> None:
        keep_alive(guest.connection)  # a machine that lost its power says no more, and must not be waited for
        Connection(self, guest.connection, f"the trainer at {guest.other}").serve()


def main(arguments: list[str] | None = None) -> int:
    """Become a peer: the caller's process ends with 0 as soon as the peer, a child of its own, can be reached.

    With ``--foreground`` the caller's process is the peer; its address file shows that it can be reached.
    """
    parser = argparse.ArgumentParser(description="Keep checkpoints of other processes in memory.")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--machine", type=int, required=True)
    parser.add_argument("--serial", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--limit-bytes", type=int, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--foreground", action="store_true")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s peer %(process)d: %(message)s", level=logging.INFO, stream=sys.stderr)
    listener = open_listener(given.host)
    writing = None
    if not given.foreground:
        reading, writing = os.pipe()
        # Not the starter's child: a training that goes on need not wait for a peer that ends, nor leave it a zombie.
        if os.fork():
            os.close(writing)
            return 0 if os.read(reading, 1) else 1
        os.close(reading)
    path = Address.path_of(given.directory.absolute(), given.machine, given.serial)
    os.chdir("/")
    address = Address(path, given.host, listener.getsockname()[1], secrets.token_bytes(32), os.getpid())
    address.write()
    peer = Peer(listener, address, given.limit_bytes, given.timeout_s)
    if writing is not None:
        os.write(writing, b".")
        os.close(writing)
    _log.info("machine %d, at %s:%d", given.machine, address.host, address.port)
    _log.info("ended: %s", peer.run(given.idle_s))
    logging.shutdown()
    # The memory is given back at once; connections need no farewell.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
