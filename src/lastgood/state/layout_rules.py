"""What a layout must be before anything relies on it: one walk over the tree, for all who read layouts from outside.

Whoever wrote the file may have written any JSON. After this walk every node has the shape that its tag asks for, every
tensor lies inside its block, every name of a dtype is one, and the tree is no deeper than code may recurse.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.bounds import check_hashes
from lastgood.state.shards import MAX_BOXES, Shard

__all__ = [
    "MAX_DEPTH",
    "MAX_DIMENSIONS",
    "MAX_NUMBER",
    "check_tree_of_layout",
    "dtype_named",
    "numpy_dtype",
]

MAX_DEPTH = 100
"""Of containers inside each other."""
MAX_DIMENSIONS = 64
"""torch copies no tensor that has more."""
MAX_NUMBER = 1 << 62
"""No size, stride or length in bytes is larger; sums of two still fit into 64 bits."""
MAX_RANKS = 1 << 20
_FLOAT_DIGITS = 16
_LONGEST_NAME = 64
_BYTES_OF_A_BOX = 256
"""Parts of so many bytes and more for each of their boxes may have any number of boxes."""
_KEYS = frozenset("nbifsyt")
_HASHABLE = frozenset("nbifcsytESDVNTHR")
"""Tags of what may be in a set."""


def check_tree_of_layout(tree: Any, block_bytes: Sequence[int], *, of_ranks: bool) -> None:
    """Raise ValueError, naming the path, unless `tree` is a mapping of names to nodes over blocks of these lengths.

    `of_ranks`: the layout may hold parts of tensors, and tensors that other ranks wrote.
    """
    walk = _Walk(block_bytes, of_ranks)
    walk.root(tree)


@cache
def _dtypes() -> dict[str, torch.dtype]:
    """By the name that torch itself prints. Quantised ones have no plain bytes."""
    return {name: value for name, value in _all_dtypes().items() if not name.startswith("q")}


@cache
def _all_dtypes() -> dict[str, torch.dtype]:
    import torch

    known = [value for value in list(vars(torch).values()) if isinstance(value, torch.dtype)]
    return {str(value).removeprefix("torch."): value for value in known}


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of tensors that a layout calls `name`. Raises ValueError."""
    found = _dtypes().get(name) if type(name) is str else None
    if found is None:
        raise ValueError(f"{name!r:.80} is no dtype that this torch has tensors of")
    return found


@cache
def _numpy_dtype(description: str) -> np.dtype[Any] | None:
    try:
        found = np.dtype(description)
    except (TypeError, ValueError, SyntaxError, OverflowError, MemoryError):
        return None
    plain = not found.hasobject and found.fields is None and found.subdtype is None
    return found if plain and found.str == description else None


def numpy_dtype(description: Any) -> np.dtype[Any]:
    """The dtype of arrays that a layout describes so. Raises ValueError for what is no plain one."""
    short = type(description) is str and len(description) <= _LONGEST_NAME
    found = _numpy_dtype(description) if short else None
    if found is None:
        raise ValueError(f"{description!r:.80} describes no plain numpy values")
    return found


@cache
def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except (RuntimeError, ValueError):
        return False
    return True


