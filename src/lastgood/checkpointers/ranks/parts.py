"""The parts of a checkpoint that several ranks wrote, and whether they belong together. Reads layouts, no data.

What a restore on other ranks, an export and `lastgood verify` rely on is compared here, once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from lastgood.checkpointers.rank_directory import job_of
from lastgood.checkpointers.ranks.box_reader import BoxReader
from lastgood.checkpointers.ranks.boxes import Overlap, Source, cover, full_runs
from lastgood.checkpointers.ranks.checkpoint import JobCheckpoint
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.ranks.remote_job import RemoteJob
from lastgood.checkpointers.ranks.sharing import Sharing
from lastgood.checkpointers.slots.contents import NamedTensor, check_dense, named_tensors, read_layout, short_value
from lastgood.errors import CorruptCheckpoint, MismatchError, NoCheckpoint
from lastgood.state import Layout, unflatten
from lastgood.state.layout import Node, tensor_nodes
from lastgood.state.shards import Runs
from lastgood.storage import SlotInfo, SlotView
from lastgood.storage.objects.view import RemoteInfo, RemoteView

__all__ = ["RankParts", "differences", "parts_of", "used_blocks"]

_READERS = 8


class RankParts:
    """The parts of one checkpoint that its ranks wrote. Raises CorruptCheckpoint, StorageError, WaitTimeout."""

    def __init__(self, checkpoint: JobCheckpoint) -> None:
        self.checkpoint = checkpoint
        views, infos = checkpoint.views, checkpoint.infos
        # Over a network several at once.
        readers = min(_READERS, len(views)) if views[0].remote else 1
        with ThreadPoolExecutor(readers, thread_name_prefix="lastgood-layouts") as pool:
            self.layouts = list(pool.map(read_layout, views, infos))
        self.named = [{tensor.name: tensor for tensor in named_tensors(layout)} for layout in self.layouts]

    def where(self, rank: int) -> str:
        """For messages."""
        return f"{self.checkpoint.infos[rank].path}: step {self.checkpoint.step}"

    def part(self, rank: int, name: str) -> Node | None:
        """The node of one entry of a rank's state."""
        return next((node for key, node in self.layouts[rank].tree[1] if key == ["s", name]), None)

    def entries(self, rank: int) -> list[str]:
        """Names of the entries of a rank's state."""
        return [key[1] for key, _ in self.layouts[rank].tree[1]]

    def source(self, rank: int, name: str) -> Source[int]:
        """The rank that wrote the bytes of a rank's tensor, and which part of it they are.

        Raises CorruptCheckpoint, naming both ranks, if it was left to one that does not hold the same.
        """
        tensor = self.named[rank][name]
        if tensor.owner is not None:
            found = self.named[tensor.owner].get(name) if tensor.owner < len(self.named) else None
            if found is None or found.owner is not None:
                raise CorruptCheckpoint(
                    f"{self.where(rank)}: {name} was left to rank {tensor.owner}, whose part does not hold it"
                )
            if (_kind_of(found), found.shape, _runs_of(found)) != (_kind_of(tensor), tensor.shape, _runs_of(tensor)):
                raise CorruptCheckpoint(
                    f"{self.where(rank)}: {name} was left to rank {tensor.owner}: {_described(tensor)} on rank {rank}, "
                    f"{_described(found)} on rank {tensor.owner}"
                )
            rank = tensor.owner
        return Source(rank, _runs_of(tensor))

    def sources(self, name: str) -> list[Source[int]]:
        """The ranks that hold bytes of a tensor, and which part of it; none for one that has no elements anywhere.

        Raises MismatchError, naming two ranks, unless all that know the name mean one tensor by it.
        """
        known = [(rank, named[name]) for rank, named in enumerate(self.named) if name in named]
        first, tensor = known[0]
        for rank, other in known[1:]:
            if _kind_of(other) != _kind_of(tensor):
                raise MismatchError(
                    f"{self.checkpoint.where}: {name} is {_described(tensor)} on rank {first} and {_described(other)} "
                    f"on rank {rank}, which cannot be put together"
                )
        return [Source(rank, _runs_of(other)) for rank, other in known if other.nbytes]

    def check_rank(self, rank: int) -> None:
        """Raise CorruptCheckpoint if a rank cannot get back what it left to others: all that it needs of them."""
        for name, tensor in self.named[rank].items():
            if tensor.owner is not None:
                self.source(rank, name)

    def check_together(self) -> None:
        """Raise unless the parts are one state: CorruptCheckpoint, or MismatchError if two ranks differ.

        This is what an export and a restore on another number of ranks need; as many ranks need only `check_rank`.
        """
        for rank in range(len(self.layouts)):
            self.check_rank(rank)
        for name in dict.fromkeys(name for named in self.named for name in named):
            known = [named[name] for named in self.named if name in named]
            if any(tensor.shard is not None for tensor in known):
                self.whole(name)
            for tensor in known:
                check_dense(tensor, self.held_bytes, self.checkpoint.where)

    def whole(self, name: str) -> list[tuple[int, Overlap]]:
        """Which boxes of which ranks make up a tensor that is spread over them. Raises as `check_together`."""
        sources = self.sources(name)
        tensor = next(named[name] for named in self.named if name in named)
        return self.cover(name, full_runs(tensor.whole_shape), sources)

    def cover(
        self, name: str, wanted: Runs, sources: Sequence[Source[int]], turn: int = 0, own: int | None = None
    ) -> list[tuple[int, Overlap]]:
        """`boxes.cover` of a tensor. Raises CorruptCheckpoint if the sources do not hold what is wanted."""
        try:
            return cover(wanted, sources, turn, own)
        except ValueError as error:
            raise CorruptCheckpoint(f"{self.checkpoint.where}: {name}: {error}") from error

    @property
    def held_bytes(self) -> int:
        """Of all parts."""
        return sum(info.stream_bytes for info in self.checkpoint.infos)

    @contextmanager
    def reader(self, threads: int, sharing: Sharing | None = None) -> Iterator[BoxReader]:
        """Reads the parts; their slots are held meanwhile."""
        with self.checkpoint.hold():
            yield BoxReader(self.checkpoint.views, self.checkpoint.infos, self.layouts, threads, sharing)

    def tree_of_part(self, rank: int, name: str, reader: BoxReader) -> Any:
        """What one rank's `state_dict` of an entry returned, in fresh memory: plain values and CPU tensors."""
        node = self.part(rank, name)
        assert node is not None  # compared before
        layout = Layout(["d", [[["s", name], node]]], self.layouts[rank].block_bytes, 0)
        blocks = reader.blocks(rank, used_blocks(node))
        return unflatten(layout, blocks, self.where(rank))[name]


