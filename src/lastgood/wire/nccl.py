"""Where NCCL's ring all-reduce puts the chunks of one call, by version and protocol.

From 2.22 on a buffer is first cut into *cells*, which are shared out over the channels; each channel then runs the
loops of `ring`. The loops are the same in all these versions, so one channel is certain. The cells are not: each rule
below holds for the versions that are named with it and for no other. Up to 2.19 all channels share each loop, and the
chunks of a small loop depend on the number of threads. All of it is for a call that NCCL does not put into one group
with others (in a group, calls share channels).

A chunk is sent as one message (LL), or as two *slices* (Simple), of which the second may be empty: `messages`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lastgood.errors import ConfigError
from lastgood.units import KIB, MIB
from lastgood.wire.ring import ChannelRange, Chunk, RingLayout, Send, Turns, check_sizes

__all__ = [
    "KNOWN_VERSIONS",
    "MAX_CHANNELS",
    "OLD_VERSIONS",
    "PROTOCOLS",
    "Message",
    "messages",
    "nccl_broadcast",
    "nccl_layout",
    "simple_slices",
]

MAX_CHANNELS = 64
PROTOCOLS = ("simple", "ll")
_BUFFER_BYTES = 4 * MIB
"""NCCL_BUFFSIZE's default."""
_SIMPLE_GRAIN_BYTES = 512
_LL_CHUNK_BYTES = 32 * KIB
"""Of data: an LL buffer of 512 KiB in 8 steps, of which half is flags."""
_ALL_REDUCE_TRAFFIC = 2
"""Bytes on each link for a byte of the buffer, as NCCL counts them."""
_BROADCAST_TRAFFIC = 1
_LL_TRAFFIC = 4
_BUFFER_STEPS = 8
"""NCCL_STEPS: parts of a buffer."""
_SLICE_STEPS = 2
"""Of protocol simple's slices."""
OLD_VERSIONS = tuple(f"2.{minor}" for minor in range(4, 20))
"""Channels share each loop."""
_MAX_THREADS = 512
_MIN_THREADS = 64
_LL_LEAST_THREADS = 96
_THREAD_BYTES = 8
"""A chunk is a multiple of it for each thread."""
_SIMPLE_THREAD_LOAD = 64
_LL_THREAD_LOAD = 8
"""Bytes for each thread (with LL for each rank too) below which fewer channels, then fewer threads, are used."""


@dataclass(frozen=True)
class _CellRule:
    least_traffic_bytes: int
    """A channel's share is not smaller."""
    fixed_cell_bytes: int | None
    """None: the cell is the least traffic divided by the traffic for a byte."""
    first_rounds_up: bool
    """How the first channel's share is rounded to cells."""
    protocols: tuple[str, ...]


_OLD = _CellRule(512, 16, False, ("simple",))
_NEW = _CellRule(16 * KIB, None, True, PROTOCOLS)
_NEWER = _CellRule(32 * KIB, None, True, PROTOCOLS)
_RULES = {"2.22": _OLD, "2.28": _NEW, "2.30": _NEWER}
KNOWN_VERSIONS = (*OLD_VERSIONS, *_RULES)


@dataclass(frozen=True)
class Message:
    """One message of a chunk: elements `start` to `start + elements` of the buffer; `elements` may be 0."""

    send: Send
    part: int
    """Which of the chunk's messages, from 0."""
    start: int
    elements: int


