"""Restores a checkpoint of several ranks into a training whose tensors are cut in another way, or by other ranks.

Each rank reads what it needs and no more: of every tensor the boxes that its own part shares with the parts that were
written, from where the ranks that wrote them keep them. Ranks do not talk to each other, but for what several fetch
(`sharing`). docs/resharding.md says what comes back on another number of ranks, and what is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.bounds import memory_for
from lastgood.checkpointers.ranks.box_reader import BoxReader
from lastgood.checkpointers.ranks.boxes import Overlap, full_runs
from lastgood.checkpointers.ranks.directories import Buffers, whole_checkpoints
from lastgood.checkpointers.ranks.parts import RankParts, differences, used_blocks
from lastgood.checkpointers.ranks.sharing import Sharing, join_sharing
from lastgood.checkpointers.slots.contents import NamedTensor
from lastgood.checkpointers.slots.live_tensors import LiveTensors, keeps_its_tensors
from lastgood.errors import (
    CheckpointError,
    CorruptCheckpoint,
    LastgoodError,
    MismatchError,
    NoCheckpoint,
    NoGoodCheckpoint,
    StorageError,
    WaitTimeout,
)
from lastgood.state import Layout, NewWorld, check_tree, load_tree, stateful_paths, unflatten
from lastgood.state.checked import loads_last
from lastgood.state.layout import Node
from lastgood.state.layout_rules import dtype_named
from lastgood.state.shards import Runs, describe_shard, wrap
from lastgood.storage.objects.s3 import S3Options

__all__ = ["FromRanks", "restore_ranks"]

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
    s3: S3Options | None = None,
    together: bool = False,
) -> int:
    """Read the newest checkpoint that all ranks of `job` hold into rank world[0] of world[1]; returns its step.

    `job` is a directory, or s3://BUCKET/PREFIX, which is reached with `s3`: only chunks that hold what this rank needs
    are fetched. With `together`, all ranks of torch.distributed do this now: what several need is fetched by one.
    With a `step`, only that one, whatever was judged. In a world of one rank, one that cannot be read is passed over
    with a warning; live tensors may then hold parts of it, until an older one is read over them. With
    ``buffers="rank0"`` buffers of modules may differ between the ranks that wrote it; those of rank 0 are taken.
    Ranks that restore at one time must find the same: nothing may be written into `job` meanwhile.

    Raises NoCheckpoint, NoGoodCheckpoint, CorruptCheckpoint, MismatchError (also for what another number of ranks
    cannot take), StorageError.
    """
    found = whole_checkpoints(job, s3)
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
            sharing = None
            if together and checkpoint.views[0].remote:
                sharing = join_sharing(f"{job}/{checkpoint.incarnation}-{checkpoint.step}", world, takes_part=True)
            reading.read(threads, sharing)
        except (CorruptCheckpoint, StorageError, WaitTimeout) as error:
            if world[1] > 1 and step is None:
                # The others may have read it: ranks of one training must not go on from two steps.
                older = [one.step for one in found if one.key < checkpoint.key]
                raise CorruptCheckpoint(
                    f"{job}: step {checkpoint.step} cannot be read on rank {world[0]}: {error}; end all ranks, make "
                    f"the state again, and name an older step on each of them (there are {older or 'none'})"
                ) from error
            _log.warning("%s; trying the checkpoint before it", error)
            unread.append(str(error))
            continue
        reading.load()
        return checkpoint.step
    if unread:
        mixed = "; the state in memory holds parts of it now, make it again" if touched else ""
        raise CorruptCheckpoint(f"{job}: no checkpoint can be read: {'; '.join([*unread, *refused])}{mixed}")
    if refused:
        raise NoGoodCheckpoint(f"{job}: {'; '.join(refused)}; name a step, or restore with good_only=False")
    raise NoCheckpoint(f"{job}: no checkpoint of step {step} of all ranks; steps {[one.step for one in found]}")


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
        self._deciding = {
            name: part
            for name, part in state.items()
            if self._new_world and callable(getattr(part, "load_from_ranks", None))
        }
        """Parts that know how to go on with another number of ranks (`lastgood.state.NewWorld`)."""
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
        for name, part in self._deciding.items():
            for rank in range(saved):
                node = parts.part(rank, name)
                if node is not None and node[0] != "m":
                    raise MismatchError(
                        f"{self._where}: {name}: the state holds an object ({type(part).__name__}), and rank {rank} of "
                        "the checkpoint something else"
                    )
        if self._new_world:
            self._compare_structure()
        layout = parts.layouts[self._base]
        kept = [pair for pair in layout.tree[1] if pair[0][1] not in self._deciding]
        self._layout = Layout(["d", kept], layout.block_bytes, 0, layout.version)
        shards = {tensor.part for named in parts.named for tensor in named.values() if tensor.shard is not None}
        self._live = LiveTensors(self._rest, shards)
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
            torch.zeros(size if number in self._array_blocks else 0, dtype=torch.uint8, device="cpu")
            for number, size in enumerate(layout.block_bytes)
        ]
        check_tree(self._rest, self._tree(), self._where, stateful_paths(self._layout))

    def read(self, threads: int, sharing: Sharing | None = None) -> None:
        """Fill the targets. Raises CorruptCheckpoint, StorageError, WaitTimeout; live tensors then hold a mixture.

        Raises MismatchError, with nothing changed, if the ranks' values of a tensor differ that is in one piece.
        """
        with self._parts.reader(threads, sharing) as reader:
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
        for name, part in sorted(self._deciding.items(), key=lambda item: loads_last(item[1])):
            try:
                part.load_from_ranks(self._states[name], world)
            except LastgoodError:
                raise
            except Exception as error:  # whatever a part of the user's own raises
                raise CheckpointError(
                    f"{self._where}: {name}: {type(part).__name__} could not be loaded: {type(error).__name__}: "
                    f"{error}; what comes before it is loaded, make the state again"
                ) from error

    def _choose(self, tensor: NamedTensor) -> list[tuple[int, Overlap]]:
        """Make the target of a tensor, and say which boxes of which ranks fill it."""
        like = self._live.like(tensor)
        target = self._live.memory(tensor.name)
        known = self._live.known(tensor.name)
        shape, dtype = tensor.whole_shape, dtype_named(tensor.dtype)
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
        place = (tensor.place, tensor.shard)
        if target is None and tensor.nbytes and place in self._by_place:  # a second name of one tensor
            self._targets[tensor.name] = self._by_place[place]
            return []
        # What is to be read is found before memory is taken for it: shapes alone may say anything.
        boxes = self._boxes(tensor, wanted) if all(wanted) else []
        if target is None:
            target = self._fresh(tensor, like, wanted, dtype)
            if tensor.nbytes:
                self._by_place[place] = target
        else:
            self.touches_live = True
        self._targets[tensor.name] = target
        return boxes

    def _boxes(self, tensor: NamedTensor, wanted: Runs) -> list[tuple[int, Overlap]]:
        """Which boxes of which ranks make up what is wanted of a tensor."""
        own = self._parts.source(self._base, tensor.name)
        alone = tensor.shard is None or own.runs == wanted
        if alone and (not self._new_world or tensor.name in self._first_ranks):
            # Plain tensors are each rank's own, and so is a part; what a rank left to another one comes from there.
            sources = [own]
        else:
            sources = self._parts.sources(tensor.name)
        return self._parts.cover(tensor.name, wanted, sources, self._rank, None if self._new_world else own.key)

    def _fresh(self, tensor: NamedTensor, like: Any, wanted: Runs, dtype: torch.dtype) -> torch.Tensor:
        sizes = tuple(sum(run[1] for run in runs) for runs in wanted)
        as_stored = like is None and tensor.shard is None and 0 not in tensor.shape
        extent = tensor.extent if as_stored else prod(sizes) * tensor.itemsize
        if extent > memory_for(self._parts.held_bytes):
            raise CorruptCheckpoint(
                f"{self._where}: {tensor.name} takes {extent} bytes, and all parts together {self._parts.held_bytes}"
            )
        if like is not None:
            return torch.empty_like(like._local_tensor, dtype=dtype)
        parameter = self._live.parameter(tensor)
        device = torch.device("cpu") if parameter is None else parameter.device
        if as_stored:
            return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=device)
        return torch.empty(sizes, dtype=dtype, device=device)

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
                if (known := named.get(tensor.name)) is not None and known.nbytes and known.shard is None
            ]
            if tensor.shard is not None or len(holders) < 2 or tensor.name in self._first_ranks:
                continue
            first = reader.dense_bytes(holders[0], self._parts.named[holders[0]][tensor.name])
            for rank in holders[1:]:
                if reader.dense_bytes(rank, self._parts.named[rank][tensor.name]) != first:
                    raise MismatchError(
                        f"{self._where}: {tensor.name} differs between ranks {holders[0]} and {rank}, so there is no "
                        f"value for {self._world_size} ranks; restore with as many ranks as wrote it, keep it out of "
                        "the state, make it equal on all ranks before a save, or take rank 0's buffers "
                        "(resume_buffers='rank0'), as DistributedDataParallel does"
                    )
