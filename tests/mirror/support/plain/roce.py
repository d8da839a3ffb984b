"""RoCEv2 frames to messages, in plain Python: the twin of the native parser, and what it does in words.

A flow is what is sent to one queue pair of one host. Packets are put in the order of their PSN; a repetition lands
where the first one did, and is counted. A hole is final as soon as the receiver has acknowledged a later PSN (it has
what is missing here, so nobody sends it again), or, if no acknowledgements are seen, after a number of later packets.
Acknowledgements name the sender's queue pair, which the data do not; they belong to the flow of the other direction
with the same UDP source port, if there is exactly one. Memory is bounded: too much that waits for a hole makes it
final.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lastgood.errors import ConfigError
from lastgood.mirror.streams.icrc import ICRC_BYTES, icrc
from lastgood.mirror.streams.ip import UDP, IpPacket, Left, ip_packet
from lastgood.mirror.streams.messages import DATA, HEAD, LOST, PIECE, Flow, Parsed
from lastgood.mirror.streams.roce import (
    FIRST,
    LAST,
    LAST_IMMEDIATE,
    MIDDLE,
    MOST_WAITING_BYTES,
    ONLY,
    ONLY_IMMEDIATE,
    PATIENCE,
    PROTOCOLS,
    ROCE_PORT,
    roce_flow,
)
from tests.mirror.support.plain.ll import Coding, decode
from tests.mirror.support.plain.roce_flow import PACKET_BYTES, Payload, QueueFlow, Write

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameBatch

__all__ = ["Packet", "PlainRoceParser", "roce_packet"]

_ACKNOWLEDGE, _CM, _CNP = 17, 100, 129
_WITH_ADDRESS: Final = frozenset((FIRST, ONLY, ONLY_IMMEDIATE))
_WITH_IMMEDIATE: Final = frozenset((LAST_IMMEDIATE, ONLY_IMMEDIATE))
_WRITES: Final = frozenset((FIRST, MIDDLE, LAST, LAST_IMMEDIATE, ONLY, ONLY_IMMEDIATE))
_PSNS: Final = 1 << 24
_START_WINDOW: Final = 1024
"""A connection of NCCL begins at PSN 0: one that is first seen before this PSN is taken from its start on."""
_MOST_AHEAD: Final = 1 << 16
"""An acknowledgement further ahead of what was seen is not believed."""
_REMEMBERED_STARTS: Final = 256
_REMEMBERED_GAPS: Final = 64
_MOST_FLOWS: Final = 1024
_MOST_EARLY: Final = 64


class Packet(NamedTuple):
    """The headers of one RoCEv2 packet. What its opcode does not carry is 0; its payload is `begin` to `end`."""

    opcode: int
    queue: int
    """Destination queue pair."""
    psn: int
    port: int
    """UDP source port."""
    address: int
    rkey: int
    length: int
    immediate: bytes
    syndrome: int
    begin: int
    end: int


def roce_packet(frame: memoryview, ip: IpPacket) -> Packet | str:
    """The headers of a packet to RoCE's port, or the name of the counter for what it is instead."""
    if ip.protocol != UDP:
        return "other_traffic"
    udp = ip.begin
    if ip.end - udp < 8:
        return Left.DAMAGED.value
    if ip.captured - udp < 8:
        return Left.SHORT.value
    port, to_port, nbytes = struct.unpack_from(">HHH", frame, udp)
    if to_port != ROCE_PORT:
        return "other_traffic"
    end = udp + nbytes
    if end > ip.end or nbytes < 8 + 12 + ICRC_BYTES:
        return Left.DAMAGED.value
    if end > ip.captured:
        return "truncated_packets"
    end -= ICRC_BYTES
    if icrc(frame[ip.start : end], udp - ip.start) != int.from_bytes(frame[end : end + ICRC_BYTES], "little"):
        return "wrong_checksums"
    opcode, flags = frame[udp + 8], frame[udp + 9]
    queue = int.from_bytes(frame[udp + 13 : udp + 16], "big")
    if flags & 0x0F:
        return "strangers"
    if opcode == _CNP:
        return "congestion_notices"
    if opcode == _CM and queue == 1:
        return "connection_datagrams"
    if opcode not in _WRITES and opcode != _ACKNOWLEDGE:
        return "strangers"
    psn = int.from_bytes(frame[udp + 17 : udp + 20], "big")
    begin = udp + 20
    address = rkey = length = syndrome = 0
    immediate = b""
    need = 16 * (opcode in _WITH_ADDRESS) + 4 * (opcode in _WITH_IMMEDIATE) + 4 * (opcode == _ACKNOWLEDGE)
    pad = flags >> 4 & 3
    if end - begin < need + pad:
        return Left.DAMAGED.value
    if opcode in _WITH_ADDRESS:
        address, rkey, length = struct.unpack_from(">QII", frame, begin)
        begin += 16
    if opcode in _WITH_IMMEDIATE:
        immediate = bytes(frame[begin : begin + 4])
        begin += 4
    if opcode == _ACKNOWLEDGE:
        syndrome = frame[begin]
    return Packet(opcode, queue, psn, port, address, rkey, length, immediate, syndrome, begin, end - pad)


