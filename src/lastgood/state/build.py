"""Build what `flatten` described: the tree of a layout over blocks of bytes, to the bit, without copying."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint
from lastgood.state.layout import Layout, Node
from lastgood.state.layout_rules import dtype_named, numpy_dtype
from lastgood.state.shards import Shard

__all__ = ["Leaf", "plain_value", "stateful_paths", "tensor_over", "unflatten"]

Leaf = Callable[[Node], Any]
"""Gives the tensor for a node of tag T, H or R, or None: then it is built over the blocks."""


def unflatten(layout: Layout, blocks: Sequence[torch.Tensor], where: str, leaf: Leaf | None = None) -> dict[str, Any]:
    """Build the state's tree of plain containers, values and tensors over `blocks`, without copying.

    `blocks` are uint8 tensors on the CPU. An object with state_dict/load_state_dict comes back as what its state_dict
    returned. `where` names the source in errors. `leaf` is asked for every tensor, in the order of the tree; without
    it a tensor that is spread over ranks comes back as its local part, a plain tensor.
    """
    builder = _Builder(blocks, leaf)
    try:
        tree = builder.node(layout.tree)
    except _MALFORMED as error:
        raise CorruptCheckpoint(f"{where}: the layout does not fit its data: {error!r}") from error
    if not isinstance(tree, dict):
        raise CorruptCheckpoint(f"{where}: the layout's root is not a mapping")
    return tree


def plain_value(node: Node) -> Any:
    """The value of a node that holds no tensors."""
    return _Builder(()).node(node)


def stateful_paths(layout: Layout) -> frozenset[tuple[Any, ...]]:
    """Keys and numbers that lead to each entry of a layout's tree that is what an object's state_dict returned."""
    found: set[tuple[Any, ...]] = set()
    build = _Builder(())

    def walk(node: Node, path: tuple[Any, ...]) -> None:
        tag = node[0]
        if tag == "m":
            found.add(path)
            walk(node[1], path)
        elif tag in ("l", "t"):
            for number, child in enumerate(node[1]):
                walk(child, (*path, number))
        elif tag in ("d", "o", "C"):
            for key, child in node[1]:
                walk(child, (*path, build.node(key)))

    try:
        walk(layout.tree, ())
    except _MALFORMED as error:
        raise CorruptCheckpoint(f"the layout cannot be read: {error!r}") from error
    return frozenset(found)


_MALFORMED = (IndexError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError)
"""What building a tree raises for JSON that is no layout."""


class _Builder:
    def __init__(self, blocks: Sequence[torch.Tensor], leaf: Leaf | None = None) -> None:
        self._blocks = blocks
        self._leaf = leaf
        # By tag: what makes a value of that which follows the tag.
        self._of_tag: dict[str, Callable[..., Any]] = {
            "n": lambda: None,
            "b": _same,
            "i": _same,
            "s": _same,
            "f": _float,
            "c": lambda real, imaginary: complex(_float(real), _float(imaginary)),
            "y": bytes.fromhex,
            "Y": bytearray.fromhex,
            "l": lambda items: list(map(self.node, items)),
            "t": lambda items: tuple(map(self.node, items)),
            "S": torch.Size,
            "e": lambda items: set(map(self.node, items)),
            "E": lambda items: frozenset(map(self.node, items)),
            "d": self._dict,
            "o": lambda pairs: OrderedDict(self._dict(pairs)),
            "C": lambda pairs: Counter(self._dict(pairs)),
            "m": self.node,
            "D": _dtype,
            "V": torch.device,
            "T": self._tensor,
            "A": self._array,
            "N": _numpy_scalar,
            "H": self._shard,
            "R": self._elsewhere,
        }

    def node(self, node: Node) -> Any:
        return self._of_tag[node[0]](*node[1:])

    def _dict(self, pairs: Iterable[tuple[Node, Node]]) -> dict[Any, Any]:
        return {self.node(key): self.node(value) for key, value in pairs}

    def _tensor(self, *place: Any) -> Any:
        given = None if self._leaf is None else self._leaf(["T", *place])
        return tensor_over(self._blocks, *place) if given is None else given

    def _shard(self, local: Node, *whole: Any) -> Any:
        given = None if self._leaf is None else self._leaf(["H", local, *whole])
        if given is not None:
            return given
        Shard.from_node(whole, local[-2])
        if local[0] == "R":
            return self._elsewhere(*local[1:])
        return tensor_over(self._blocks, *local[1:])

    def _elsewhere(self, *place: Any) -> Any:
        given = None if self._leaf is None else self._leaf(["R", *place])
        if given is None:
            raise ValueError(f"a tensor is in the directory of rank {place[0]}")
        return given

    def _array(self, block: int, offset: int, descr: str, shape: list[int]) -> np.ndarray:
        kind = numpy_dtype(descr)
        nbytes = math.prod(shape) * kind.itemsize
        if not nbytes:
            return np.empty(shape, dtype=kind)
        content = _block_of(self._blocks, block).numpy()[offset : offset + nbytes]
        return content.view(kind).reshape(shape).copy()


def _same(value: Any) -> Any:
    return value


def _float(bits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return dtype


def _numpy_scalar(descr: str, digits: str) -> Any:
    kind = numpy_dtype(descr)
    return np.frombuffer(bytes.fromhex(digits), dtype=kind)[0] if kind.itemsize else np.empty((), dtype=kind)[()]


def tensor_over(
    blocks: Sequence[torch.Tensor], block: int, offset: int, dtype: str, shape: list[int], stride: list[int]
) -> torch.Tensor:
    """The tensor that a T node describes, over its block. Raises ValueError if it does not lie inside."""
    kind = dtype_named(dtype)
    if 0 in shape:
        return torch.empty_strided(shape, stride, dtype=kind, device="cpu")
    source = _block_of(blocks, block)
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    end = offset + (reach + 1) * kind.itemsize
    if offset < 0 or min(stride, default=0) < 0 or end > source.numel() or offset % kind.itemsize:
        raise ValueError(f"a tensor reaches from byte {offset} to {end} of a block of {source.numel()}")
    tensor = torch.empty(0, dtype=kind, device=source.device)
    first = source.data_ptr() - source.untyped_storage().data_ptr() + offset
    tensor.set_(source.untyped_storage(), first // kind.itemsize, shape, stride)
    return tensor


def _block_of(blocks: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    if not 0 <= number < len(blocks):
        raise ValueError(f"block {number} of {len(blocks)}")
    return blocks[number]
