"""A replicating switch in user space: it relays a ring's links unchanged, and copies marked records to the shadows.

Each rank connects to the switch instead of to the next rank. Both directions are passed on byte for byte; what goes
forward is read along, and each record with the final mark is copied to the shadow that owns its bucket (bucket mod
shadows), each end of iteration to all of them, on connections of the switch's own. A slow shadow never holds up the
relay: its queue is bounded, and what does not fit is dropped and counted, as a switch's hardware does. The shadow finds
out by the iteration's end, and asks for a seed.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from lastgood.errors import ConfigError, LastgoodError
from lastgood.gradients.protocol.messages import Hello
from lastgood.gradients.switch.forward import Copier, CopySettings
from lastgood.gradients.switch.parser import LinkParser, relay_proof
from lastgood.wire.frames import is_ready, keep_alive, shut_down
from lastgood.wire.gate import Gate, Guest, Handshake
from lastgood.wire.records import Record, RecordKind
from lastgood.wire.ring_link import Hello as RingHello
from lastgood.wire.ring_link import listen_ring, parse_address

__all__ = ["Switch", "SwitchLink", "parse_link"]

_log = logging.getLogger("lastgood")

_BUFFER_BYTES = 1 << 20
_LOOK_S = 0.2
_NAME_S = 2.0
_MAX_CONNECTIONS = 8
"""Of one link at once that are proved: a ring has one, and a test or a rank that tries again another."""
_END_S = 5.0


@dataclass(frozen=True)
class SwitchLink:
    """Who connects to `listen` is passed on to `target`."""

    listen: str
    target: str


def parse_link(text: str) -> SwitchLink:
    """Read ``LISTEN=NEXT``, two addresses. Raises ConfigError for anything else."""
    listen, equals, target = text.partition("=")
    if not equals:
        raise ConfigError(f"not a link: {text!r} (HOST:PORT=HOST:PORT, where to listen and what to pass on to)")
    parse_address(listen)
    parse_address(target)
    return SwitchLink(listen, target)


class Switch:
    """A running switch. As a context it ends with the block."""

    def __init__(
        self, links: Sequence[SwitchLink], shadows: Sequence[str], settings: CopySettings, stall_s: float = 300.0
    ) -> None:
        """Listen on all links. A rank that takes nothing for `stall_s` loses its connection.

        Raises HostError if this machine cannot listen on an address.
        """
        self._shadows, self._settings, self._stall_s = tuple(shadows), settings, stall_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._copiers: dict[int, list[Copier]] = {}
        self._leaving: list[Copier] = []
        self._ended: Counter[str] = Counter()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        with ExitStack() as failed:
            listeners = [failed.enter_context(listen_ring(*parse_address(link.listen))) for link in links]
            failed.pop_all()
        self.addresses = [_address_of(listener) for listener in listeners]
        """Where each link listens, in the order of the links; ports that were 0 are known here."""
        for link, listener in zip(links, listeners, strict=True):
            thread = threading.Thread(target=self._serve, args=(listener, link), name="switch", daemon=True)
            thread.start()
            self._threads.add(thread)

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections. Copies that wait are given up."""
        self._stop.set()
        with self._lock:
            for one in self._sockets:
                shut_down(one)
            copiers = [copier for group in (*self._copiers.values(), self._leaving) for copier in group]
            threads = list(self._threads)
        for copier in copiers:
            copier.finish(0.0)
        deadline = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for copier in copiers:
            copier.join(max(0.0, deadline - time.monotonic()))

    def counters(self) -> dict[str, Any]:
        """Bytes and connections relayed, and what became of the copies, in all and for each rank and shadow."""
        with self._lock:
            self._sweep()
            now = [
                (rank, shadow, copier.counters())
                for rank, group in sorted(self._copiers.items())
                for shadow, copier in enumerate(group)
            ]
            total = Counter(self._ended)
            for copier in self._leaving:
                total.update(copier.counters())
            relayed = dict(self._counts)
        for _, _, counts in now:
            total.update(counts)
        rows = [
            {"rank": rank, "shadow": shadow, "address": self._shadows[shadow], **counts} for rank, shadow, counts in now
        ]
        return {"relay": relayed, "copies": dict(total), "now": rows}

    def _sweep(self) -> None:
        """Keep the counts of copiers that have ended, and not the copiers."""
        for copier in [copier for copier in self._leaving if copier.join(0.0)]:
            self._leaving.remove(copier)
            self._ended.update(copier.counters())

    # -- the relay -----------------------------------------------------------------------------------------------------

    def _count(self, name: str, value: int = 1) -> None:
        with self._lock:
            self._counts[name] += value

    def _serve(self, listener: socket.socket, link: SwitchLink) -> None:
        target = _Target(link.target)

        def unreachable(error: OSError) -> None:
            # The next rank is not there yet; this one tries again.
            self._count("unreachable_connections")
            _log.info("switch: %s: %s cannot be reached: %s", link.listen, link.target, error)

        def prove(other: str) -> Handshake[socket.socket | None]:
            return relay_proof(other, self._settings.token, target.addresses, unreachable)

        relays: set[threading.Thread] = set()
        gate: Gate[socket.socket] = Gate(listener, prove, f"switch: {link.listen}", _log.warning, dropped=self._dropped)
        with gate:
            while not self._stop.is_set():
                for guest in gate.step(_LOOK_S):
                    relays = {thread for thread in relays if thread.is_alive()}
                    thread = None
                    if len(relays) < _MAX_CONNECTIONS:
                        thread = gate.serve_in_thread(guest, partial(self._relay, link=link))
                    if thread is None:
                        self._count("refused_connections")
                        guest.known.close()
                        guest.connection.close()
                        continue
                    relays.add(thread)
                    with self._lock:
                        self._threads = {thread, *(one for one in self._threads if one.is_alive())}

    def _dropped(self, cause: str) -> None:
        if cause != "refused":
            self._count("silent_connections")

    def _relay(self, guest: Guest[socket.socket], *, link: SwitchLink) -> None:
        with guest.connection as inner, guest.known as outer:
            self._pass_on(inner, outer, f"{guest.other} on {link.listen}")

    def _pass_on(self, inner: socket.socket, outer: socket.socket, name: str) -> None:
        for one in (inner, outer):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(one)
        mine: list[Copier] = []
        parser = LinkParser(name, partial(self._greeted, mine), partial(self._copy, mine))
        with self._lock:
            self._sockets |= {inner, outer}
            self._counts["connections"] += 1
        back = threading.Thread(
            target=self._pump,
            args=(outer, inner, None, "back_bytes"),
            name="switch-back",
            daemon=True,
        )
        try:
            back.start()
            self._pump(inner, outer, _Reading(parser, name, partial(self._count, "blind_links")), "forward_bytes")
        finally:
            if back.ident is not None:
                back.join(self._stall_s)
            with self._lock:
                self._sockets -= {inner, outer}
            for copier in mine:
                copier.finish(self._settings.timeout_s)

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        after: Callable[[memoryview], None] | None,
        counter: str,
    ) -> None:
        """Pass bytes on until the source ends, or either side fails; then the target is told that no more will come."""
        view = memoryview(bytearray(_BUFFER_BYTES))
        try:
            while not self._stop.is_set():
                if not is_ready(source, select.POLLIN, _LOOK_S):
                    continue
                try:
                    count = source.recv_into(view)
                except BlockingIOError:
                    continue
                if count == 0:
                    break
                self._send(target, view[:count])
                self._count(counter, count)
                if after is not None:
                    after(view[:count])
        except OSError as error:
            _log.info("switch: a link ended: %s", error)
            shut_down(source)
        # Behind all that was sent before; the target may still have something to say.
        shut_down(target, socket.SHUT_WR)

    def _send(self, target: socket.socket, data: memoryview) -> None:
        deadline = time.monotonic() + self._stall_s
        while data and not self._stop.is_set():
            try:
                data = data[target.send(data) :]
                deadline = time.monotonic() + self._stall_s
            except BlockingIOError:
                if not is_ready(target, select.POLLOUT, _LOOK_S) and time.monotonic() > deadline:
                    raise TimeoutError(f"the other side took nothing for {self._stall_s:g} s") from None

    # -- copies --------------------------------------------------------------------------------------------------------

    def _greeted(self, mine: list[Copier], hello: RingHello) -> None:
        greeting = Hello(role="data", job=hello.job, epoch=hello.epoch, rank=hello.rank, layout=hello.layout)
        for shadow, address in enumerate(self._shadows):  # one by one, so that those that began also end
            mine.append(Copier(shadow, len(self._shadows), address, greeting, self._settings))
        with self._lock:
            former = self._copiers.get(hello.rank, [])
            if any(copier.open and copier.incarnation > hello.epoch for copier in former):
                # Most likely a straggler of an older incarnation, whose copies no shadow takes. The others must go on.
                former = []
                self._leaving += mine
            else:
                # Those of a connection, or an incarnation of the job, that is over.
                self._copiers[hello.rank] = mine
                self._leaving += former
            self._sweep()
        for copier in former:
            copier.finish(0.0)

    def _copy(self, mine: list[Copier], record: Record, content: bytes) -> None:
        if record.kind is RecordKind.END:
            for copier in mine:
                copier.offer(record, content)
        elif mine:
            mine[record.bucket % len(mine)].offer(record, content)


