"""Checkpoints of a slot directory as what they hold: layouts, trees, tensors by name. Needs no code of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lastgood._lazy import torch
from lastgood.bounds import memory_for
from lastgood.checkpointers.copies.chunks import host_ranges
from lastgood.errors import CorruptCheckpoint, MismatchError, StorageError
from lastgood.state import Layout, unflatten
from lastgood.state.build import plain_value, tensor_over
from lastgood.state.layout import MAX_LAYOUT_BYTES, Node, tensor_nodes
from lastgood.state.layout_rules import dtype_named, numpy_dtype
from lastgood.state.shards import Shard
from lastgood.storage import SlotInfo, SlotStatus, SlotView
from lastgood.storage.reader import READ_TIMEOUT_S

__all__ = [
    "NamedTensor",
    "Sharing",
    "check_dense",
    "exact_dtype",
    "find_sharing",
    "layout_in",
    "look_at_slots",
    "named_tensors",
    "named_values",
    "read_blocks",
    "read_layout",
    "read_meta",
    "read_timeout_s",
    "read_tree",
    "short_value",
    "typed_view",
]

_RESERVED = "__metadata__"
"""safetensors keeps this name for itself."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor or numpy array of a checkpoint, where its bytes lie, and how they are to be read."""

    name: str
    part: str
    """The entry of the state that it belongs to: "model", "optimizer"."""
    block: int
    """-1 if it has no elements."""
    offset: int
    """In bytes, from the start of the block."""
    dtype: str
    """Name of a torch dtype; of an array, the description that numpy writes (``<i4``)."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; not negative."""
    itemsize: int
    is_array: bool = False
    shard: Shard | None = None
    """Of a tensor that is spread over ranks: its place in the whole. Shape and strides above are the local part's."""
    owner: int | None = None
    """The rank that wrote it, if that is another one; then there are no bytes of it here."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, one after another; 0 if another rank wrote them."""
        return math.prod(self.shape) * self.itemsize if self.owner is None else 0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the whole tensor, if this is a part of one."""
        return self.shape if self.shard is None else self.shard.shape

    @property
    def end(self) -> int:
        """Where in the block its last byte ends."""
        return self.offset + (self.extent if self.owner is None else 0)

    @property
    def extent(self) -> int:
        """Bytes from its first to the end of its last element, wherever they lie."""
        if 0 in self.shape:
            return 0
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (reach + 1) * self.itemsize

    def over(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor itself, in the block that it lies in."""
        return tensor_over(blocks, self.block, self.offset, self.dtype, list(self.shape), list(self.stride))

    @property
    def place(self) -> tuple[Any, ...]:
        """Two names with one place are one tensor."""
        return (self.block, self.offset, self.dtype, self.shape, self.stride, self.is_array)


@dataclass(frozen=True)
class Sharing:
    """What memory a tensor has for itself."""

    own_bytes: int
    """Bytes of the block that it spans and that no tensor sorted before it does."""
    shares_with: str | None = None
    """Another tensor in the same memory."""


# -- looking -----------------------------------------------------------------------------------------------------------


def look_at_slots(view: SlotView) -> tuple[list[SlotStatus], list[str]]:
    """`SlotView.statuses` of a directory in any condition, and what is wrong with it as a whole, in words.

    A slot file that cannot be read is torn, with the reason as its detail. Raises StorageError only if the directory
    itself cannot be read.
    """
    troubles = []
    for _ in range(2):  # a training that goes on may remove a slot file between two looks
        try:
            return view.statuses(), []
        except (MismatchError, StorageError) as error:
            troubles = [str(error)]
    return view.each_status(), troubles


# -- reading -----------------------------------------------------------------------------------------------------------


def read_timeout_s(nbytes: int) -> float:
    """How long reading may take: the usual limit, and beyond it time for a disk of 10 MB/s."""
    return READ_TIMEOUT_S + nbytes / 1e7


def read_layout(view: SlotView, info: SlotInfo) -> Layout:
    """The layout of a committed checkpoint, checked against its commit record.

    Raises CorruptCheckpoint (also if the slot was overwritten meanwhile), MismatchError for another version of the
    layout, StorageError, WaitTimeout.
    """
    return layout_in(read_meta(view, info), info)


