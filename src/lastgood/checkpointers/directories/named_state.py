"""A state as tensors with names: what libraries store that take a mapping of names to tensors.

Tensors have the names that their users know ("model.0.weight"), so that the library's own tools read the files; what is
no tensor goes beside them as one tensor of bytes, the layout of `lastgood.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.slots.contents import NamedTensor, named_tensors
from lastgood.errors import CorruptCheckpoint
from lastgood.state import FlatState, Layout, stateful_paths, unflatten
from lastgood.state.layout import MAX_LAYOUT_BYTES

__all__ = ["LAYOUT_NAME", "live_tensors", "read_tree", "stored_tensors"]

LAYOUT_NAME = "lastgood.layout"
"""The name under which the layout is stored, as one uint8 tensor of JSON."""


def stored_tensors(layout: Layout) -> list[NamedTensor]:
    """The tensors that hold every byte of a layout's blocks that belongs to the state, each once.

    A tensor that lies alone in its memory, or beside others, is stored under its own name, with its dtype and shape;
    one that shares memory under the first of its names. If tensors overlap in other ways, or leave gaps (expanded,
    sliced), their complete block is stored, as bytes, under "lastgood.block.N"; numpy arrays are stored as bytes too.
    """
    tensors = [tensor for tensor in named_tensors(layout) if tensor.nbytes]
    taken = {LAYOUT_NAME, *(tensor.name for tensor in tensors)}
    result = []
    tensors.sort(key=lambda tensor: (tensor.block, tensor.offset))  # stable: of one place the first name stays first
    for number, group in groupby(tensors, key=lambda tensor: tensor.block):
        own = list({tensor.place: tensor for tensor in reversed(list(group))}.values())[::-1]
        dense = all(tensor.end - tensor.offset == tensor.nbytes for tensor in own)
        if dense and all(first.end <= second.offset for first, second in pairwise(own)):
            result += [_renamed(tensor, taken) for tensor in own]
        else:
            result.append(_bytes(_free(f"lastgood.block.{number}", taken), number, 0, layout.block_bytes[number]))
    return result


def _renamed(tensor: NamedTensor, taken: set[str]) -> NamedTensor:
    name = _free(tensor.name, taken) if tensor.name == LAYOUT_NAME else tensor.name
    if tensor.is_array:
        return _bytes(name, tensor.block, tensor.offset, tensor.nbytes)
    return replace(tensor, name=name)


def _free(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    taken.add(found)
    return found


def _bytes(name: str, block: int, offset: int, nbytes: int) -> NamedTensor:
    return NamedTensor(name, "", block, offset, "uint8", (nbytes,), (1,), 1)


def live_tensors(flat: FlatState) -> dict[str, torch.Tensor]:
    """The live tensors of a state under the names by which they are stored, and its layout. Copies none of them."""
    tensors = {tensor.name: tensor.over(flat.blocks) for tensor in stored_tensors(flat.layout)}
    tensors[LAYOUT_NAME] = torch.frombuffer(bytearray(flat.layout.to_json()), dtype=torch.uint8)
    return tensors


def read_tree(
    checkpoint: Path,
    nbytes: int,
    layout_bytes: int,
    load: Callable[[Mapping[str, torch.Tensor]], None],
) -> tuple[dict[str, Any], frozenset[tuple[Any, ...]]]:
    """Build a state's tree from a library's files of `nbytes` in all, which were checked.

    Also says which of its entries are objects' (`stateful_paths`).

    `layout_bytes` is the length of the stored layout; `load` fills CPU tensors by name, and raises CorruptCheckpoint.
    """
    if not 0 < layout_bytes <= min(nbytes, MAX_LAYOUT_BYTES):
        raise CorruptCheckpoint(f"{checkpoint}: a layout of {layout_bytes} bytes in files of {nbytes}")
    text = torch.empty(layout_bytes, dtype=torch.uint8, device="cpu")
    load({LAYOUT_NAME: text})
    layout = Layout.from_json(text.numpy().tobytes(), str(checkpoint), nbytes)
    # A block begins at a multiple of 16 bytes of its memory, so it may hold that much that is nobody's.
    if layout.payload_bytes > nbytes + 16 * len(layout.block_bytes):
        raise CorruptCheckpoint(f"{checkpoint}: its layout is of {layout.payload_bytes} bytes, its files of {nbytes}")
    blocks = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in layout.block_bytes]
    load({tensor.name: tensor.over(blocks) for tensor in stored_tensors(layout)})
    return unflatten(layout, blocks, str(checkpoint)), stateful_paths(layout)