class _Target:
    """Where the next rank is. A name is looked up again after a while, and not for each stranger."""

    def __init__(self, address: str) -> None:
        self._host, self._port = parse_address(address)
        self._found: list[tuple[Any, ...]] = []
        self._until = 0.0
        self._error: OSError | None = None

    def addresses(self) -> list[tuple[Any, ...]]:
        """As `socket.getaddrinfo` lists them. Raises OSError."""
        if time.monotonic() >= self._until:
            self._found, self._error = [], None
            try:
                self._found = list(socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
            except UnicodeError:
                self._error = OSError(errno.EINVAL, f"{self._host!r:.80} is no name of a host")
            except OSError as error:
                self._error = error
            self._until = time.monotonic() + _NAME_S
        if self._error is not None:
            raise self._error
        return self._found


class _Reading:
    """Reads along until something cannot be read or copied; the relay goes on, without copies."""

    def __init__(self, parser: LinkParser, name: str, blind: Callable[[], None]) -> None:
        self._parser: LinkParser | None = parser
        self._name, self._blind = name, blind

    def __call__(self, data: memoryview) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed(data)
        except Exception as error:  # whatever it is (no thread or memory for a copy, say), the training needs the relay
            what = error if isinstance(error, LastgoodError) else repr(error)
            _log.warning("switch: %s is relayed, and not copied any more: %s", self._name, what)
            self._parser = None
            self._blind()


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
