"""The layout of a flattened state: a JSON tree that says how bytes become the state again.

A node is a JSON list whose first item is a tag:

====  =======================================================================================================
tag   rest of the node
====  =======================================================================================================
n     None
b     true or false
i     an int
f     a float, as the 16 hex digits of its IEEE bits (so that NaN payloads and signed zeros survive)
c     a complex, as two such strings
s     a str
y Y   bytes or bytearray, as hex digits
l t   list or tuple: [node, ...]
S     torch.Size: [int, ...]
e E   set or frozenset: [node, ...]
d o   dict or OrderedDict: [[key node, value node], ...], in order
C     collections.Counter: as d
m     an object with state_dict/load_state_dict: node of its state_dict
D     torch.dtype: name
V     torch.device: text
T     tensor: block, byte offset in the block, dtype name, shape, stride (in elements)
A     numpy array (C order): block, byte offset, dtype description, shape
N     numpy scalar: dtype description, hex digits of its bytes
H     part of a tensor that is spread over ranks: node (T or R) of the local part; shape and strides of the whole; shape
      of the mesh, names of its dimensions or null, a placement for each ([S, dim], [Z, dim, split factor] for torch's
      _StridedShard, [R]); for each dimension of the tensor the [start, length] runs of global indices that the local
      part covers, in order
R     tensor that another rank wrote, under the same name: that rank, dtype name, shape, strides
====  =======================================================================================================

A *block* is one contiguous range of bytes. Tensors that share memory point into one block. Blocks lie one after another
in the *stream*, each at a multiple of 64 bytes; the first `deferred_blocks` are those that only an optimizer step
changes.

A layout with H or R in its tree has version 2, any other version 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lastgood.bounds import memory_for
from lastgood.errors import CorruptCheckpoint, MismatchError, StateError
from lastgood.state.layout_rules import MAX_DEPTH, MAX_NUMBER, check_tree_of_layout
from lastgood.text import parse_json
from lastgood.units import format_bytes

__all__ = [
    "BLOCK_ALIGNMENT",
    "LAYOUT_VERSION",
    "RANKS_VERSION",
    "Layout",
    "Node",
    "check_cost",
    "map_leaves",
    "tensor_nodes",
]

LAYOUT_VERSION = 1
RANKS_VERSION = 2
"""Of a layout that is a part of something larger: it holds parts of tensors, or lacks what another rank wrote."""
BLOCK_ALIGNMENT = 64
MAX_LAYOUT_BYTES = 1 << 30
"""A layout may not be larger than this."""
_MAX_BRACKETS = 3 * MAX_DEPTH + 20
"""Inside one another: a mapping has three, and what it holds has some of its own."""
_MAX_DIGITS = 4300
"""Of a plain value: Python itself writes no longer number."""

Node = list[Any]


@dataclass(frozen=True)
class Layout:
    """How a stream of bytes becomes a state again."""

    tree: Node
    block_bytes: tuple[int, ...]
    deferred_blocks: int
    version: int = LAYOUT_VERSION

    def block_offsets(self) -> list[int]:
        """Offset of every block in the stream, in bytes."""
        offsets, position = [], 0
        for size in self.block_bytes:
            offsets.append(position)
            position += _aligned(size)
        return offsets

    @property
    def stream_bytes(self) -> int:
        """Length of the stream that holds all blocks, padding included."""
        return sum(_aligned(size) for size in self.block_bytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors, aliases counted once, without padding."""
        return sum(self.block_bytes)

    def tensor_count(self) -> int:
        """Number of tensors and arrays in the tree, aliases counted each."""
        return sum(1 for _ in tensor_nodes(self.tree))

    def to_json(self) -> bytes:
        """The layout and all plain values as one JSON document in UTF-8.

        Raises StateError for one that is too large.
        """
        document = {
            "layout_version": self.version,
            "deferred_blocks": self.deferred_blocks,
            "block_bytes": list(self.block_bytes),
            "tree": self.tree,
        }
        try:
            text = json.dumps(document, separators=(",", ":")).encode()
            if len(text) > MAX_LAYOUT_BYTES:
                raise ValueError(f"its layout has {len(text)} bytes, over the limit of {MAX_LAYOUT_BYTES}")
            check_cost(text, self.stream_bytes + len(text))
        except ValueError as error:  # also from json, for a number of very many digits
            raise StateError(f"the state cannot be stored: {error}") from error
        return text

    @classmethod
    def from_json(cls, text: bytes, where: str, held_bytes: int = 0) -> Layout:
        """Read what `to_json` wrote; `where` names the file in errors, which has `held_bytes` in all.

        What comes back holds the rules of `lastgood.state.layout_rules`, so that its readers need not check them again.
        Raises MismatchError for another version, CorruptCheckpoint for anything that is not a layout.
        """
        try:
            check_cost(text, max(held_bytes, len(text)))
        except ValueError as error:
            raise CorruptCheckpoint(f"{where}: the layout cannot be read: {error}") from error
        document = parse_json(
            text,
            f"{where}: the layout",
            most_bytes=MAX_LAYOUT_BYTES,
            most_depth=_MAX_BRACKETS,
            most_digits=_MAX_DIGITS,
            half_pairs=True,
        )
        try:
            version = document["layout_version"]
            if version not in (LAYOUT_VERSION, RANKS_VERSION):
                raise MismatchError(
                    f"{where}: layout version {version}; this Lastgood reads version {LAYOUT_VERSION} and "
                    f"{RANKS_VERSION}"
                )
            sizes = tuple(document["block_bytes"])
            deferred = document["deferred_blocks"]
            tree = document["tree"]
        except (KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"{where}: the layout cannot be read: {error!r}") from error
        if not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) > MAX_NUMBER:
            raise CorruptCheckpoint(f"{where}: the layout holds block sizes that are not positive integers")
        if type(version) is not int or type(deferred) is not int or not 0 <= deferred <= len(sizes):
            raise CorruptCheckpoint(f"{where}: of {len(sizes)} blocks, {deferred!r:.40} are deferred")
        try:
            check_tree_of_layout(tree, sizes, of_ranks=version == RANKS_VERSION)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{where}: the layout cannot be read: {error}") from error
        return cls(tree, sizes, deferred, version)

    def digest(self) -> bytes:
        """SHA-256 over the structure: keys, types, dtypes, shapes and blocks, but not over plain values.

        Two saves of one training have one digest as long as nothing changes shape or appears.
        """
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        hasher = hashlib.sha256(f"layout {self.version} {self.deferred_blocks} {self.block_bytes}".encode())
        _hash_structure(self.tree, hasher)
        return hasher.digest()