class _Key(NamedTuple):
    source: bytes
    destination: bytes
    queue: int


class PlainRoceParser:
    """RoCEv2 as a `Parser`: see the module's text.

    `protocol` says what the messages carry: ``simple``, ``ll``, ``ll128``, or ``auto``, which tells LL by its flags.
    `patience` is after how many later packets a hole is final if no acknowledgements are seen. `striped`: a connection
    has several queue pairs, so neither immediates nor flags say anything of what one of them has lost.
    """

    def __init__(
        self,
        *,
        protocol: str = "auto",
        patience: int = PATIENCE,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        striped: bool = False,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError(f"a RoCE parser reads the protocols {', '.join(PROTOCOLS)}, not {protocol!r}")
        self._protocol, self._patience, self.most_waiting_bytes = protocol, patience, most_waiting_bytes
        self._striped = striped
        self._queues: OrderedDict[_Key, _Queue] = OrderedDict()
        self._by_port: dict[tuple[bytes, bytes, int], list[_Queue]] = {}
        self._batch: FrameBatch | None = None
        self._counters: Counter[str] = Counter()
        self._flows = 0
        self.waiting_bytes = 0
        self._alive: list[object] = []
        self._begin()

    def feed(self, batch: FrameBatch) -> Parsed:
        """Read frames. Addresses of pieces hold until the next call."""
        self._begin()
        self._batch = batch  # pieces lie in it
        base = np.frombuffer(batch.data, np.uint8).ctypes.data if len(batch.data) else 0
        for number in range(len(batch)):
            row = batch.table[number]
            self._counters["frames"] += 1
            view = batch.frame(number)
            ip = ip_packet(view, int(row["length"]), int(row["link"]))
            if isinstance(ip, Left):
                self._counters[ip.value] += 1
                continue
            packet = roce_packet(view, ip)
            if isinstance(packet, str):
                self._counters[packet] += 1
                continue
            payload = Payload(base + int(row["offset"]) + packet.begin, view[packet.begin : packet.end])
            if packet.opcode == _ACKNOWLEDGE:
                self._acknowledge(ip, packet)
            else:
                self._write(ip, packet, payload, int(row["time_ns"]))
        return self._parsed()

    def finish(self) -> Parsed:
        """The source has ended: what is still open is lost."""
        self._begin()
        for queue in self._queues.values():
            queue.settle(queue.top - 1)
            queue.flow.finish()
        return self._parsed()

    def counters(self) -> dict[str, int]:
        """What was seen, left aside and lost so far, by name."""
        return dict(self._counters)

    # -- output --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._alive.clear()
        self._opened: list[Flow] = []
        self._closed: list[int] = []
        self._heads: list[tuple[int, ...]] = []
        self._pieces: list[tuple[int, ...]] = []
        self._lost: list[tuple[int, ...]] = []
        self._resynced: list[tuple[int, str]] = []

    def _parsed(self) -> Parsed:
        return Parsed(
            self._opened,
            self._closed,
            np.array(self._heads, HEAD),
            np.array(self._pieces, PIECE),
            np.array(self._lost, LOST),
            self._resynced,
        )

    def open(self, queue: _Queue) -> int:
        """Number a flow that carries data."""
        index = self._flows
        self._flows += 1
        key = queue.key
        self._opened.append(roce_flow(index, key.source, key.destination, queue.port, key.queue, queue.flow.from_start))
        self._counters["flows"] += 1
        return index

    def add_head(self, flow: int, message: int, nbytes: int, time_ns: int) -> None:
        """A message begins."""
        self._counters["messages"] += 1
        self._heads.append((flow, DATA, message, 0, nbytes, time_ns))

    def add_piece(self, flow: int, message: int, offset: int, payload: Payload, coding: Coding) -> None:
        """Payload of a message, decoded here."""
        address, nbytes = payload.address, len(payload.view)
        if coding is Coding.RAW:
            self._alive.append(payload.view)
        else:
            data = decode(coding, payload.view)
            self._alive.append(data)
            address, nbytes = data.ctypes.data, data.nbytes
        self._counters["payload_bytes"] += nbytes
        self._pieces.append((flow, 0, message, offset, address, nbytes))

    def add_lost(self, flow: int, message: int, offset: int, nbytes: int) -> None:
        """Bytes that will never come."""
        self._counters["lost_bytes" if nbytes else "lost_messages"] += nbytes or 1
        self._lost.append((flow, 0, message, offset, nbytes))

    def add_resynced(self, flow: int, why: str) -> None:
        """Messages without numbers are missing."""
        self._counters["resynced"] += 1
        self._resynced.append((flow, why))

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter."""
        self._counters[name] += more

    # -- packets -------------------------------------------------------------------------------------------------------

    def _write(self, ip: IpPacket, packet: Packet, payload: Payload, time_ns: int) -> None:
        self._counters["writes"] += 1
        key = _Key(ip.source, ip.destination, packet.queue)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._new(key, packet)
        psn = queue.absolute(packet.psn)
        if psn < queue.floor:
            if packet.opcode not in _WITH_ADDRESS or not queue.is_new_connection(psn, packet):
                self._counters["late_packets" if queue.was_lost(psn) else "repeated_packets"] += 1
                return
            self._counters["reused_queue_pairs"] += 1
            self._close(queue)
            queue = self._new(key, packet)
            psn = queue.absolute(packet.psn)
        elif psn in queue.held:
            self._counters["repeated_packets"] += 1
            return
        self._queues.move_to_end(key)
        if packet.opcode in _WITH_ADDRESS:
            queue.remember(psn, packet)
        queue.top = max(queue.top, psn + 1)
        write = Write(
            packet.opcode, psn, packet.address, packet.rkey, packet.length, packet.immediate, payload, time_ns
        )
        if psn == queue.floor:
            queue.floor += 1
            queue.flow.take(write)
            queue.drain()
            return
        queue.hold(write)
        if not queue.acknowledged and len(queue.held) > self._patience:
            queue.settle(min(queue.held) - 1)
        if self.waiting_bytes > self.most_waiting_bytes:
            self._counters["holes_given_up"] += 1
            queue.settle(queue.top - 1)

    def _acknowledge(self, ip: IpPacket, packet: Packet) -> None:
        self._counters["acknowledgements"] += 1
        kind = packet.syndrome >> 5 & 3
        if kind:
            self._counters["negative_acknowledgements"] += 1
        queues = self._by_port.get((ip.destination, ip.source, packet.port), ())
        if len(queues) != 1:
            self._counters["unpaired_acknowledgements"] += 1
            return
        queue = queues[0]
        psn = queue.absolute(packet.psn) - (kind != 0)
        if psn < queue.floor:
            return
        if psn - queue.top >= _MOST_AHEAD:
            self._counters["odd_packets"] += 1
            return
        queue.acknowledged = True
        queue.settle(psn)

    def _new(self, key: _Key, packet: Packet) -> _Queue:
        while len(self._queues) >= _MOST_FLOWS:
            self._close(next(iter(self._queues.values())))
        from_start = packet.psn < _START_WINDOW
        first = packet.psn if from_start else packet.psn + _PSNS
        queue = _Queue(self, key, packet.port, first, 0 if from_start else first)
        queue.flow = QueueFlow(queue, self._protocol, from_start, self._striped)
        self._queues[key] = queue
        self._by_port.setdefault((key.source, key.destination, packet.port), []).append(queue)
        return queue

    def _close(self, queue: _Queue) -> None:
        queue.settle(queue.top - 1)
        queue.flow.finish()
        if queue.index is not None:
            self._closed.append(queue.index)
        del self._queues[queue.key]
        at = (queue.key.source, queue.key.destination, queue.port)
        self._by_port[at].remove(queue)
        if not self._by_port[at]:
            del self._by_port[at]


@dataclass(eq=False)
class _Queue:
    """One queue pair's packets in order, and the sink of its flow."""

    parser: PlainRoceParser
    key: _Key
    port: int
    top: int
    """One more than the highest PSN that was seen or acknowledged."""
    floor: int
    """Everything before it is given or lost."""
    index: int | None = None
    acknowledged: bool = False
    held: dict[int, Write] = field(default_factory=dict)
    """After a hole."""
    starts: OrderedDict[int, tuple[int, int, int]] = field(default_factory=OrderedDict)
    """Address, key and length by PSN: a queue pair that is used again writes elsewhere."""
    gaps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_GAPS))
    early: list[tuple[Any, ...]] = field(default_factory=list)
    """What was lost before the first message: given only if there is one."""
    flow: QueueFlow = field(init=False)

    def absolute(self, psn: int) -> int:
        """A PSN of 24 bits as the number nearest to what was seen that it can be."""
        return self.top + (psn - self.top + _PSNS // 2) % _PSNS - _PSNS // 2

    def remember(self, psn: int, packet: Packet) -> None:
        """Keep what a repetition of this packet says."""
        self.starts[psn] = (packet.address, packet.rkey, packet.length)
        if len(self.starts) > _REMEMBERED_STARTS:
            self.starts.popitem(last=False)

    def is_new_connection(self, psn: int, packet: Packet) -> bool:
        """Whether a packet with an old PSN is no repetition."""
        return not self.was_lost(psn) and self.starts.get(psn) != (packet.address, packet.rkey, packet.length)

    def was_lost(self, psn: int) -> bool:
        """Whether a packet came after its loss was final."""
        return any(first <= psn <= last for first, last in self.gaps)

    def hold(self, write: Write) -> None:
        """Keep a packet that came before one that is missing."""
        self.held[write.psn] = Write(
            write.opcode,
            write.psn,
            write.address,
            write.rkey,
            write.length,
            write.immediate,
            self.keep(write.payload),
            write.time_ns,
        )
        self.parser.waiting_bytes += write.nbytes + PACKET_BYTES
        self.parser.count("held_packets")

    def drain(self) -> None:
        """Give what is in order now."""
        while (write := self.held.pop(self.floor, None)) is not None:
            self.parser.waiting_bytes -= write.nbytes + PACKET_BYTES
            self.floor += 1
            self.flow.take(write)

    def settle(self, upto: int) -> None:
        """Holes up to this PSN are final."""
        self.drain()
        while self.floor <= upto:
            last = min(min(self.held, default=upto + 1) - 1, upto)
            self.gaps.append((self.floor, last))
            self.flow.lose(self.floor, last)
            self.floor = last + 1
            self.top = max(self.top, self.floor)
            self.drain()

    # -- as its flow's sink --------------------------------------------------------------------------------------------

    def head(self, message: int, nbytes: int, time_ns: int) -> None:
        """A message begins."""
        if self.index is None:
            self.index = self.parser.open(self)
            for kind, *rest in self.early:
                kind(self.index, *rest)
            self.early.clear()
        self.parser.add_head(self.index, message, nbytes, time_ns)

    def piece(self, message: int, offset: int, payload: Payload, coding: Coding) -> None:
        """Payload, still coded."""
        assert self.index is not None
        self.parser.add_piece(self.index, message, offset, payload, coding)

    def lost(self, message: int, offset: int, nbytes: int) -> None:
        """Will never come."""
        if self.index is not None:
            self.parser.add_lost(self.index, message, offset, nbytes)
        elif len(self.early) < _MOST_EARLY:
            self.early.append((self.parser.add_lost, message, offset, nbytes))

    def resynced(self, why: str) -> None:
        """Messages without numbers are missing."""
        if self.index is not None:
            self.parser.add_resynced(self.index, why)
        elif len(self.early) < _MOST_EARLY:
            self.early.append((self.parser.add_resynced, why))

    def keep(self, payload: Payload) -> Payload:
        """The same bytes in memory of their own."""
        copy: NDArray[np.uint8] = np.frombuffer(payload.view, np.uint8).copy()
        return Payload(copy.ctypes.data, copy.data)

    def wait(self, more: int) -> bool:
        """Whether so many more bytes may wait; below 0: they wait no more."""
        if more > 0 and self.parser.waiting_bytes + more > self.parser.most_waiting_bytes:
            return False
        self.parser.waiting_bytes += more
        return True

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter."""
        if more:
            self.parser.count(name, more)
