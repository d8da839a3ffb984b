"""The packets of a ring's collectives, as they pass the ports of watched ranks: RC queue pairs, LL or Simple.

Each channel of each link (rank r to rank r + 1) is one connection: a queue pair at either end, PSNs from 0, a step that
counts on from collective to collective (an LL message is one, a slice two), a buffer of 8 steps at the receiver. Before
each message the receiver announces room by a small write of its own; the sender's packets are acknowledged.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from lastgood.errors import ConfigError
from lastgood.mirror.generate.life import Collective, DdpLife
from lastgood.mirror.generate.packets import Path, acknowledge, negative_acknowledge, write_packets
from lastgood.mirror.streams.ll import encode
from lastgood.units import KIB, MIB
from lastgood.wire.nccl import messages, nccl_broadcast, nccl_layout
from lastgood.wire.ring import is_final

__all__ = ["Frame", "RingTraffic", "Wire", "reduced", "truth_arrays"]

_STEPS: Final = 8
_SLICE_STEPS: Final = 2
_CHUNK_STEPS: Final = 4
_LL_SLOT: Final = 64 * KIB
_LL_BASE: Final = 0x6_0000_0000
_SIMPLE_BASE: Final = 0x7_0000_0000
_CONNECTION_SPACE: Final = 16 * MIB
_READY_BASE: Final = 0x7F00_0000_0000
_READY_SLOT: Final = 0x100
_SPLIT_BYTES: Final = 128
_MOST_QUEUE_PAIRS: Final = 128
_ADAPTIVE_ABOVE: Final = 8192
"""NCCL_IB_AR_THRESHOLD's default."""
_BIG_IMMEDIATE_FROM: Final = (2, 29)


@dataclass(frozen=True)
class Wire:
    """How the ring talks."""

    protocol: Literal["ll", "simple"] = "simple"
    version: str = "2.28"
    """NCCL's: the layout of several channels, and the immediate's byte order."""
    channels: int = 1
    mtu: int = 4096
    adaptive: Literal["", "write", "packets"] = ""
    """Adaptive routing: the data is one write without immediate, or one for each packet; then the immediate alone."""
    buffer_bytes: int = 4 * MIB
    six: bool = True
    """IPv6, otherwise IPv4."""
    vlans: tuple[int, ...] = ()
    options: bytes = b""
    ack_every: int = 4
    queue_pairs: int = 1
    """Of each connection (NCCL_IB_QPS_PER_CONNECTION): messages take turns on them."""
    split_data: bool = False
    """Each message is cut over them instead (NCCL_IB_SPLIT_DATA_ON_QPS)."""

    def __post_init__(self) -> None:
        if self.mtu not in (256, 512, 1024, 2048, 4096):
            raise ConfigError(f"RoCE has MTUs of 256, 512, 1024, 2048 and 4096 bytes, not {self.mtu}")
        if not 1 <= self.ack_every <= 1 << 20:
            raise ConfigError(f"an acknowledgement is asked for every 1 to {1 << 20} packets, not {self.ack_every}")
        if not 1 <= self.queue_pairs <= _MOST_QUEUE_PAIRS:
            raise ConfigError(f"a connection has 1 to {_MOST_QUEUE_PAIRS} queue pairs, not {self.queue_pairs}")

    def immediate(self, nbytes: int) -> bytes:
        """A message's size as NCCL sends it."""
        version = tuple(int(number) for number in self.version.split(".")[:2])
        return nbytes.to_bytes(4, "big" if version >= _BIG_IMMEDIATE_FROM else "little")


@dataclass(frozen=True)
class Frame:
    """One frame at the port of a watched rank."""

    port: int
    """The rank whose port is mirrored."""
    data: bytes


@dataclass(frozen=True)
class _Sent:
    source: int
    destination: int
    data: bytes
    only_at: int | None = None
    """The rank whose port alone it passes: the network loses it."""


@dataclass
class _QueuePair:
    """One of a connection's."""

    path: Path
    back: Path
    data_queue: int
    """At the receiver: data go to it."""
    ready_queue: int
    """At the sender: what the receiver writes, and its acknowledgements."""
    psn: int = 0
    messages: int = 0


