"""The network between two ranks and two shadows, in a test's hands: cut, healed, slow, broken off at any byte, faulty.

One thread carries all bytes. What goes to a shadow is taken apart far enough to know records of data connections, so
that they can be lost, doubled, late or damaged one by one, by the plan that the switch has for its copies.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

from lastgood.errors import LastgoodError
from lastgood.gradients.protocol.messages import GREETING
from lastgood.gradients.switch.faults import CopyFaults, FaultPlan
from lastgood.ports import free_ports
from lastgood.wire import frames, records

__all__ = ["Net"]

_ROOM = 1 << 16
_LOOK_S = 0.02
_PROOF_BYTES = 32


class Path:
    """The way from one rank to one shadow."""

    def __init__(self, rank: int, shadow: int, target: int, chance: random.Random) -> None:
        self.rank, self.shadow, self.target = rank, shadow, target
        self.chance = chance
        # One that is found free again once its shadow is replaced.
        port = free_ports()[0]
        self.listener: socket.socket | None = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.cut = False
        self.delay_s = 0.0
        self.faults: CopyFaults | None = None
        self.breaks_in: int | None = None
        """Bytes until all its connections are reset."""
        self.flips: set[str] = set()
        """Directions in which one bit of what comes next will be another one."""


class Splitter:
    """Takes what a trainer says apart: what opens a connection, then, of data connections, records."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._stage = 0
        self.records = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Whole pieces, as far as there are any."""
        self._held += data
        while self._held:
            size = self._size()
            if size is None or len(self._held) < size:
                return
            piece = bytes(self._held[:size])
            del self._held[:size]
            yield piece
            if self._stage == 2:
                with contextlib.suppress(ValueError):
                    self.records = json.loads(piece[frames.HEADER_BYTES :]).get("role") == "data"
            self._stage += 1

    def rest(self) -> bytes:
        """What is no whole piece, and never will be."""
        held, self._held = bytes(self._held), bytearray()
        return held

    def _size(self) -> int | None:
        """Of the next piece; None where it cannot be known yet."""
        if self._stage < 2:
            return (len(GREETING) + _PROOF_BYTES, _PROOF_BYTES)[self._stage]
        if self._stage > 2 and not self.records:
            return len(self._held)
        header = records.HEADER_BYTES if self._stage > 2 else frames.HEADER_BYTES
        if len(self._held) < header:
            return None
        begin = self._held[:header]
        try:
            if self._stage > 2:
                return header + records.parse_header(begin, "a rank").length
            return header + frames.parse_header(begin, "a rank", "a hello").length
        except LastgoodError:
            return len(self._held)


def record_of(piece: bytes) -> records.Record | None:
    """What a piece says it is; None where it is no record, but what followed one that was broken on the way."""
    try:
        return records.parse_header(piece[: records.HEADER_BYTES], "a rank")
    except LastgoodError:
        return None


class Flow:
    """One direction of a connection."""

    def __init__(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        self.name, self.source, self.sink = name, source, sink
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.held = 0
        self.ended = self.over = False
        self.broken_off = False

    def put(self, when: float, data: bytes) -> None:
        if data:
            self.waiting.append((max(when, self.waiting[-1][0]) if self.waiting else when, data))
            self.held += len(data)


class Tunnel:
    """One connection, in two halves."""

    def __init__(self, path: Path, inner: socket.socket, outer: socket.socket) -> None:
        self.path = path
        for one in (inner, outer):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.up, self.down = Flow("up", inner, outer), Flow("down", outer, inner)
        self.splitter = Splitter()
        self.open = True

    def reset(self) -> None:
        """End it as a crash does: both sides hear of it at once, and what is in buffers is lost."""
        if self.open:
            self.open = False
            for one in (self.up.source, self.down.source):
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()


class Net:
    """Carries bytes until `crash`. Its methods may be called from any thread."""

    def __init__(self, ports: list[int], ranks: int, seed: int) -> None:
        chance = random.Random(seed)
        self.paths = [
            Path(rank, shadow, port, random.Random(chance.random()))
            for rank in range(ranks)
            for shadow, port in enumerate(ports)
        ]
        self._tunnels: list[Tunnel] = []
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="net", daemon=True)
        self._thread.start()

    def addresses(self, rank: int) -> list[str]:
        """Where a rank finds the shadows."""
        return [f"127.0.0.1:{path.port}" for path in self.paths if path.rank == rank]

    def _between(self, rank: int | None, shadow: int | None) -> list[Path]:
        return [path for path in self.paths if rank in (None, path.rank) and shadow in (None, path.shadow)]

    # -- faults ----------------------------------------------------------------------------------------------------

    def crash(self, rank: int | None = None) -> None:
        """All connections of a rank (or all there are) end at once, and it makes no more."""
        with self._lock:
            for path in self._between(rank, None):
                self._unlisten(path)
            for tunnel in self._tunnels:
                if rank in (None, tunnel.path.rank):
                    tunnel.reset()
            self._ended = self._ended or rank is None
        if rank is None:
            self._thread.join(20)

    def cut(self, rank: int | None, shadow: int | None) -> None:
        """Nothing gets through any more, and nobody is told."""
        with self._lock:
            for path in self._between(rank, shadow):
                path.cut = True

    def heal(self) -> None:
        """What is cut, slow or faulty is as it should be again."""
        with self._lock:
            for path in self.paths:
                path.cut, path.delay_s, path.faults = False, 0.0, None

    def slow(self, rank: int | None, shadow: int | None, delay_s: float) -> None:
        """All takes so long from here on."""
        with self._lock:
            for path in self._between(rank, shadow):
                path.delay_s = delay_s

    def fault(self, rank: int | None, shadow: int | None, plan: FaultPlan) -> None:
        """Records get the faults of a plan."""
        with self._lock:
            for path in self._between(rank, shadow):
                path.faults = CopyFaults(plan, f"{path.rank} {path.shadow}")

    def break_off(self, rank: int, shadow: int, nbytes: int) -> None:
        """Reset all connections of a path behind so many more bytes."""
        with self._lock:
            for path in self._between(rank, shadow):
                path.breaks_in = nbytes

    def flip(self, rank: int, shadow: int, direction: str) -> None:
        """Change one bit of what comes next."""
        with self._lock:
            for path in self._between(rank, shadow):
                path.flips.add(direction)

    def shadow_down(self, shadow: int) -> None:
        """Nobody listens there any more."""
        with self._lock:
            for path in self._between(None, shadow):
                self._unlisten(path)

    def shadow_up(self, shadow: int) -> None:
        """There is a new one, at the same address."""
        with self._lock:
            if not self._ended:
                for path in self._between(None, shadow):
                    if path.listener is None:
                        path.listener = socket.create_server(("127.0.0.1", path.port), backlog=64)

    @staticmethod
    def _unlisten(path: Path) -> None:
        if path.listener is not None:
            # A thread that polls it keeps it open until it is done, and its port in use: not without listening.
            with contextlib.suppress(OSError):
                path.listener.shutdown(socket.SHUT_RDWR)
            path.listener.close()
            path.listener = None

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._ended:
                    return
                poll, timeout_s = self._interests()
            ready = dict(poll.poll(timeout_s * 1e3))
            with self._lock:
                for path in self.paths:
                    if path.listener is not None and path.listener.fileno() in ready and not path.cut:
                        self._accept(path)
                for tunnel in self._tunnels:
                    for flow in (tunnel.up, tunnel.down):
                        if tunnel.open and not tunnel.path.cut:
                            self._move(tunnel, flow, ready)
                self._tunnels = [tunnel for tunnel in self._tunnels if tunnel.open]

    def _interests(self) -> tuple[select.poll, float]:
        wanted: dict[int, int] = {}
        timeout_s, now = _LOOK_S, time.monotonic()
        for path in self.paths:
            if path.listener is not None and not path.cut:
                wanted[path.listener.fileno()] = select.POLLIN
        for tunnel in self._tunnels:
            if not tunnel.open or tunnel.path.cut:
                continue
            for flow in (tunnel.up, tunnel.down):
                if not flow.ended and flow.held < _ROOM:
                    wanted[flow.source.fileno()] = wanted.get(flow.source.fileno(), 0) | select.POLLIN
                if flow.waiting:
                    due_s = flow.waiting[0][0] - now
                    if due_s <= 0:
                        wanted[flow.sink.fileno()] = wanted.get(flow.sink.fileno(), 0) | select.POLLOUT
                    else:
                        timeout_s = min(timeout_s, due_s)
        poll = select.poll()
        for descriptor, events in wanted.items():
            poll.register(descriptor, events)
        return poll, max(0.001, timeout_s)

    def _accept(self, path: Path) -> None:
        assert path.listener is not None
        try:
            inner, _ = path.listener.accept()
        except OSError:
            return
        try:
            outer = socket.create_connection(("127.0.0.1", path.target), timeout=5.0)
        except OSError:
            inner.close()
            return
        self._tunnels.append(Tunnel(path, inner, outer))

    def _move(self, tunnel: Tunnel, flow: Flow, ready: dict[int, int]) -> None:
        try:
            if not flow.ended and flow.held < _ROOM and ready.get(flow.source.fileno(), 0) & ~select.POLLOUT:
                self._take(tunnel, flow)
            while flow.waiting and flow.waiting[0][0] <= time.monotonic():
                if not self._give(tunnel, flow):
                    return
            if flow.ended and not flow.waiting and not flow.over:
                flow.over = True
                flow.sink.shutdown(socket.SHUT_WR)
            if tunnel.up.over and tunnel.down.over:
                tunnel.open = False
                tunnel.up.source.close()
                tunnel.down.source.close()
        except OSError:
            tunnel.reset()

    def _take(self, tunnel: Tunnel, flow: Flow) -> None:
        path = tunnel.path
        try:
            data = flow.source.recv(_ROOM)
        except BlockingIOError:
            return
        when = time.monotonic() + path.delay_s
        if not data:
            flow.ended = True
            if flow is tunnel.up:
                flow.put(when, tunnel.splitter.rest())
            return
        if flow.name in path.flips:
            path.flips.discard(flow.name)
            changed = bytearray(data)
            changed[path.chance.randrange(len(data))] ^= 1 << path.chance.randrange(8)
            data = bytes(changed)
        if flow is tunnel.down:
            flow.put(when, data)
            return
        for piece in tunnel.splitter.feed(data):
            record = record_of(piece) if path.faults is not None and tunnel.splitter.records else None
            if path.faults is None or record is None:
                flow.put(when, piece)
                continue
            for faulty in path.faults.befall(record, piece):
                when += faulty.delay_s
                flow.put(when, faulty.content)
                if faulty.cut:
                    flow.ended = flow.broken_off = True
                    return

    def _give(self, tunnel: Tunnel, flow: Flow) -> bool:
        """Send some of what waits; False where the other side takes nothing now, or all is over."""
        when, data = flow.waiting[0]
        path = tunnel.path
        limit = len(data) if path.breaks_in is None or flow is tunnel.down else min(len(data), path.breaks_in)
        try:
            count = flow.sink.send(data[:limit]) if limit else 0
        except BlockingIOError:
            return False
        flow.held -= count
        if path.breaks_in is not None and flow is tunnel.up:
            path.breaks_in -= count
            if path.breaks_in <= 0:
                path.breaks_in = None
                for one in self._tunnels:
                    if one.path is path:
                        one.reset()
                return False
        if count < len(data):
            flow.waiting[0] = (when, data[count:])
            return False
        flow.waiting.popleft()
        if flow.broken_off and not flow.waiting:
            tunnel.reset()
            return False
        return True
