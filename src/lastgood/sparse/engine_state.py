"""The state of a sparse engine as a checkpoint holds it, and as ranks of another number go on from it.

A rank's residual is its own: what it has not sent. What was sent and not applied yet (staleness 1) is kept as all ranks
received it, in a table and a payload of a constant size, so that the layout of a checkpoint does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.sparse.blocks import SparseGradient, dense
from lastgood.sparse.coding import BLOCK_HEADER_BYTES, decode, encode
from lastgood.sparse.compressors import Compressor, most_places

__all__ = ["FORMAT", "LayerShape", "check_engine", "most_bytes", "pack", "spread", "spread_velocities", "unpack"]

FORMAT = 1


class LayerShape:
    """What of a layer must be the same in a checkpoint: its name, its elements, and how many bytes a block may have."""

    def __init__(self, name: str, elements: int, block_bytes: int) -> None:
        self.name = name
        self.elements = elements
        self.block_bytes = block_bytes


def most_bytes(compressor: Compressor, count: int, item_bytes: int) -> int:
    """No encoded block of this one is longer if `count` elements are asked for, of so many bytes each."""
    width = compressor.width
    wanted = compressor.places if compressor.name == "none" else -(-count // width)
    most = most_places(compressor.places, wanted)
    return BLOCK_HEADER_BYTES + most * (width * item_bytes + 4)


def pack(
    blocks: Mapping[int, Sequence[SparseGradient]], layers: Sequence[LayerShape], ranks: int
) -> dict[str, torch.Tensor]:
    """What is in flight, by layer: `table` (int64, layers x ranks; 0: not in flight) has the lengths in `payload`."""
    table = torch.zeros(len(layers), ranks, dtype=torch.int64, device="cpu")
    payload = torch.zeros(ranks * sum(layer.block_bytes for layer in layers), dtype=torch.uint8, device="cpu")
    begin = 0
    for number in sorted(blocks):
        for rank, block in enumerate(blocks[number]):
            content = torch.from_numpy(encode(block))
            table[number, rank] = content.numel()
            payload[begin : begin + content.numel()] = content
            begin += content.numel()
    return {"table": table, "payload": payload}


def unpack(
    held: Mapping[str, torch.Tensor], layers: Sequence[LayerShape], source: str
) -> dict[int, list[SparseGradient]]:
    """What `pack` was given. Raises CorruptCheckpoint, which names `source`."""
    blocks: dict[int, list[SparseGradient]] = {}
    begin, payload = 0, held["payload"].cpu()
    for number, (layer, lengths) in enumerate(zip(layers, held["table"].tolist(), strict=True)):
        if not any(lengths):
            continue
        where = f"{source}: what is in flight of {layer.name}"
        blocks[number] = []
        for length in lengths:
            if not BLOCK_HEADER_BYTES <= length <= payload.numel() - begin:
                raise CorruptCheckpoint(f"{where}: a block of {length} bytes, of {payload.numel() - begin} left")
            content = payload[begin : begin + length].clone().numpy()
            blocks[number].append(decode(content, layer.elements, where))
            begin += length
    return blocks


def check_engine(
    saved: Mapping[str, Any], settings: Mapping[str, Any], layers: Sequence[LayerShape], path: str
) -> None:
    """Raise MismatchError, naming `path` and both sides, if an engine like this cannot take `saved`.

    Tensors may have no content. What is in flight is looked at by `unpack`.
    """
    if saved["format"] != FORMAT:
        raise MismatchError(f"{path}: a sparse engine of format {saved['format']}; this version reads format {FORMAT}")
    for name in {**settings, **saved["settings"]}:
        found, own = saved["settings"].get(name), settings.get(name)
        if found != own:
            raise MismatchError(f"{path}: {name} was {found!r} in the checkpoint, and the engine has {own!r}")
    shapes = [(name, held["residual"].numel()) for name, held in saved["layers"].items()]
    for before, now in zip(shapes, [(layer.name, layer.elements) for layer in layers], strict=False):
        if before != now:
            raise MismatchError(
                f"{path}: a layer of the checkpoint is {before[0]} with {before[1]} elements, and here it is {now[0]} "
                f"with {now[1]}"
            )
    if len(shapes) != len(layers):
        raise MismatchError(f"{path}: the checkpoint has {len(shapes)} layers, and the model has {len(layers)}")
    flying = saved["in_flight"]
    if flying is None:
        return
    table, payload = flying["table"], flying["payload"]
    if (table.dtype, tuple(table.shape)) != (torch.int64, (len(layers), saved["ranks"])):
        raise MismatchError(
            f"{path}: the lengths of what is in flight are {tuple(table.shape)} of {table.dtype}, and there are "
            f"{len(layers)} layers of {saved['ranks']} ranks"
        )
    if (payload.dtype, payload.dim()) != (torch.uint8, 1):
        raise MismatchError(f"{path}: what is in flight is {payload.dim()}-dimensional, of {payload.dtype}")


def spread(
    states: Sequence[Mapping[str, Any]], layers: Sequence[LayerShape], rank: int, ranks: int, source: str
) -> dict[str, torch.Tensor]:
    """Residuals of rank `rank` of `ranks`, by layer, from those of all ranks that wrote a checkpoint.

    The residuals of all new ranks together are those of the old ones times new / old ranks, since an update is divided
    by the ranks: an old rank's goes to the new rank of its number modulo `ranks`. What was in flight goes back into
    the residual that it was taken from.
    """
    found = {layer.name: torch.zeros(layer.elements, dtype=torch.float32, device="cpu") for layer in layers}
    for before in range(rank, len(states), ranks):
        state = states[before]
        flying = {} if state["in_flight"] is None else unpack(state["in_flight"], layers, source)
        for number, layer in enumerate(layers):
            residual = state["layers"][layer.name]["residual"].float().cpu()
            if number in flying and flying[number][before].finite:
                residual = residual + dense(flying[number][before])
            found[layer.name] += residual
    factor = ranks / len(states)
    for residual in found.values():
        residual *= factor
    return found


def spread_velocities(
    states: Sequence[Mapping[str, Any]], layers: Sequence[LayerShape], rank: int, ranks: int
) -> dict[str, torch.Tensor]:
    """The same of velocities (momentum before compression), by layer; nothing of layers that have none.

    They are sums of gradients, as residuals are, so that the same rule keeps what they will still add.
    """
    found: dict[str, torch.Tensor] = {}
    for layer in layers:
        if "velocity" not in states[0]["layers"][layer.name]:
            continue
        own = torch.zeros(layer.elements, dtype=torch.float32, device="cpu")
        for before in range(rank, len(states), ranks):
            own += states[before]["layers"][layer.name]["velocity"]["velocity"].float().cpu()
        found[layer.name] = own.mul_(ranks / len(states))
    return found