def parts_of(view: SlotView, info: SlotInfo) -> RankParts:
    """The parts of all ranks that belong to one rank's checkpoint, which `view` shows.

    Raises CorruptCheckpoint if not all ranks hold it, and as `whole_checkpoints` and `RankParts` do.
    """
    if isinstance(view, RemoteView) and isinstance(info, RemoteInfo):
        return RankParts(RemoteJob(view.client).checkpoint(info.name))
    key = (info.incarnation, info.step)
    job = job_of(view.directory) or view.directory
    try:
        found = whole_checkpoints(job)
    except NoCheckpoint as error:  # this rank has one, so a training must not begin again
        raise CorruptCheckpoint(f"{info.path}: step {info.step}: {error}") from error
    for checkpoint in found:
        if checkpoint.key == key:
            return RankParts(checkpoint)
    raise CorruptCheckpoint(f"{info.path}: step {info.step}: not all ranks of {job} hold all of it")


def _kind_of(tensor: NamedTensor) -> tuple[Any, ...]:
    """What is the same of all parts of one tensor."""
    return tensor.is_array, tensor.dtype, tensor.whole_shape, tensor.shard is None


def _runs_of(tensor: NamedTensor) -> Runs:
    return full_runs(tensor.shape) if tensor.shard is None else tensor.shard.runs


def _described(tensor: NamedTensor) -> str:
    kind = "an array" if tensor.is_array else "a tensor" if tensor.shard is None else "a part of a tensor"
    return f"{kind} of {tensor.dtype} {tensor.whole_shape}"


def used_blocks(node: Node, tags: str = "TA") -> set[int]:
    """Numbers of the blocks that tensors in a tree lie in."""
    return {tensor[1] for tensor in tensor_nodes(node) if tensor[0] in tags} - {-1}


def differences(first: Node, second: Node, path: str) -> Iterator[tuple[str, str, str]]:
    """Where two trees differ but for where tensors lie: path, and both sides in words."""
    first, second = _unwrapped(first), _unwrapped(second)
    ours, theirs = _kind(first), _kind(second)
    if ours != theirs:
        yield path, _words(first), _words(second)
    elif first[0] in "lteE":
        for number, (one, other) in enumerate(zip(first[1], second[1], strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif first[0] in "doC":
        for (key, one), (_, other) in zip(first[1], second[1], strict=True):
            yield from differences(one, other, f"{path}.{key[1] if len(key) > 1 else key[0]}")


def _unwrapped(node: Node) -> Node:
    while node[0] == "m":
        node = node[1]
    return node


def _kind(node: Node) -> Sequence[Any]:
    """What must be equal of a node, its children apart."""
    tag = node[0]
    if tag == "T":
        return ("tensor", node[3], node[4])
    if tag == "R":
        return ("tensor", node[2], node[3])
    if tag == "H":
        local = node[1]
        return ("tensor", local[3] if local[0] == "T" else local[2], node[2])
    if tag == "A":
        return ("array", node[3], node[4])
    if tag in "lteE":
        return (tag, len(node[1]))
    if tag in "doC":
        return (tag, [key for key, _ in node[1]])
    return node


def _words(node: Node) -> str:
    kind = _kind(node)
    if kind[0] in ("tensor", "array"):
        return f"a {kind[0]} of {kind[1]} {tuple(kind[2])}"
    if node[0] in "lteEdoC":
        return f"a container of {len(node[1])} entries"
    return short_value(node)
