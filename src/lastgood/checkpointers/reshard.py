"""Restores a checkpoint of several ranks into a training whose tensors are cut in another way, or by other ranks.

Each rank reads what it needs and no more: of every tensor the boxes that its own part shares with the parts that were
written, from the directories of the ranks that wrote them. Ranks do not talk to each other. docs/resharding.md says
what comes back on another number of ranks, and what is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.checkpointers.boxes import Overlap, Source, cover, full_runs
from lastgood.checkpointers.live import LiveTensors, keeps_its_tensors
from lastgood.checkpointers.ranks import Buffers, JobCheckpoint, whole_checkpoints
from lastgood.checkpointers.stored import NamedTensor, named_tensors, read_layout
from lastgood.checkpointers.stream_boxes import BoxReader, dense_bytes
from lastgood.errors import CorruptCheckpoint, MismatchError, NoCheckpoint, NoGoodCheckpoint, StorageError, WaitTimeout
from lastgood.state import Layout, NewWorld, check_tree, load_tree, stateful_paths, unflatten
from lastgood.state.layout import Node
from lastgood.state.shards import Runs, describe_shard, wrap

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["FromRanks", "RankParts", "decides_itself", "restore_ranks"]

_log = logging.getLogger("lastgood")


def restore_ranks(
    job: Path | str,
    state: Mapping[str, Any],
    world: tuple[int, int],
    threads: int,
    step: int | None = None,
    *,
    good_only: bool = True,
    buffers: Buffers = "equal",
) -> int:
    """Read the newest checkpoint that all ranks of `job` hold whole into rank world[0] of world[1]; returns its step.

    With a `step`, only that one, whatever was judged. In a world of one rank, one that cannot be read is passed over
    with a warning; live tensors may then hold parts of it, until an older one is read over them. With
    ``buffers="rank0"`` buffers of modules may differ between the ranks that wrote it; those of rank 0 are taken.
    Ranks that restore at one time must find the same: nothing may be written into `job` meanwhile.

    Raises NoCheckpoint, NoGoodCheckpoint, CorruptCheckpoint, MismatchError (also for what another number of ranks
    cannot take), StorageError.
    """
    found = whole_checkpoints(job)
    unread: list[str] = []
    refused: list[str] = []
    touched = False
    for checkpoint in found:
        if step is not None and checkpoint.step != step:
            continue
        if step is None and good_only and checkpoint.bad is not None:
            refused.append(f"step {checkpoint.step} is judged bad ({checkpoint.bad})")
            continue
        try:
            reading = FromRanks(RankParts(checkpoint), state, world, buffers)
            touched |= reading.touches_live
            reading.read(threads)
        except (CorruptCheckpoint, StorageError, WaitTimeout) as error:
            if world[1] > 1 and step is None:
                # The others may have read it: ranks of one training must not go on from two steps.
                older = [one.step for one in found if one.key < checkpoint.key]
                raise CorruptCheckpoint(
                    f"{job}: step {checkpoint.step} cannot be read on rank {world[0]}: {error}; end all ranks, make "
                    f"the state anew, and name an older step on each of them (there are {older or 'none'})"
                ) from error
            _log.warning("%s; trying the checkpoint before it", error)
            unread.append(str(error))
            continue
        reading.load()
        return checkpoint.step
    if unread:
        mixed = "; the state in memory holds parts of it now, make it anew" if touched else ""
        raise CorruptCheckpoint(f"{job}: no checkpoint can be read: {'; '.join([*unread, *refused])}{mixed}")
    if refused:
        raise NoGoodCheckpoint(f"{job}: {'; '.join(refused)}; name a step, or restore with good_only=False")
    raise NoCheckpoint(f"{job}: no checkpoint of step {step} of all ranks; steps {[one.step for one in found]}")


def decides_itself(part: Any) -> bool:
    """Whether a part of a state knows how to go on with another number of ranks (`lastgood.state.NewWorld`)."""
    return callable(getattr(part, "load_from_ranks", None))


class RankParts:
    """The parts of one checkpoint that its ranks wrote. Raises CorruptCheckpoint, StorageError, WaitTimeout."""

    def __init__(self, checkpoint: JobCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.layouts = [read_layout(view, info) for view, info in zip(checkpoint.views, checkpoint.infos, strict=True)]
        self.named: list[dict[str, NamedTensor]] = [
            {tensor.name: tensor for tensor in named_tensors(layout, self.where(rank))}
            for rank, layout in enumerate(self.layouts)
        ]

    def where(self, rank: int) -> str:
        """For messages."""
        return f"{self.checkpoint.infos[rank].path}: step {self.checkpoint.step}"

    def part(self, rank: int, name: str) -> Node | None:
        """The node of one entry of a rank's state."""
        return next((node for key, node in self.layouts[rank].tree[1] if key == ["s", name]), None)

    def entries(self, rank: int) -> list[str]:
        """Names of the entries of a rank's state."""
        return [key[1] for key, _ in self.layouts[rank].tree[1]]

    def sources(self, name: str) -> list[Source[int]]:
        """The ranks that hold bytes of a tensor, and which part of it; none for one that has no elements anywhere."""
        return [
            Source(rank, full_runs(tensor.shape) if tensor.shard is None else tensor.shard.runs)
            for rank, named in enumerate(self.named)
            if (tensor := named.get(name)) is not None and tensor.nbytes
        ]

    def reader(self, threads: int) -> BoxReader:
        """Reads the parts; to be used as a context manager."""
        return BoxReader(self.checkpoint.views, self.checkpoint.infos, self.layouts, threads)

    def tree_of_part(self, rank: int, name: str, reader: BoxReader) -> Any:
        """What one rank's `state_dict` of an entry returned, in fresh memory: plain values and CPU tensors."""
        node = self.part(rank, name)
        assert node is not None  # compared before
        layout = Layout(["d", [[["s", name], node]]], self.layouts[rank].block_bytes, 0)
        blocks = reader.blocks(rank, used_blocks(node))
        return unflatten(layout, blocks, self.where(rank))[name]