def read_meta(view: SlotView, info: SlotInfo) -> bytes:
    """The meta data of a committed checkpoint. Raises as `read_layout`."""
    if info.meta_bytes > MAX_LAYOUT_BYTES:
        raise CorruptCheckpoint(
            f"{info.path}: step {info.step}: a layout of {info.meta_bytes} bytes is over the limit of "
            f"{MAX_LAYOUT_BYTES}"
        )
    return view.read_meta(info, read_timeout_s(info.meta_bytes))


def layout_in(meta: bytes, info: SlotInfo) -> Layout:
    """The layout that a checkpoint's meta data are, checked against its commit record. Raises as `read_layout`."""
    where = f"{info.path}: step {info.step}"
    layout = Layout.from_json(meta, where, info.stream_bytes)
    if layout.digest() != info.layout_digest or layout.stream_bytes != info.meta_offset:
        raise CorruptCheckpoint(f"{where}: the layout does not match the commit record")
    others = {node[1] for node in tensor_nodes(layout.tree) if node[0] == "R"}
    wrong = sorted(rank for rank in others if rank >= info.record.world_size or rank == info.record.rank)
    if wrong:
        raise CorruptCheckpoint(
            f"{where}: the layout of rank {info.record.rank} of {info.record.world_size} leaves tensors to rank "
            f"{wrong[0]}"
        )
    return layout


def read_tree(view: SlotView, info: SlotInfo, threads: int) -> dict[str, Any]:
    """Read and check one committed checkpoint into fresh host memory: plain containers, values and CPU tensors.

    Raises as `read_layout` does.
    """
    layout = read_layout(view, info)
    with view.hold(info):
        blocks = [block for _, block in read_blocks(view, info, layout, threads, layout.stream_bytes)]
    return unflatten(layout, blocks, f"{info.path}: step {info.step}")