class _Walk:
    """Methods check what follows a tag; they return nothing, or raise ValueError."""

    def __init__(self, block_bytes: Sequence[int], of_ranks: bool) -> None:
        self._blocks = block_bytes
        self._of_ranks = of_ranks
        self._boxes = 0
        """Of all parts, beyond one for each."""
        self._path: list[str] = []
        self._depth = -1  # the root is no container inside another one
        self._frozen: dict[int, frozenset[Any]] = {}
        """What frozensets hold, by the node's identity: a set that holds them asks again."""
        # By tag: how many items a node has, and what checks them.
        self._rules: dict[str, tuple[int, Callable[[list[Any]], None]]] = {
            "n": (1, lambda _: None),
            "b": (2, _of_kind(bool, "bool")),
            "i": (2, _of_kind(int, "integer")),
            "s": (2, _of_kind(str, "text")),
            "f": (2, _float),
            "c": (3, _float),
            "y": (2, _bytes),
            "Y": (2, _bytes),
            "l": (2, self._sequence),
            "t": (2, self._sequence),
            "e": (2, self._set),
            "E": (2, self._set),
            "S": (2, _size),
            "d": (2, self._mapping),
            "o": (2, self._mapping),
            "C": (2, self._mapping),
            "m": (2, self._stateful),
            "D": (2, _dtype_name),
            "V": (2, _device),
            "N": (3, _numpy_scalar),
            "T": (6, self._tensor),
            "A": (5, self._array),
            "H": (8, self._part),
            "R": (5, self._elsewhere),
        }

    def root(self, tree: Any) -> None:
        try:
            if type(tree) is not list or len(tree) != 2 or tree[0] != "d" or type(tree[1]) is not list:
                raise ValueError("the root of the tree is no mapping")
            if not all(
                type(pair) is list and pair and type(pair[0]) is list and pair[0][:1] == ["s"] for pair in tree[1]
            ):
                raise ValueError("the entries of a state have names")
            self._node(tree)
        except ValueError as error:
            raise ValueError(f"{'.'.join(self._path) or 'the tree'}: {error}") from error

    def _node(self, node: Any) -> None:
        if type(node) is not list or not node or type(node[0]) is not str or node[0] not in self._rules:
            raise ValueError(f"{node!r:.80} is no node")
        length, check = self._rules[node[0]]
        if len(node) != length:
            raise ValueError(f"a node {node[0]!r} of {len(node)} items instead of {length}")
        check(node)

    def _enter(self) -> None:
        if self._depth >= MAX_DEPTH:
            raise ValueError(f"containers lie more than {MAX_DEPTH} deep in each other")
        self._depth += 1

    def _items(self, node: list[Any]) -> list[Any]:
        items = node[1]
        if type(items) is not list:
            raise ValueError(f"a container that holds {items!r:.80} instead of a list")
        return items

    def _sequence(self, node: list[Any]) -> None:
        self._enter()
        for number, item in enumerate(self._items(node)):
            self._path.append(str(number))
            self._node(item)
            self._path.pop()
        self._depth -= 1

    def _set(self, node: list[Any]) -> None:
        self._sequence(node)
        items = [self._key(item, _HASHABLE) for item in node[1]]
        check_hashes(items)
        if node[0] == "E":
            self._frozen[id(node)] = frozenset(items)

    def _mapping(self, node: list[Any]) -> None:
        self._enter()
        keys: list[Any] = []
        pairs = self._items(node)
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise ValueError(f"{pair!r:.80} is no pair of a key and a value")
            key, value = pair
            if type(key) is list and len(key) == 2 and key[0] == "s" and type(key[1]) is str:
                keys.append(key[1])
                self._path.append(key[1][:_LONGEST_NAME])
            else:
                self._node(key)
                keys.append(self._key(key, _KEYS))
                self._path.append(f"{key!r:.60}")
            self._node(value)
            self._path.pop()
        self._depth -= 1
        check_hashes(keys)
        if len(set(keys)) != len(pairs):
            raise ValueError("a mapping has a key twice")

    def _key(self, node: list[Any], tags: frozenset[str]) -> Any:
        """A value of the same hash, equal for equal keys. Of a checked node; raises ValueError for other tags."""
        tag = node[0]
        if tag not in tags:
            raise ValueError(f"a node {tag!r} is no key")
        if tag == "t":
            return tuple(self._key(item, tags) for item in node[1])
        if tag == "E":
            return self._frozen[id(node)]
        if tag == "f":
            return _float_of(node[1])
        if tag == "c":
            return complex(*(struct.unpack(">d", bytes.fromhex(digits))[0] for digits in node[1:]))
        if tag == "y":
            return bytes.fromhex(node[1])
        if tag == "S":
            return tuple(node[1])
        if tag == "N":
            dtype = numpy_dtype(node[1])
            return np.frombuffer(bytes.fromhex(node[2]), dtype)[0] if dtype.itemsize else ""
        if tag in "THR":  # each is one of its own
            return object()
        return node[1] if tag != "n" else None

    def _stateful(self, node: list[Any]) -> None:
        self._enter()
        self._node(node[1])
        self._depth -= 1

    def _tensor(self, node: list[Any]) -> None:
        _, block, offset, name, shape, stride = node
        width = dtype_named(name).itemsize
        self._place(block, offset, width, *_reach(shape, stride, width), aligned=True)

    def _array(self, node: list[Any]) -> None:
        _, block, offset, name, shape = node
        width = numpy_dtype(name).itemsize
        if type(shape) is not list:
            raise ValueError(f"a shape {shape!r:.80}")
        elements, _ = _reach(shape, [0] * len(shape), width)
        # In C order; text of no characters has elements of no bytes.
        self._place(block, offset, width, elements if width else 0, elements - 1, aligned=False)

    def _place(self, block: Any, offset: Any, width: int, elements: int, reach: int, *, aligned: bool) -> None:
        """A tensor of `elements`, the last of which begins `reach` elements after the first, lies in its block."""
        if type(block) is not int or type(offset) is not int:
            raise ValueError(f"block {block!r:.40}, byte {offset!r:.40} is no place")
        if not elements:
            if block != -1:
                raise ValueError(f"no elements in block {block}")
            return
        size = self._blocks[block] if 0 <= block < len(self._blocks) else 0
        end = offset + (reach + 1) * width
        if offset < 0 or end > size:
            raise ValueError(f"reaches from byte {offset} to {end} of block {block} of {size} bytes")
        if aligned and offset % width:
            raise ValueError(f"elements of {width} bytes at byte {offset}")

    def _part(self, node: list[Any]) -> None:
        local = node[1]
        if not self._of_ranks or type(local) is not list or not local or local[0] not in ("T", "R"):
            raise ValueError("a part of a tensor in a layout that can hold none")
        self._node(local)
        try:
            shard = Shard.from_node(node[2:], local[-2])
        except TypeError as error:
            raise ValueError(f"its place in the whole cannot be read: {error}") from error
        # Each box takes memory and time when parts are put together.
        self._boxes += max(0, math.prod(map(len, shard.runs)) - 1)
        if self._boxes > MAX_BOXES + sum(self._blocks) // _BYTES_OF_A_BOX:
            raise ValueError(f"parts are made of {self._boxes} boxes, far too many for what they hold")

    def _elsewhere(self, node: list[Any]) -> None:
        _, rank, name, shape, stride = node
        if not self._of_ranks:
            raise ValueError("a tensor of another rank in a layout that can hold none")
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            raise ValueError(f"rank {rank!r:.40} is impossible")
        width = dtype_named(name).itemsize
        _, reach = _reach(shape, stride, width)
        if (reach + 1) * width > MAX_NUMBER:
            raise ValueError(f"strides {stride} for {shape}")


