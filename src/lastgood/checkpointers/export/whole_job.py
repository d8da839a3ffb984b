"""A checkpoint of several ranks as one file of whole tensors, without the model's code."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.export.formats import Exported, ExportFormat, check_target, write_export
from lastgood.checkpointers.export.selected import Selection
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.ranks.box_reader import BoxReader
from lastgood.checkpointers.ranks.boxes import full_runs, overlaps
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.ranks.parts import RankParts, differences
from lastgood.checkpointers.slots.contents import NamedTensor
from lastgood.errors import NoCheckpoint, NoGoodCheckpoint
from lastgood.state import Layout
from lastgood.state.layout import Node, map_leaves
from lastgood.state.layout_rules import dtype_named
from lastgood.storage.objects.s3 import S3Options

__all__ = ["export_job"]

_log = logging.getLogger("lastgood")


def export_job(
    job: Path | str,
    out: Path,
    to: ExportFormat,
    step: int | None = None,
    *,
    force: bool = False,
    threads: int = 4,
    s3: S3Options | None = None,
    selection: Selection | None = None,
) -> Exported:
    """Write the newest good checkpoint that all ranks hold (or that of `step`) to `out`. Every byte is checked.

    Tensors that were spread over ranks are complete again. An entry of the state in which ranks differ (their random
    generators) holds an entry for each: "rank-00000" and so on; if it also holds parts of tensors, what differs in
    it is rank 0's, and a warning names it.

    `job` is a directory, or s3://BUCKET/PREFIX, which is reached with `s3`. Raises as `export_checkpoint`, and
    MismatchError for directories of ranks that do not belong together.
    """
    started = time.perf_counter()
    check_target(out, to, force, selection)
    found = whole_checkpoints(job, s3)
    chosen = [one for one in found if (one.bad is None if step is None else one.step == step)]
    if not chosen:
        steps = [one.step for one in found]
        if step is None:
            raise NoGoodCheckpoint(f"{job}: all checkpoints are judged bad; steps {steps}; name one")
        raise NoCheckpoint(f"{job}: no checkpoint of step {step} of all ranks; steps {steps}")
    parts = RankParts(chosen[0])
    parts.check_together()
    with parts.reader(threads) as reader:
        merged = _Merged(parts, reader)
        info = chosen[0].infos[0]
        written = write_export(out, to, merged.layout, info, merged.blocks(), force=force, selection=selection)
    seconds = time.perf_counter() - started
    return Exported(out, to, chosen[0].step, written.tensors, written.nbytes, seconds, written.aliases)


class _Merged:
    """The layout of one state made of all ranks' parts, and its blocks: one for each tensor, without gaps."""

    def __init__(self, parts: RankParts, reader: BoxReader) -> None:
        self._parts = parts
        self._reader = reader
        self._sizes: list[int] = []
        self._fills: list[tuple[int, NamedTensor]] = []
        """For each block a rank that has the tensor, and the tensor."""
        self._known: dict[Any, int] = {}
        ranks = range(len(parts.layouts))
        root = []
        for name in dict.fromkeys(name for rank in ranks for name in parts.entries(rank)):
            key: Node = ["s", name]
            holding = [rank for rank in ranks if parts.part(rank, name) is not None]
            if self._is_one(name, holding):
                root.append([key, self._taken(holding[0], name)])
            else:
                each = [[["s", rank_directory("", rank).name], self._taken(rank, name)] for rank in holding]
                root.append([key, ["d", each]])
        self.layout = Layout(["d", root], tuple(self._sizes), 0)

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of each block, one after another."""
        for number, (rank, tensor) in enumerate(self._fills):
            if tensor.is_array:
                content = self._reader.dense_bytes(rank, tensor)
                yield number, torch.frombuffer(bytearray(content), dtype=torch.uint8)
                continue
            shape = tensor.whole_shape
            if tensor.shard is not None:
                found = self._parts.whole(tensor.name)  # before memory is taken for what a shape says
            else:
                found = [(rank, overlap) for overlap in overlaps(full_runs(shape), full_runs(shape))]
            target = torch.empty(shape, dtype=dtype_named(tensor.dtype), device="cpu")
            for source, overlap in found:
                self._reader.want(source, self._parts.named[source][tensor.name], overlap, target)
            self._reader.finish()
            yield number, target.as_strided((target.numel(),), (1,)).view(torch.uint8)

    def _is_one(self, name: str, ranks: list[int]) -> bool:
        """Whether an entry of all ranks is one state, and not one for each."""
        parts = self._parts
        first = parts.part(ranks[0], name)
        assert first is not None
        own = [[tensor for tensor in parts.named[rank].values() if tensor.part == name] for rank in ranks]
        shared = any(tensor.shard is not None or tensor.owner is not None for tensors in own for tensor in tensors)
        others = [parts.part(rank, name) or ["n"] for rank in ranks[1:]]
        paths = (path for other in others for path, _, _ in differences(first, other, name))
        different = next(paths, None)
        if different is None:
            different = self._different_tensor(own, ranks)
        if different is not None and shared:
            _log.warning("%s: %s differs between ranks; that of rank 0 is exported", parts.checkpoint.where, different)
        return different is None or shared

    def _different_tensor(self, own: list[list[NamedTensor]], ranks: list[int]) -> str | None:
        for same in zip(*own, strict=True):
            held = [(rank, tensor) for rank, tensor in zip(ranks, same, strict=True) if tensor.nbytes]
            if len(held) > 1 and all(tensor.shard is None for _, tensor in held):
                first = self._reader.dense_bytes(*held[0])
                if any(self._reader.dense_bytes(*other) != first for other in held[1:]):
                    name: str = held[0][1].name
                    return name
        return None

    def _taken(self, rank: int, name: str) -> Node:
        node = self._parts.part(rank, name)
        assert node is not None
        tensors = iter([tensor for tensor in self._parts.named[rank].values() if tensor.part == name])
        return map_leaves(lambda leaf: self._tensor(rank, next(tensors)) if leaf[0] in "TAHR" else leaf, node)

    def _tensor(self, rank: int, tensor: NamedTensor) -> Node:
        shape = list(tensor.whole_shape)
        if tensor.owner is not None:
            rank = self._parts.source(rank, tensor.name).key
            tensor = self._parts.named[rank][tensor.name]
        number = self._block(rank, tensor)
        if tensor.is_array:
            return ["A", number, 0, tensor.dtype, shape]
        strides = [prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape))]
        return ["T", number, 0, tensor.dtype, shape, strides]

    def _block(self, rank: int, tensor: NamedTensor) -> int:
        size = tensor.itemsize * prod(tensor.whole_shape)
        if not size:
            return -1
        if tensor.nbytes:
            place: Any = (rank, tensor.place, tensor.shard)
        else:  # this rank's part of it is empty
            sources = self._parts.sources(tensor.name)
            first = self._parts.named[sources[0].key][tensor.name] if sources else None
            place = tensor.name if first is None else (sources[0].key, first.place, first.shard)
        if place not in self._known:
            self._known[place] = len(self._sizes)
            self._sizes.append(size)
            self._fills.append((rank, tensor))
        return self._known[place]