def read_blocks(
    view: SlotView, info: SlotInfo, layout: Layout, threads: int, window_bytes: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read and check a checkpoint's blocks in their order: (number, uint8 tensor of block_bytes[number]).

    About `window_bytes` (or one block, if that is larger) are read at once. Between two reads a slot may be reused, if
    the caller has no `hold` on it; then CorruptCheckpoint is raised, and no block of another checkpoint ever comes.
    """
    offsets = layout.block_offsets()
    first = 0
    while first < len(offsets):
        last = first + 1
        while last < len(offsets) and offsets[last] + layout.block_bytes[last] - offsets[first] <= window_bytes:
            last += 1
        sizes = layout.block_bytes[first:last]
        blocks = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        ranges = host_ranges(blocks, sizes, writes=False)
        view.read_into(info, ranges, threads, offset=offsets[first], timeout_s=read_timeout_s(sum(sizes)))
        yield from zip(range(first, last), blocks, strict=True)
        del blocks  # before the next ones are made
        first = last


# -- names -------------------------------------------------------------------------------------------------------------


def named_tensors(layout: Layout) -> list[NamedTensor]:
    """Every tensor and numpy array of a layout with a name of its own, in the order of the tree.

    A name is the path to the tensor, joined by dots: texts as they are ("model.layers.0.weight"), numbers of lists,
    tuples and int keys in decimal ("optimizer.state.3.exp_avg"), other keys as Python writes them. What cannot be
    printed is escaped as Python does in a text. If two paths would give one name, the first in the tree's order has
    it, and the others get "#2", "#3" and so on after it, leaving out what is another tensor's path. So names depend
    on the structure alone, and all checkpoints of one training have the same.
    """
    found = [(path, node) for path, node in _leaves(layout.tree) if node[0] in "TAHR"]
    plain = {_join(path) for path, _ in found}
    taken = {_RESERVED}
    numbers: dict[str, int] = {}  # so that as many paths of one text take no more time each
    tensors = []
    for path, node in found:
        wanted = name = _join(path)
        number = numbers.get(wanted, 2)
        while name in taken or (name in plain and name != wanted):
            name = f"{wanted}#{number}"
            number += 1
        numbers[wanted] = number
        taken.add(name)
        tensors.append(_describe(name, _join(path[:1]), node))
    return tensors


def check_dense(tensor: NamedTensor, held_bytes: int, where: str) -> None:
    """Refuse to write the elements of a tensor out one by one if they take far more than all that was stored.

    Views may repeat memory (`expand`): a file of some bytes can describe any number of elements.
    Raises CorruptCheckpoint.
    """
    nbytes = math.prod(tensor.whole_shape) * tensor.itemsize
    if nbytes > memory_for(held_bytes):
        raise CorruptCheckpoint(
            f"{where}: {tensor.name} has elements of {nbytes} bytes in a checkpoint of {held_bytes}; only a restore "
            "into the memory that repeats them, as it was, and an export to pt can keep it"
        )


def named_values(layout: Layout) -> list[tuple[str, str]]:
    """Every plain value: its path, as in `named_tensors` but not made unique, and a short text.

    An empty container is one value, and so is a list, tuple or set of nothing but plain values.
    """
    leaves = _leaves(layout.tree, whole=_is_plain)
    return [(_join(path), short_value(node)) for path, node in leaves if node[0] not in "TAHR"]


def find_sharing(tensors: Sequence[NamedTensor]) -> list[Sharing]:
    """For each tensor, which other one lies in the same memory, and how many bytes are left to count for it.

    All `own_bytes` together are the bytes that tensors span, memory that several share counted once.
    """
    result = [Sharing(0)] * len(tensors)
    order = sorted(
        (number for number, tensor in enumerate(tensors) if tensor.nbytes),
        key=lambda number: (tensors[number].block, tensors[number].offset, -tensors[number].end, number),
    )
    for _, group in groupby(order, key=lambda number: tensors[number].block):
        reached, owner = 0, ""
        for number in group:
            tensor = tensors[number]
            own = max(0, tensor.end - max(tensor.offset, reached))
            result[number] = Sharing(own, owner if owner and tensor.offset < reached else None)
            if tensor.end > reached:
                reached, owner = tensor.end, tensor.name
    return result


def exact_dtype(itemsize: int) -> torch.dtype:
    """A type of elements of this width of which a copy keeps every bit."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[itemsize]


def typed_view(block: torch.Tensor, tensor: NamedTensor) -> torch.Tensor:
    """The elements of `tensor` in its block (uint8, owning its memory), as integers or complex numbers of their width.

    Copying these keeps every bit, which is not promised for bools of odd values. An array comes as its bytes.
    """
    if tensor.is_array:
        # Always in C order, and with elements of any width.
        return block[tensor.offset : tensor.end]
    kind = exact_dtype(tensor.itemsize)
    view = torch.empty(0, dtype=kind, device="cpu")
    view.set_(block.untyped_storage(), tensor.offset // kind.itemsize, tensor.shape, tensor.stride)
    return view


_Path = tuple[Any, ...]


def _leaves(
    node: Node, path: _Path = (), whole: Callable[[Node], bool] = lambda _: False
) -> Iterator[tuple[_Path, Node]]:
    """Everything in a tree that is no container, or an empty one, with the keys and numbers that lead to it.

    A sequence of which `whole` is true is not walked into.
    """
    tag = node[0]
    if tag == "m":
        yield from _leaves(node[1], path, whole)
    elif tag in "doC" and node[1]:
        for key, value in node[1]:
            yield from _leaves(value, (*path, plain_value(key)), whole)
    elif tag in "lteE" and node[1] and not whole(node):
        for number, value in enumerate(node[1]):
            yield from _leaves(value, (*path, number), whole)
    else:
        yield path, node


def _is_plain(node: Node) -> bool:
    if node[0] in "lteE":
        return all(map(_is_plain, node[1]))
    return node[0] not in "doCmTAHR"


def _join(path: _Path) -> str:
    text = ".".join(part if isinstance(part, str) else repr(part) for part in path)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _describe(name: str, part: str, node: Node) -> NamedTensor:
    shard = owner = None
    if node[0] == "H":
        shard, node = Shard.from_node(node[2:], node[1][-2]), node[1]
    if node[0] == "R":
        owner, node = node[1], ["T", -1, 0, *node[2:]]
    block, offset, dtype = node[1:4]
    shape = tuple(node[4])
    if node[0] == "A":
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        width = numpy_dtype(dtype).itemsize
        return NamedTensor(name, part, block, offset, dtype, shape, strides, width, is_array=True)
    width = dtype_named(dtype).itemsize
    return NamedTensor(name, part, block, offset, dtype, shape, tuple(node[5]), width, shard=shard, owner=owner)


def short_value(node: Node) -> str:
    """A plain value as Python writes it, cut to 60 characters."""
    text = repr(plain_value(node))
    return text if len(text) <= 60 else f"{text[:57]}..."