@dataclass
class _Connection:
    """One channel of the link from `source` to the next rank."""

    source: int
    destination: int
    pairs: list[_QueuePair]
    number: int
    ready_psn: int = 0
    step: int = 0
    sent: int = 0
    """Messages."""
    readies: int = 0


@dataclass
class RingTraffic:
    """Makes frames of collectives, in order: the same for the same arguments.

    `nak_every`: about every so many messages one has a packet that the network loses, so that the receiver asks for it
    again; 0: never.
    """

    ranks: int
    wire: Wire
    watched: Sequence[int]
    seed: int = 0
    nak_every: int = 0
    first_queue: int = 0x100
    """Queue pairs are numbered from here on: another life has others."""
    _connections: dict[tuple[int, int], _Connection] = field(default_factory=dict, init=False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        if self.ranks < 2 or not self.watched or not set(self.watched) <= set(range(self.ranks)):
            raise ConfigError(f"watched ranks are of 0 to {self.ranks - 1}, and a ring has at least 2 ranks")
        self._random = random.Random(self.seed)

    def frames(self, collectives: Iterable[Collective]) -> Iterator[Frame]:
        """All frames at the watched ports, in order: a frame between two watched ranks comes once for each."""
        for collective in collectives:
            for sent in self._collective(collective):
                for rank in self.watched:
                    if rank in (sent.source, sent.destination) and sent.only_at in (None, rank):
                        yield Frame(rank, sent.data)

    def address(self, rank: int) -> str:
        """A rank's IP address."""
        return f"fd00::{rank + 1:x}" if self.wire.six else f"10.77.{rank // 250}.{rank % 250 + 1}"

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _collective(self, collective: Collective) -> Iterator[_Sent]:
        if collective.kind == "allreduce":
            yield from self._all_reduce(collective.parts)
        elif collective.kind == "broadcast":
            yield from self._broadcast(collective.parts[0].tobytes())
        else:
            yield from self._all_gather([part.tobytes() for part in collective.parts])

    def _all_reduce(self, parts: Sequence[NDArray[Any]]) -> Iterator[_Sent]:
        wire = self.wire
        layout = nccl_layout(
            parts[0].size,
            parts[0].itemsize,
            self.ranks,
            channels=wire.channels,
            version=wire.version,
            protocol=wire.protocol,
            buffer_bytes=wire.buffer_bytes,
        )
        links = self._links()
        turns: dict[int, list[tuple[_Connection, bytes]]] = {}
        for rank in links:
            numbers: dict[int, int] = {}
            for message in messages(layout, rank, protocol=wire.protocol, buffer_bytes=wire.buffer_bytes):
                channel = message.send.chunk.channel
                turn = numbers.get(channel, 0)
                numbers[channel] = turn + 1
                where = slice(message.start, message.start + message.elements)
                data = _summed(parts, message.send.chunk.index, message.send.step, where)
                turns.setdefault(turn, []).append((self._connection(rank, channel), data))
        yield from self._turns(turns, _CHUNK_STEPS)

    def _broadcast(self, data: bytes) -> Iterator[_Sent]:
        wire = self.wire
        chunks = nccl_broadcast(
            len(data),
            self.ranks,
            channels=wire.channels,
            version=wire.version,
            protocol=wire.protocol,
            buffer_bytes=wire.buffer_bytes,
        )
        turns: dict[int, list[tuple[_Connection, bytes]]] = {}
        numbers: dict[int, int] = {}
        for chunk in chunks:
            turn = numbers.get(chunk.channel, 0)
            numbers[chunk.channel] = turn + 1
            part = data[chunk.start : chunk.start + chunk.elements]
            for rank in self._links():
                if rank != self.ranks - 1:  # The root is rank 0: the rank before it is the end of the chain.
                    turns.setdefault(turn, []).append((self._connection(rank, chunk.channel), part))
        yield from self._turns(turns, 1)

    def _all_gather(self, parts: Sequence[bytes]) -> Iterator[_Sent]:
        if len(parts[0]) > _LL_SLOT // 2:
            raise ConfigError("all-gathers of more than one chunk are not generated")
        turns: dict[int, list[tuple[_Connection, bytes]]] = {}
        slices = 1 if self.wire.protocol == "ll" else 2
        for step in range(self.ranks - 1):
            for rank in self._links():
                turns.setdefault(slices * step, []).append(
                    (self._connection(rank, 0), parts[(rank - step) % self.ranks])
                )
                if slices == 2:
                    turns.setdefault(slices * step + 1, []).append((self._connection(rank, 0), b""))
        yield from self._turns(turns, _CHUNK_STEPS)

    def _links(self) -> list[int]:
        """Ranks whose sends pass a watched port."""
        return [rank for rank in range(self.ranks) if rank in self.watched or (rank + 1) % self.ranks in self.watched]

    def _turns(self, turns: dict[int, list[tuple[_Connection, bytes]]], step_round: int) -> Iterator[_Sent]:
        """Message after message on each connection, packets of different connections in turn."""
        started: set[int] = set()
        for turn in sorted(turns):
            lanes = []
            for connection, data in turns[turn]:
                if connection.number not in started:
                    started.add(connection.number)
                    if self.wire.protocol == "simple":
                        connection.step = -(-connection.step // step_round) * step_round
                lanes.append(self._message(connection, data, 1 if step_round == 1 else _SLICE_STEPS))
            self._random.shuffle(lanes)
            for row in zip_longest(*lanes):
                yield from (sent for sent in row if sent is not None)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _connection(self, rank: int, channel: int) -> _Connection:
        found = self._connections.get((rank, channel))
        if found is None:
            after = (rank + 1) % self.ranks
            number = rank * 64 + channel
            pairs = []
            for lane in range(number * self.wire.queue_pairs, (number + 1) * self.wire.queue_pairs):
                path = Path(
                    _mac(rank), _mac(after), self.address(rank), self.address(after), 49152 + lane % 16384,
                    self.wire.vlans, self.wire.options,
                )  # fmt: skip
                queue = self.first_queue + 2 * lane
                pairs.append(_QueuePair(path, path.back(), queue, queue + 1))
            found = _Connection(rank, after, pairs, number)
            self._connections[rank, channel] = found
        return found

    def _message(self, to: _Connection, data: bytes, slice_steps: int) -> list[_Sent]:
        """All packets of one message: room, data, immediate, acknowledgements."""
        wire = self.wire
        slot = to.step % _STEPS
        if wire.protocol == "ll":
            payload = encode(data, to.step + 1)
            address = _LL_BASE + to.number * _CONNECTION_SPACE + slot * _LL_SLOT
            to.step += 1
        else:
            payload = data
            address = _SIMPLE_BASE + to.number * _CONNECTION_SPACE + slot * (wire.buffer_bytes // _STEPS)
            to.step += slice_steps
        rkey = 0x1000 + self.first_queue + to.number
        sent = self._room(to, address, rkey)
        adaptive = bool(wire.adaptive) and len(payload) > _ADAPTIVE_ABOVE
        if wire.split_data and wire.queue_pairs > 1:
            each = -(-len(payload) // wire.queue_pairs)
            each = -(-each // _SPLIT_BYTES) * _SPLIT_BYTES
            parts = [
                self._write(to, pair, payload[at : at + each], address + at, rkey, len(payload), adaptive)
                for pair, at in ((pair, number * each) for number, pair in enumerate(to.pairs))
            ]
            for row in zip_longest(*parts):
                sent += [one for one in row if one is not None]
        else:
            pair = to.pairs[to.sent % wire.queue_pairs]
            sent += self._write(to, pair, payload, address, rkey, len(payload), adaptive)
        to.sent += 1
        return sent

    def _write(
        self, to: _Connection, pair: _QueuePair, payload: bytes, address: int, rkey: int, size: int, adaptive: bool
    ) -> list[_Sent]:
        """What one queue pair carries of a message of `size` bytes, with its acknowledgements."""
        wire, sent = self.wire, list[_Sent]()
        immediate = wire.immediate(size)
        if adaptive:
            packets = write_packets(
                pair.data_queue, pair.psn, payload, address, rkey, wire.mtu,
                split=wire.adaptive == "packets", ack_every=wire.ack_every,
            )  # fmt: skip
            packets += write_packets(pair.data_queue, pair.psn + len(packets), b"", 0, 0, wire.mtu, immediate=immediate)
        else:
            packets = write_packets(
                pair.data_queue, pair.psn, payload, address, rkey, wire.mtu,
                immediate=immediate, ack_every=wire.ack_every,
            )  # fmt: skip
        frames = [pair.path.frame(packet) for packet in packets]
        lost = None
        if self.nak_every and self._random.randrange(self.nak_every) == 0:
            lost = self._random.randrange(len(frames))

        def back(packet: bytes) -> None:
            sent.append(_Sent(to.destination, to.source, pair.back.frame(packet)))

        for number, frame in enumerate(frames):
            if number == lost:
                sent.append(_Sent(to.source, to.destination, frame, only_at=to.source))
                continue
            sent.append(_Sent(to.source, to.destination, frame))
            asks = number + 1 == len(frames) or number % wire.ack_every == wire.ack_every - 1
            if asks and lost is None:
                back(acknowledge(pair.ready_queue, pair.psn + number, pair.messages))
        if lost is not None:
            back(negative_acknowledge(pair.ready_queue, pair.psn + lost, pair.messages))
            sent += [_Sent(to.source, to.destination, frame) for frame in frames[lost:]]
            back(acknowledge(pair.ready_queue, pair.psn + len(frames) - 1, pair.messages))
        pair.psn += len(frames)
        pair.messages += 1
        return sent

    def _room(self, to: _Connection, address: int, rkey: int) -> list[_Sent]:
        """The receiver's announcement of where the message may go."""
        content = struct.pack("<QIIIIQ", address, _LL_SLOT, 1, rkey, 0, to.readies + 1)
        at = _READY_BASE + to.number * _CONNECTION_SPACE + (to.readies % 256) * _READY_SLOT
        pair = to.pairs[0]
        (packet,) = write_packets(pair.ready_queue, to.ready_psn, content, at, rkey + 1, self.wire.mtu)
        sent = [
            _Sent(to.destination, to.source, pair.back.frame(packet)),
            _Sent(to.source, to.destination, pair.path.frame(acknowledge(pair.data_queue, to.ready_psn, to.readies))),
        ]
        to.ready_psn += 1
        to.readies += 1
        return sent


def reduced(parts: Sequence[NDArray[Any]], wire: Wire) -> NDArray[Any]:
    """What an all-reduce gives, in the ring's own order of additions."""
    result = np.empty_like(parts[0])
    ranks = len(parts)
    layout = nccl_layout(
        parts[0].size,
        parts[0].itemsize,
        ranks,
        channels=wire.channels,
        version=wire.version,
        protocol=wire.protocol,
        buffer_bytes=wire.buffer_bytes,
    )
    for chunk in layout.chunks():
        where = slice(chunk.start, chunk.start + chunk.elements)
        result[where] = _sum(parts, chunk.index, ranks, where)
    return result


def truth_arrays(life: DdpLife, wire: Wire) -> dict[str, NDArray[Any]]:
    """What a mirror node must find: weights by name, and each step's reduced gradients by ``step/bucket``."""
    arrays: dict[str, NDArray[Any]] = {
        f"weight/{name}": weight for name, weight in zip(life.names, life.weights, strict=True)
    }
    for collective in life.collectives():
        if collective.kind == "allreduce":
            arrays[f"gradient/{collective.step}/{collective.bucket}"] = reduced(collective.parts, wire)
    for step in range(min(2, len(life.gradients))):
        for number, bucket in enumerate(life.step_buckets(step)):
            arrays[f"bucket/{step}/{number}"] = np.array(bucket)
    return arrays


def _summed(parts: Sequence[NDArray[Any]], chunk: int, step: int, where: slice) -> bytes:
    """What is sent of a chunk at a step: the sum over the first ranks, or over all."""
    ranks = len(parts)
    return _sum(parts, chunk, ranks if is_final(ranks, step) else step + 1, where).tobytes()


def _sum(parts: Sequence[NDArray[Any]], chunk: int, count: int, where: slice) -> NDArray[Any]:
    total = parts[(chunk + 1) % len(parts)][where]
    for number in range(2, count + 1):
        total = parts[(chunk + number) % len(parts)][where] + total
    return total


def _mac(rank: int) -> bytes:
    return bytes((2, 0, 0)) + rank.to_bytes(3, "big")
