"""What several ranks hold alike is written by one of them, spread over the ranks by bytes.

Each rank finds out by itself what its ranks' groups hold alike and who writes which block: the same rule over the same
list gives the same answer everywhere. A division is used only once all ranks of a group have shown that they came to
the same one; until then, and wherever they did not, every rank writes all that it holds. So a rank can only ever write
too much.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lastgood import _native
from lastgood.checkpointers.slots.contents import NamedTensor, named_tensors
from lastgood.errors import ConfigError, StateError, WaitTimeout
from lastgood.state import FlatState, Layout
from lastgood.state.layout import RANKS_VERSION, Node, map_leaves
from lastgood.state.shards import Placement, describe_shard
from lastgood.text import parse_json

__all__ = ["Declared", "Division", "Item", "StoreExchange", "assign", "holders", "without_blocks"]

_log = logging.getLogger("lastgood")

Declared = Literal["none", "placements", "ddp"]
"""What is held alike: nothing; what DTensors' placements say; beside it, plain parameters and optimizer tensors."""
Group = tuple[int, ...]

EXCHANGE_TIMEOUT_S = 30.0
_MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Item:
    """A block that the ranks of a group hold alike."""

    name: str
    nbytes: int
    group: Group


def assign(items: Sequence[Item]) -> dict[str, int]:
    """The rank that writes each item: in each group the largest goes to the rank with the least so far.

    Depends on the items alone, not on their order. In a group, the most and the least loaded rank differ by the
    largest item at most (Graham, 1969, list scheduling).
    """
    owners = {}
    loads: dict[Group, dict[int, int]] = {}
    for item in sorted(items, key=lambda item: (-item.nbytes, item.name)):
        load = loads.setdefault(item.group, dict.fromkeys(item.group, 0))
        owner = min(load, key=lambda rank: (load[rank], rank))
        load[owner] += item.nbytes
        owners[item.name] = owner
    return owners


def holders(ranks: Any, coordinate: Sequence[int], placements: Sequence[Placement]) -> Group:
    """The ranks of a mesh that hold the same part as the one at `coordinate`.

    `ranks` is the mesh's array of ranks, with a dimension for each placement.
    """
    place = tuple(
        slice(None) if placement[0] == "R" else at for at, placement in zip(coordinate, placements, strict=True)
    )
    return tuple(sorted(int(rank) for rank in ranks[place].reshape(-1)))


class StoreExchange:
    """How ranks show each other a short text: through torch's key-value store. No collective, so none can hang."""

    def __init__(self, rank: int, world_size: int, timeout_s: float = EXCHANGE_TIMEOUT_S) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "replicated=...: the ranks must show each other what they hold; call "
                "torch.distributed.init_process_group() first"
            )
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ConfigError(
                f"replicated=...: this is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed, and "
                f"rank={rank}, world_size={world_size} was asked for; give both the same"
            )
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._store = PrefixStore("lastgood/replicas", _get_default_store())
        # One after another in a process; ranks make as many.
        self._number = self._store.add(f"made/{rank}", 1)
        self._rounds = 0

    def gather(self, text: bytes) -> list[bytes]:
        """The texts of all ranks, in their order; each rank calls it equally often. Raises WaitTimeout."""
        if len(text) > _MAX_TEXT_BYTES:
            raise StateError(f"replicas: {len(text)} bytes of groups are too many to compare; use replicated='none'")
        self._rounds += 1
        keys = [f"{self._number}/{self._rounds}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], text.decode())
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self._timeout_s))
            return [self._store.get(key) for key in keys]
        except RuntimeError as error:  # torch's DistStoreError; it says which keys are not there
            raise WaitTimeout(
                f"waited {self._timeout_s:.0f} s for what {self._world_size} ranks hold alike: {error}"
            ) from error