def nccl_layout(
    elements: int,
    element_bytes: int,
    ranks: int,
    *,
    channels: int = 1,
    version: str | None = None,
    protocol: str = "simple",
    buffer_bytes: int = _BUFFER_BYTES,
    threads: int = _MAX_THREADS,
) -> RingLayout:
    """The chunks of one all-reduce of `elements` elements by NCCL's ring.

    `channels` is the number that NCCL may use for this call; fewer are used for small ones. `version` (as ``2.28``,
    more digits are ignored) is needed if there is more than one; None is 2.22 or later. `buffer_bytes` is
    NCCL_BUFFSIZE. `threads` is the number that NCCL up to 2.19 may use for a channel (NCCL_NTHREADS; without it 512, or
    256 with protocol simple if the links are slow); fewer are used for small calls.
    Raises ConfigError for sizes that no ring has, and if the rule is not known.
    """
    check_sizes(elements, element_bytes, ranks)
    chunk_bytes = buffer_bytes // 2 // _SIMPLE_GRAIN_BYTES * _SIMPLE_GRAIN_BYTES
    call = _Call(elements, element_bytes, ranks, _ALL_REDUCE_TRAFFIC, chunk_bytes, protocol)
    return RingLayout(elements, element_bytes, ranks, _ranges(call, channels, version, threads))