def _of_kind(kind: type, name: str) -> Callable[[list[Any]], None]:
    def check(node: list[Any]) -> None:
        if type(node[1]) is not kind:
            raise ValueError(f"{node[1]!r:.80} is no {name}")

    return check


def _digits(text: Any, count: int | None) -> None:
    """Hexadecimal digits, two for each of `count` bytes."""
    if type(text) is not str or len(text) % 2 or (count is not None and len(text) != 2 * count):
        raise ValueError(f"{text!r:.80} is not the digits of {'some' if count is None else count} bytes")
    if len(bytes.fromhex(text)) * 2 != len(text):  # it passes over white space
        raise ValueError(f"{text!r:.80} are no hexadecimal digits")


def _float(node: list[Any]) -> None:
    for text in node[1:]:
        _digits(text, _FLOAT_DIGITS // 2)


def _bytes(node: list[Any]) -> None:
    _digits(node[1], None)


def _size(node: list[Any]) -> None:
    if type(node[1]) is not list or not all(type(one) is int and abs(one) <= MAX_NUMBER for one in node[1]):
        raise ValueError(f"{node[1]!r:.80} are no sizes")


def _dtype_name(node: list[Any]) -> None:
    if type(node[1]) is not str or node[1] not in _all_dtypes():
        raise ValueError(f"{node[1]!r:.80} is no dtype of this torch")


def _device(node: list[Any]) -> None:
    if type(node[1]) is not str or len(node[1]) > _LONGEST_NAME or not _is_device(node[1]):
        raise ValueError(f"{node[1]!r:.80} is no device")


def _numpy_scalar(node: list[Any]) -> None:
    width = numpy_dtype(node[1]).itemsize
    _digits(node[2], width or None)  # of text of no characters, numpy gives the bytes of one


def _float_of(digits: str) -> Any:
    """Each NaN is a key of its own, unless it is one object; of others Python says what is equal."""
    value = float(np.array(int(digits, 16), dtype=np.uint64).view(np.float64))
    return object() if math.isnan(value) else value


def _reach(shape: Any, stride: Any, width: int) -> tuple[int, int]:
    """Elements of a tensor, and how many of them its last one begins after its first; sizes and strides are checked."""
    if type(shape) is not list or type(stride) is not list or len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"sizes {shape!r:.80} with strides {stride!r:.80}")
    elements, largest, reach = 1, width or 1, 0
    for size, step in zip(shape, stride, strict=True):
        if type(size) is not int or type(step) is not int or not 0 <= size <= MAX_NUMBER or not 0 <= step <= MAX_NUMBER:
            raise ValueError(f"sizes {shape!r:.80} with strides {stride!r:.80}")
        elements *= size
        largest *= size or 1
        reach += (size - 1) * step
    if largest > MAX_NUMBER:
        raise ValueError(f"a tensor of sizes {shape!r:.80}")
    return elements, reach