class Division:
    """Leaves out of a rank's checkpoints what other ranks write. `declared` says what is held alike."""

    def __init__(self, declared: Declared, rank: int, world_size: int, exchange: StoreExchange) -> None:
        self._declared = declared
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._agreed: dict[tuple[Item, ...], dict[str, int]] = {}
        """For what this rank holds alike with others: the writers of those blocks that another rank writes."""

    def check_equal(self, flat: FlatState) -> None:
        """Compare the bytes of all that is said to be held alike. Called once by every rank, before training.

        Raises StateError, naming tensors, if ranks hold different bytes; WaitTimeout.
        """
        groups: dict[str, dict[str, Any]] = {}
        for number, item in self._items(flat).items():
            host = flat.blocks[number].cpu()
            checksum = _native.crc32c_at(host.data_ptr(), host.numel())
            groups.setdefault(json.dumps(item.group), {})[item.name] = checksum
        texts = self._exchange.gather(_digests(groups))
        different = self._different(texts, groups)
        if different:
            names = [name for key in different for name in groups[key]]
            raise StateError(
                f"the ranks {sorted({rank for key in different for rank in _ranks_of(key)})} do not hold alike what "
                f"replicated={self._declared!r} says they do, among {names[:5]} ({len(names)} in all); make them equal "
                "before training (DistributedDataParallel does), or use replicated='none'"
            )

    def apply(self, flat: FlatState) -> FlatState:
        """The state without the blocks that others write. Asks the other ranks once for each new set of blocks."""
        # Not by the layout: its blocks lie in the order of their addresses, which are each rank's own.
        found = self._items(flat)
        items = tuple(sorted(found.values(), key=lambda item: item.name))
        if items not in self._agreed:
            self._agreed[items] = self._agree(items)
        others = self._agreed[items]
        left_out = {number: others[item.name] for number, item in found.items() if item.name in others}
        return without_blocks(flat, left_out) if left_out else flat

    def _agree(self, items: Sequence[Item]) -> dict[str, int]:
        owners = assign(items)
        groups: dict[str, dict[str, Any]] = {}
        for item in items:
            groups.setdefault(json.dumps(item.group), {})[item.name] = [item.nbytes, owners[item.name]]
        try:
            texts = self._exchange.gather(_digests(groups))
        except WaitTimeout as error:
            _log.warning("replicas: %s; this rank writes all that it holds", error)
            return {}
        different = self._different(texts, groups)
        if different:
            _log.warning(
                "replicas: ranks %s hold different tensors, so each writes all of them", ", ".join(sorted(different))
            )
        return {
            item.name: owners[item.name]
            for item in items
            if owners[item.name] != self._rank and json.dumps(item.group) not in different
        }

    def _different(self, texts: Sequence[bytes], groups: Mapping[str, Any]) -> set[str]:
        """Groups whose members did not come to the same."""
        seen = [_digests_of(text, rank) for rank, text in enumerate(texts)]
        return {key for key in groups if len({seen[rank].get(key) for rank in _ranks_of(key)}) > 1}

    def _items(self, flat: FlatState) -> dict[int, Item]:
        """Blocks that only optimizer steps change and that are held alike, by number."""
        spread = iter(flat.sharded)
        groups: dict[int, set[Group]] = {}
        names: dict[int, list[str]] = {}
        for tensor in named_tensors(flat.layout):
            group = self._group(tensor, next(spread) if tensor.shard is not None else None)
            if 0 <= tensor.block < flat.layout.deferred_blocks:
                groups.setdefault(tensor.block, set()).add(group)
                names.setdefault(tensor.block, []).append(f"{tensor.name} {tensor.dtype} {tensor.shape}")
        return {
            block: Item("; ".join(sorted(names[block])), flat.layout.block_bytes[block], next(iter(found)))
            for block, found in groups.items()
            if len(found) == 1 and len(next(iter(found))) > 1
        }

    def _group(self, tensor: NamedTensor, spread: Any) -> Group:
        alone = (self._rank,)
        if spread is None:
            return tuple(range(self._world_size)) if self._declared == "ddp" else alone
        coordinate = spread.device_mesh.get_coordinate()
        if coordinate is None:
            return alone
        shard = describe_shard(spread, tensor.name)
        return holders(spread.device_mesh.mesh.numpy(), coordinate, shard.placements)


def without_blocks(flat: FlatState, left_out: Mapping[int, int]) -> FlatState:
    """A state whose tensors in some blocks are another rank's to write: `left_out` gives that rank for each block."""
    kept = [number for number in range(len(flat.blocks)) if number not in left_out]
    renumbered = {number: new for new, number in enumerate(kept)}

    def rewritten(leaf: Node) -> Node:
        tag = leaf[0]
        if tag == "H":
            return [tag, rewritten(leaf[1]), *leaf[2:]]
        if tag == "T" and leaf[1] in left_out:
            return ["R", left_out[leaf[1]], *leaf[3:]]
        return [tag, renumbered.get(leaf[1], -1), *leaf[2:]] if tag in "TA" else leaf

    layout = Layout(
        map_leaves(rewritten, flat.layout.tree),
        tuple(flat.layout.block_bytes[number] for number in kept),
        sum(number < flat.layout.deferred_blocks for number in kept),
        RANKS_VERSION,
    )
    return FlatState(
        layout,
        tuple(flat.blocks[number] for number in kept),
        tuple(flat.names[number] for number in kept),
        {renumbered[number]: views for number, views in flat.watched.items() if number in renumbered},
        frozenset(renumbered[number] for number in flat.weights if number in renumbered),
        flat.sharded,
    )


def _ranks_of(key: str) -> list[int]:
    """The ranks of a group; `key` is this rank's own text."""
    ranks: list[int] = parse_json(key, "a group of ranks", most_bytes=_MAX_TEXT_BYTES, error=StateError)
    return ranks


def _digests_of(text: bytes, rank: int) -> dict[str, str]:
    """What `_digests` of another rank made."""
    what = f"replicas: what rank {rank} holds"
    found = parse_json(text, what, most_bytes=_MAX_TEXT_BYTES, error=StateError)
    if not isinstance(found, dict) or not all(isinstance(digest, str) for digest in found.values()):
        raise StateError(f"{what}: no digests")
    return found


def _digests(groups: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A short text that is equal exactly for equal groups."""
    return json.dumps(
        {key: hashlib.sha256(json.dumps(sorted(value.items())).encode()).hexdigest() for key, value in groups.items()}
    ).encode()