class FromRanks:
    """One restore into `state`, from the parts of all ranks. Make it (nothing is changed), `read`, then `load`.

    `world` is (rank, number of ranks) of the training. Raises MismatchError for what does not fit it.
    """

    def __init__(
        self, parts: RankParts, state: Mapping[str, Any], world: tuple[int, int], buffers: Buffers = "equal"
    ) -> None:
        self._parts = parts
        self._rank, self._world_size = world
        saved = parts.checkpoint.world_size
        self._new_world = saved != self._world_size
        # Of plain values and the structure: on the same number of ranks each has its own.
        self._base = 0 if self._new_world else self._rank
        self._where = parts.checkpoint.where
        self._deciding = {name: part for name, part in state.items() if self._new_world and decides_itself(part)}
        self._first_ranks = {
            f"{name}.{buffer}"
            for name, part in state.items()
            if buffers == "rank0" and self._new_world and isinstance(part, torch.nn.Module)
            for buffer, _ in part.named_buffers()
        }
        """Names of tensors of which rank 0's is taken, whatever the others have."""
        self._rest = {name: part for name, part in state.items() if name not in self._deciding}
        lost = sorted(self._deciding.keys() - set(parts.entries(self._base)))
        if lost:
            raise MismatchError(f"{self._where}: the checkpoint lacks {lost}, which the state holds")
        if self._new_world:
            self._compare_structure()
        layout = parts.layouts[self._base]
        kept = [pair for pair in layout.tree[1] if pair[0][1] not in self._deciding]
        self._layout = Layout(["d", kept], layout.block_bytes, 0, layout.version)
        self._live = LiveTensors(self._rest)
        self._tensors = [tensor for tensor in parts.named[self._base].values() if tensor.part not in self._deciding]
        self.touches_live = False
        self._targets: dict[str, torch.Tensor] = {}
        self._states: dict[str, list[Any]] = {}
        self._spread: dict[str, Any] = {}
        """The live DTensor that each target is spread as."""
        self._by_place: dict[Any, torch.Tensor] = {}
        self._plan = [
            (tensor.name, key, overlap)
            for tensor in self._tensors
            if not tensor.is_array
            for key, overlap in self._choose(tensor)
        ]
        self._array_blocks = used_blocks(self._layout.tree, "A")
        self._arrays: list[torch.Tensor] = [
            torch.zeros(size if number in self._array_blocks else 0, dtype=torch.uint8)
            for number, size in enumerate(layout.block_bytes)
        ]
        check_tree(self._rest, self._tree(), self._where, stateful_paths(self._layout))

    def read(self, threads: int) -> None:
        """Fill the targets. Raises CorruptCheckpoint, StorageError, WaitTimeout; live tensors then hold a mixture.

        Raises MismatchError, with nothing changed, where the ranks' values of a tensor differ that is in one piece.
        """
        with self._parts.reader(threads) as reader:
            if self._new_world:
                self._compare_tensors(reader)
                self._states = {
                    name: [self._parts.tree_of_part(rank, name, reader) for rank in range(len(self._parts.layouts))]
                    for name in self._deciding
                }
            self._arrays = reader.blocks(self._base, self._array_blocks)
            for name, rank, overlap in self._plan:
                reader.want(rank, self._parts.named[rank][name], overlap, self._targets[name])
            reader.finish()

    def load(self) -> None:
        """Give the tree to the state's objects."""
        load_tree(self._rest, self._tree(), self._where)
        checkpoint = self._parts.checkpoint
        world = NewWorld(self._rank, self._world_size, checkpoint.world_size, checkpoint.step, checkpoint.job_id.hex())
        for name, part in self._deciding.items():
            part.load_from_ranks(self._states[name], world)

    def _choose(self, tensor: NamedTensor) -> list[tuple[int, Overlap]]:
        """Make the target of a tensor, and say which boxes of which ranks fill it."""
        like = self._live.like(tensor)
        target = self._live.memory(tensor.name)
        known = self._live.named.get(tensor.name)
        shape, dtype = tensor.whole_shape, getattr(torch, tensor.dtype)
        if known is not None and (known.whole_shape != shape or known.dtype != tensor.dtype):
            if keeps_its_tensors(self._rest[tensor.part]):
                raise MismatchError(
                    f"{self._where}: {tensor.name}: the checkpoint holds {tensor.dtype} {shape}, the state "
                    f"{known.dtype} {known.whole_shape}"
                )
            known = like = target = None  # a part that takes what it is given, or is refused when trees are compared
        self._spread[tensor.name] = like
        if like is None:
            wanted = full_runs(shape)
            if tensor.shard is not None and known is None and self._world_size > 1:
                raise MismatchError(
                    f"{self._where}: {tensor.name} was spread over ranks, and the training has neither this tensor nor "
                    "a parameter of its shape that says how to spread it now"
                )
        else:
            wanted = describe_shard(like, tensor.name).runs
        if target is None:
            target = self._by_place.get(tensor.place) if tensor.nbytes else None
            if target is not None:  # a second name of one tensor
                self._targets[tensor.name] = target
                return []
            target = self._fresh(tensor, like, wanted, dtype)
            if tensor.nbytes:
                self._by_place[tensor.place] = target
        else:
            self.touches_live = True
        self._targets[tensor.name] = target
        if target.numel() == 0:
            return []
        sources = self._parts.sources(tensor.name)
        if tensor.owner is not None and tensor.owner not in {source.key for source in sources}:
            raise CorruptCheckpoint(
                f"{self._parts.where(self._base)}: {tensor.name} was left to rank {tensor.owner}, whose part does not "
                "hold it"
            )
        if tensor.shard is None and (not self._new_world or tensor.name in self._first_ranks):
            # Plain tensors are each rank's own; only what it left to another rank comes from there.
            wanted_rank = self._base if tensor.owner is None else tensor.owner
            sources = [source for source in sources if source.key == wanted_rank]
        try:
            return cover(wanted, sources, self._rank, None if self._new_world else self._rank)
        except ValueError as error:
            raise CorruptCheckpoint(f"{self._where}: {tensor.name}: {error}") from error

    def _fresh(self, tensor: NamedTensor, like: Any, wanted: Runs, dtype: torch.dtype) -> torch.Tensor:
        if like is not None:
            return torch.empty_like(like._local_tensor, dtype=dtype)
        parameter = self._live.parameter(tensor)
        device = torch.device("cpu") if parameter is None else parameter.device
        if tensor.shard is None and 0 not in tensor.shape:
            return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=device)
        return torch.empty(tuple(sum(run[1] for run in runs) for runs in wanted), dtype=dtype, device=device)

    def _tree(self) -> dict[str, Any]:
        """The checkpoint's tree over the targets."""
        names = iter([tensor for tensor in self._tensors if not tensor.is_array])

        def leaf(node: Node) -> torch.Tensor:
            del node  # the same tensors, in the same order
            tensor = next(names)
            target, like = self._targets[tensor.name], self._spread[tensor.name]
            return target if like is None else wrap(target, like)

        return unflatten(self._layout, self._arrays, self._where, leaf)

    # -- what ranks must agree on ----------------------------------------------------------------------------------

    def _compare_structure(self) -> None:
        """Names, dtypes, shapes and plain values of all ranks; they must be equal for another number of ranks."""
        parts = self._parts
        names = set(parts.entries(0))
        for rank in range(1, len(parts.layouts)):
            other = set(parts.entries(rank))
            if other != names:
                raise MismatchError(
                    f"{self._where}: ranks 0 and {rank} hold different parts: {sorted(names ^ other)}; only as many "
                    "ranks as wrote it can restore it"
                )
            for name in sorted(names - self._deciding.keys()):
                first, second = parts.part(0, name), parts.part(rank, name)
                assert first is not None
                assert second is not None
                for path, ours, theirs in differences(first, second, name):
                    raise MismatchError(
                        f"{self._where}: {path} is {ours} on rank 0 and {theirs} on rank {rank}, so there is no value "
                        f"for {self._world_size} ranks; restore with as many ranks as wrote it, keep it out of the "
                        "state, or give the part a method load_from_ranks(states, world)"
                    )

    def _compare_tensors(self, reader: BoxReader) -> None:
        """Tensors in one piece that several ranks wrote: they must hold the same bytes."""
        for tensor in self._tensors:
            holders = [
                rank
                for rank, named in enumerate(self._parts.named)
                if named[tensor.name].nbytes and named[tensor.name].shard is None
            ]
            if tensor.shard is not None or len(holders) < 2 or tensor.name in self._first_ranks:
                continue
            first = dense_bytes(reader, holders[0], self._parts.named[holders[0]][tensor.name])
            for rank in holders[1:]:
                if dense_bytes(reader, rank, self._parts.named[rank][tensor.name]) != first:
                    raise MismatchError(
                        f"{self._where}: {tensor.name} differs between ranks {holders[0]} and {rank}, so there is no "
                        f"value for {self._world_size} ranks; restore with as many ranks as wrote it, keep it out of "
                        "the state, make it equal on all ranks before a save, or take rank 0's buffers "
                        "(resume_buffers='rank0'), as DistributedDataParallel does"
                    )


def used_blocks(node: Node, tags: str = "TA") -> set[int]:
    """Numbers of the blocks that tensors in a tree lie in."""
    tag = node[0]
    if tag == "H":
        return used_blocks(node[1], tags)
    if tag in "TA":
        return {node[1]} - {-1} if tag in tags else set()
    if tag == "m":
        return used_blocks(node[1], tags)
    if tag in "lteE":
        return {number for child in node[1] for number in used_blocks(child, tags)}
    if tag in "doC":
        return {number for _, value in node[1] for number in used_blocks(value, tags)}
    return set()


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
    value = repr(unflatten(Layout(["d", [[["s", "x"], node]]], (), 0), [], "a value")["x"])
    return value if len(value) <= 60 else f"{value[:57]}..."