def nccl_broadcast(
    nbytes: int,
    ranks: int,
    *,
    channels: int = 1,
    version: str | None = None,
    protocol: str = "simple",
    buffer_bytes: int = _BUFFER_BYTES,
    threads: int = _MAX_THREADS,
) -> Iterator[Chunk]:
    """The chunks of one broadcast of `nbytes` bytes by NCCL's ring: each is one message, in bytes.

    The root and every rank but the last one after it send each chunk to the next rank. Arguments and errors are those
    of `nccl_layout`.
    """
    check_sizes(nbytes, 1, ranks)
    call = _Call(nbytes, 1, ranks, _BROADCAST_TRAFFIC, buffer_bytes // _BUFFER_STEPS, protocol)
    for run in _ranges(call, channels, version, threads):
        yield from run.chunks(1, 1)


@dataclass(frozen=True)
class _Call:
    elements: int
    element_bytes: int
    ranks: int
    traffic: int
    """Bytes on each link for a byte of the buffer, as NCCL counts them."""
    simple_chunk_bytes: int
    protocol: str


def _ranges(call: _Call, channels: int, version: str | None, threads: int) -> tuple[ChannelRange, ...]:
    if call.protocol not in PROTOCOLS:
        raise ConfigError(
            f"the layout of NCCL's protocol {call.protocol!r} is not known; known: {', '.join(PROTOCOLS)}"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise ConfigError(f"NCCL has 1 to {MAX_CHANNELS} channels, not {channels}")
    if call.simple_chunk_bytes < _SIMPLE_GRAIN_BYTES:
        raise ConfigError(f"NCCL_BUFFSIZE is at least {_BUFFER_STEPS * _SIMPLE_GRAIN_BYTES} bytes")
    chunk_bytes = _LL_CHUNK_BYTES if call.protocol == "ll" else call.simple_chunk_bytes
    if version is not None and _minor(version) in OLD_VERSIONS:
        return _taking_turns(call, channels, chunk_bytes, threads)
    rule = _rule(version, channels, call.protocol)
    shares = [call.elements] if rule is None else _shares(rule, call, channels)
    alone = []
    start = 0
    for channel, count in enumerate(shares):
        if count:
            alone.append(ChannelRange(channel, start, count, chunk_bytes // call.element_bytes))
        start += count
    return tuple(alone)


def simple_slices(elements: int, element_bytes: int, buffer_bytes: int = _BUFFER_BYTES) -> tuple[int, int]:
    """Elements of the two slices in which protocol simple sends a chunk of `elements`; 0 is sent too, as no bytes."""
    step = buffer_bytes // _BUFFER_STEPS // element_bytes
    first = min(elements, max(_ceil(elements, 32) * 16, step * _SLICE_STEPS // 32))
    return first, elements - first


def messages(
    layout: RingLayout, rank: int, *, protocol: str = "simple", buffer_bytes: int = _BUFFER_BYTES
) -> Iterator[Message]:
    """All messages that `rank` sends to the next one for one all-reduce, empty ones too.

    In the order of channels, then in the order in which each channel sends them. Raises ConfigError for a protocol that
    is not known.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"the messages of NCCL's protocol {protocol!r} are not known; known: {', '.join(PROTOCOLS)}")
    for send in layout.sends(rank):
        count = send.chunk.elements
        parts = (count,) if protocol == "ll" else simple_slices(count, layout.element_bytes, buffer_bytes)
        start = send.chunk.start
        for part, elements in enumerate(parts):
            yield Message(send, part, start, elements)
            start += elements


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _taking_turns(call: _Call, channels: int, chunk_bytes: int, threads: int) -> tuple[ChannelRange, ...]:
    """The channels of NCCL up to 2.19, as many as it uses for a buffer of this size."""
    if threads % 32 or not _MIN_THREADS <= threads <= _MAX_THREADS:
        raise ConfigError(f"NCCL has {_MIN_THREADS} to {_MAX_THREADS} threads in whole 32, not {threads}")
    if not call.elements:
        return ()
    low_latency = call.protocol == "ll"
    load = _LL_THREAD_LOAD * call.ranks if low_latency else _SIMPLE_THREAD_LOAD
    while call.elements * call.element_bytes < channels * threads * load:
        if channels > 1:
            channels -= 1
        elif threads % 128 == 0:
            threads //= 2
        else:
            break
    if low_latency:
        threads = max(threads, _LL_LEAST_THREADS)
    grain_bytes = threads * _THREAD_BYTES
    if not low_latency and chunk_bytes % grain_bytes:
        raise ConfigError(f"a chunk of {chunk_bytes} bytes is no multiple of {grain_bytes} bytes for {threads} threads")
    size, grain = chunk_bytes // call.element_bytes, grain_bytes // call.element_bytes
    return tuple(
        ChannelRange(channel, 0, call.elements, size, Turns(channels, channel, grain, low_latency))
        for channel in range(channels)
    )


def _rule(version: str | None, channels: int, protocol: str) -> _CellRule | None:
    """The rule of a version; None if one channel needs none."""
    known = ", ".join(KNOWN_VERSIONS)
    if version is None:
        if channels == 1:
            return None
        raise ConfigError(f"how NCCL shares a buffer out over channels depends on its version; give one of {known}")
    rule = _RULES.get(_minor(version))
    if rule is None:
        raise ConfigError(f"how NCCL {version} shares a buffer out over channels is not known here; known: {known}")
    if channels == 1:
        return None
    if protocol not in rule.protocols:
        raise ConfigError(f"how NCCL {version} shares out buffers with protocol {protocol} is not known here")
    return rule


def _shares(rule: _CellRule, call: _Call, channels: int) -> list[int]:
    """Elements for each channel that is used, in the order of the buffer."""
    elements, element_bytes = call.elements, call.element_bytes
    per_byte = call.traffic * (_LL_TRAFFIC if call.protocol == "ll" else 1)
    cell_bytes = rule.fixed_cell_bytes or _ceil(_ceil(rule.least_traffic_bytes, per_byte), 16) * 16
    cells = _ceil(elements * element_bytes, cell_bytes)
    if cells == 0:
        return []
    share = max(rule.least_traffic_bytes, elements * element_bytes * per_byte // channels)
    cell_traffic = cell_bytes * per_byte
    per_channel = min(cells, _ceil(share, cell_traffic))
    first = min(cells, per_channel if rule.first_rounds_up else share // cell_traffic)
    middle, last = divmod(cells - first, per_channel)
    if 1 + middle + (last > 0) > channels:
        # More shares than channels: the others are made larger, and the last one takes what remains.
        per_channel, more = divmod(cells - first, channels - 1)
        middle, last = channels - 2, per_channel + more
    counts = [first, *[per_channel] * middle, *([last] if last else [])]
    shares = [count * (cell_bytes // element_bytes) for count in counts]
    shares[-1] -= sum(shares) - elements
    return shares


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