def check_cost(text: bytes, held_bytes: int) -> None:
    """Raise ValueError if a layout's values take far more memory than the file that holds them has bytes.

    An upper bound of what Python makes of a text, and of the state that is built of it: a node of six bytes becomes a
    list of eighty, and a container once more. Whoever wrote it may have written white space anywhere, and any letter of
    a tag as an escape. Texts with one character beyond 16 bits take four bytes for each.
    """
    nodes, commas, quotes = text.count(b"["), text.count(b","), text.count(b'"')
    containers = sum(text.count(b'"%c"' % tag) for tag in b"lteEdoC") + text.count(b'"\\u00')
    lists = 72 * nodes + 100 * containers + 400 * text.count(b"{")
    cost = len(text) + 3 * _wide_bytes(text) + lists + 40 * commas + 28 * quotes
    if cost > memory_for(held_bytes):
        raise ValueError(
            f"plain values that take {format_bytes(cost)} of memory in a checkpoint of {format_bytes(held_bytes)}; "
            "long lists of numbers belong into tensors or numpy arrays"
        )


def _wide_bytes(text: bytes) -> int:
    """Bytes of what may become texts of more than one byte for each character."""
    if not text.isascii():
        return len(text)
    if b"\\u" not in text:
        return 0
    pieces = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    return sum(len(piece) for piece in pieces if b"\\u" in piece)


def _aligned(size: int) -> int:
    return -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


_SEQUENCES = frozenset("lteE")
_MAPPINGS = frozenset("doC")
_VALUES = frozenset("nbifcsyYN")


def tensor_nodes(node: Node) -> Iterator[Node]:
    """The nodes of all tensors and arrays in a tree, in order: T, A or R; for a part of a tensor the local one."""
    tag = node[0]
    if tag in "TAR":
        yield node
    elif tag in "mH":
        yield from tensor_nodes(node[1])
    elif tag in _SEQUENCES:
        for child in node[1]:
            yield from tensor_nodes(child)
    elif tag in _MAPPINGS:
        for _, value in node[1]:
            yield from tensor_nodes(value)


def map_leaves(change: Callable[[Node], Node], node: Node) -> Node:
    """A tree in which each node that is no container of others is replaced by what `change` makes of it, in order."""
    tag = node[0]
    if tag == "m":
        return [tag, map_leaves(change, node[1])]
    if tag in _SEQUENCES:
        return [tag, [map_leaves(change, child) for child in node[1]]]
    if tag in _MAPPINGS:
        return [tag, [[key, map_leaves(change, value)] for key, value in node[1]]]
    return change(node)


def _hash_structure(node: Node, hasher: Any) -> None:
    tag: str = node[0]
    hasher.update(tag.encode())
    if tag in _VALUES:
        return
    if tag == "m":
        _hash_structure(node[1], hasher)
    elif tag in _SEQUENCES:
        hasher.update(f"{len(node[1])};".encode())
        for child in node[1]:
            _hash_structure(child, hasher)
    elif tag in _MAPPINGS:
        hasher.update(f"{len(node[1])};".encode())
        for key, value in node[1]:
            hasher.update(_compact(key))
            _hash_structure(value, hasher)
    else:
        hasher.update(_compact(node))


def _compact(value: Sequence[Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
