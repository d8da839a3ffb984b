"""A part of a checkpoint as plain safetensors for other programs: some names, another dtype, in shards.

What is written here cannot be read back into a training: it is for serving, and for Hugging Face's `from_pretrained`,
which takes a folder with an index or one file. One shard is in memory at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lastgood._lazy import torch
from lastgood.checkpointers.slots.contents import NamedTensor
from lastgood.errors import ConfigError, StateError
from lastgood.files import open_new
from lastgood.names import nearest
from lastgood.state.layout_rules import dtype_named
from lastgood.storage import SlotInfo

__all__ = ["INDEX", "Selection", "ShardPlan", "check_folder", "plan_shards", "write_shards"]

INDEX = "model.safetensors.index.json"
"""What Hugging Face calls the list of shards."""
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_MOST_NAMED = 6


@dataclass(frozen=True)
class Selection:
    """Which tensors of a checkpoint are written, under which names, as what.

    Raises ConfigError for a dtype that is none of those that a number is rounded to, and a shard size below one byte.
    """

    parts: tuple[str, ...] = ()
    """Entries of the state, as "model"; all if none is named."""
    prefix: str = ""
    """Only names that begin with it, and it is left out of them: "model." makes model.norm.weight norm.weight."""
    dtype: str | None = None
    """Tensors of floating point are rounded to it; None: as they are."""
    shard_bytes: int | None = None
    """Files of at most so many bytes (a larger tensor has one of its own) in a folder; None: one file."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(f"--dtype {self.dtype}{nearest(self.dtype, _DTYPES)}: known are {', '.join(_DTYPES)}")
        if self.shard_bytes is not None and self.shard_bytes < 1:
            raise ConfigError("--shard-size must be at least one byte")

    @property
    def chooses(self) -> bool:
        """Whether it asks for anything but all of it, as it is, in one file."""
        return self != Selection()


@dataclass
class ShardPlan:
    """Which tensors each file holds, in the order of the blocks that they lie in."""

    files: dict[str, list[NamedTensor]]
    """By the file's name; tensors have the names that they get."""
    nbytes: int
    """Of all elements."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names that are not written, and the one that holds the same tensor."""


def plan_shards(tensors: Sequence[NamedTensor], selection: Selection, where: str, out: Path) -> ShardPlan:
    """Choose and rename. Raises ConfigError, naming what there is, if nothing is left; StateError for a dtype."""
    chosen = [one for one in tensors if not selection.parts or one.part in selection.parts]
    parts = list(dict.fromkeys(one.part for one in tensors))
    missing = [part for part in selection.parts if part not in parts]
    if missing:
        raise ConfigError(f"{where}: no part {missing[0]!r}{nearest(missing[0], parts)}; it has {', '.join(parts)}")
    named = [replace(one, name=one.name.removeprefix(selection.prefix)) for one in chosen if _begins(one, selection)]
    if not named:
        some = ", ".join(one.name for one in chosen[:_MOST_NAMED])
        raise ConfigError(f"{where}: no tensor's name begins with {selection.prefix!r}; there are {some} and so on")
    wrong = next((one for one in named if not one.name or one.is_array), None)
    if wrong is not None:
        what = "an array of numpy's" if wrong.is_array else f"named {selection.prefix!r} alone"
        raise StateError(f"{where}: {wrong.name or 'a tensor'} is {what}; choose other parts or another prefix")
    first: dict[object, str] = {}
    aliases = {one.name: first[one.place] for one in named if first.setdefault(one.place, one.name) != one.name}
    kept = sorted((one for one in named if one.name not in aliases), key=lambda one: (one.block, one.offset))
    groups: list[list[NamedTensor]] = [[]]
    filled = 0
    for one in kept:
        nbytes = _written_bytes(one, selection)
        if selection.shard_bytes is not None and groups[-1] and filled + nbytes > selection.shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += nbytes
    total = sum(_written_bytes(one, selection) for one in kept)
    if selection.shard_bytes is None:
        return ShardPlan({out.name: groups[0]}, total, aliases)
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return ShardPlan(dict(zip(names, groups, strict=True)), total, aliases)


def _begins(tensor: NamedTensor, selection: Selection) -> bool:
    return tensor.name.startswith(selection.prefix)


def _written_dtype(tensor: NamedTensor, selection: Selection) -> torch.dtype:
    stored = dtype_named(tensor.dtype)
    return dtype_named(selection.dtype) if selection.dtype is not None and stored.is_floating_point else stored


def _written_bytes(tensor: NamedTensor, selection: Selection) -> int:
    return math.prod(tensor.shape) * _written_dtype(tensor, selection).itemsize


def write_shards(
    place: Path,
    plan: ShardPlan,
    selection: Selection,
    info: SlotInfo,
    blocks: Iterator[tuple[int, torch.Tensor]],
    mode: int | None = None,
) -> None:
    """Write the planned files to `place`, a new file or a new folder, from all blocks in order. Raises OSError.

    Not flushed. In a folder there is an index as well.
    """
    from safetensors.torch import save_file

    metadata = {"format": "pt", "lastgood.step": str(info.step), "lastgood.job_id": info.record.job_id.hex()}
    folder = selection.shard_bytes is not None
    if folder:
        place.mkdir()
    held: dict[str, torch.Tensor] = {}
    waiting = [(file, {one.name for one in tensors}) for file, tensors in plan.files.items()]
    of_block: dict[int, list[NamedTensor]] = {}
    for tensors in plan.files.values():
        for one in tensors:
            of_block.setdefault(one.block, []).append(one)
    for one in of_block.get(-1, []):  # without elements, so in no block
        held[one.name] = torch.empty(one.shape, dtype=_written_dtype(one, selection), device="cpu")

    def finish() -> None:
        while waiting and waiting[0][1] <= held.keys():
            file, names = waiting.pop(0)
            path = place / file if folder else place
            os.close(open_new(path, mode=mode))
            save_file({name: held.pop(name) for name in sorted(names)}, path, metadata)

    for number, block in blocks:
        for one in of_block.get(number, []):
            elements = replace(one, block=0).over([block])
            held[one.name] = elements.to(_written_dtype(one, selection), copy=True).contiguous()
        finish()
    finish()
    if folder:
        _write_index(place, plan, mode)


def _write_index(folder: Path, plan: ShardPlan, mode: int | None) -> None:
    weights = {one.name: file for file, tensors in plan.files.items() for one in tensors}
    document = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weights.items()))}
    with os.fdopen(open_new(folder / INDEX, mode=mode), "wb") as file:
        file.write(json.dumps(document, indent=2).encode() + b"\n")


def check_folder(out: Path, force: bool) -> None:
    """Refuse, with ConfigError, a place where shards may not be written."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no directory {out.parent}; make it first")
    if not os.path.lexists(out):
        return
    if not force:
        raise ConfigError(f"{out}: is there already; choose another name, or give --force to replace it")
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / INDEX).is_file()):
        raise ConfigError(f"{out}: is no folder of shards (with {INDEX}), so not replaced")
