"""Where NCCL's ring all-reduce puts the chunks of one call, by version and protocol.

A buffer is first cut into *cells*, which are shared out over the channels; each channel then runs the loops of `ring`.
The loops are the same in all versions that are known here, so one channel is certain. The cells are not: each rule
below holds for the versions that are named with it and for no other, and for a call that NCCL does not put into one
group with others (in a group, calls share channels).
"""

from __future__ import annotations

from dataclasses import dataclass

from lastgood.errors import ConfigError
from lastgood.units import KIB, MIB
from lastgood.wire.ring import ChannelRange, RingLayout, check_sizes

__all__ = ["KNOWN_VERSIONS", "MAX_CHANNELS", "PROTOCOLS", "nccl_layout"]

MAX_CHANNELS = 64
PROTOCOLS = ("simple", "ll")
_BUFFER_BYTES = 4 * MIB
"""NCCL_BUFFSIZE's default."""
_SIMPLE_GRAIN_BYTES = 512
_LL_CHUNK_BYTES = 32 * KIB
"""Of data: an LL buffer of 512 KiB in 8 steps, of which half is flags."""
_ALL_REDUCE_TRAFFIC = 2
"""Bytes on each link for a byte of the buffer, as NCCL counts them."""
_LL_TRAFFIC = 4


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
_NEW = _CellRule(32 * KIB, None, True, PROTOCOLS)
_RULES = {"2.22": _OLD, "2.28": _NEW, "2.30": _NEW}
KNOWN_VERSIONS = tuple(_RULES)


def nccl_layout(
    elements: int,
    element_bytes: int,
    ranks: int,
    *,
    channels: int = 1,
    version: str | None = None,
    protocol: str = "simple",
    buffer_bytes: int = _BUFFER_BYTES,
) -> RingLayout:
    """The chunks of one all-reduce of `elements` elements by NCCL's ring.

    `channels` is the number that NCCL may use for this call; fewer are used for small ones. `version` (as ``2.28``,
    more digits are ignored) is needed where there is more than one. `buffer_bytes` is NCCL_BUFFSIZE.
    Raises ConfigError for sizes that no ring has, and where the rule is not known.
    """
    check_sizes(elements, element_bytes, ranks)
    if protocol not in PROTOCOLS:
        raise ConfigError(f"the layout of NCCL's protocol {protocol!r} is not known; known: {', '.join(PROTOCOLS)}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise ConfigError(f"NCCL has 1 to {MAX_CHANNELS} channels, not {channels}")
    chunk_bytes = buffer_bytes // 2 // _SIMPLE_GRAIN_BYTES * _SIMPLE_GRAIN_BYTES
    if chunk_bytes <= 0:
        raise ConfigError(f"NCCL_BUFFSIZE is at least {2 * _SIMPLE_GRAIN_BYTES} bytes, not {buffer_bytes}")
    if protocol == "ll":
        chunk_bytes = _LL_CHUNK_BYTES
    rule = _rule(version, channels, protocol)
    shares = [elements] if rule is None else _shares(rule, elements, element_bytes, channels, protocol)
    ranges = []
    start = 0
    for channel, count in enumerate(shares):
        if count:
            ranges.append(ChannelRange(channel, start, count, chunk_bytes // element_bytes))
        start += count
    return RingLayout(elements, element_bytes, ranks, tuple(ranges))


def _rule(version: str | None, channels: int, protocol: str) -> _CellRule | None:
    """The rule of a version; None if one channel needs none."""
    known = ", ".join(KNOWN_VERSIONS)
    if version is None:
        if channels == 1:
            return None
        raise ConfigError(f"how NCCL shares a buffer out over channels depends on its version; give one of {known}")
    rule = _RULES.get(".".join(version.split(".")[:2]))
    if rule is None:
        raise ConfigError(f"how NCCL {version} shares a buffer out over channels is not known here; known: {known}")
    if channels == 1:
        return None
    if protocol not in rule.protocols:
        raise ConfigError(f"how NCCL {version} shares out buffers with protocol {protocol} is not known here")
    return rule


def _shares(rule: _CellRule, elements: int, element_bytes: int, channels: int, protocol: str) -> list[int]:
    """Elements for each channel that is used, in the order of the buffer."""
    per_byte = _ALL_REDUCE_TRAFFIC * (_LL_TRAFFIC if protocol == "ll" else 1)
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
