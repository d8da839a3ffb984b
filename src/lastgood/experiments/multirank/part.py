"""What is different for a process that trains together with others: its model, its checkpointer, and that it waits."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.baselines.none import NoCheckpointing
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LastgoodError, NoCheckpoint
from lastgood.experiments.machine.disturbance import processes_naming
from lastgood.experiments.records.kinds import load_function
from lastgood.experiments.records.spec import Parallel, RunSpec
from lastgood.experiments.runs.part import Part
from lastgood.experiments.services.registry import trainer_options
from lastgood.experiments.services.service import Meter
from lastgood.experiments.systems.over_ranks import writers_of
from lastgood.state import state_digest
from lastgood.training.parallel import RankStream, shard, wrap_data_parallel
from lastgood.workloads.base import Workload

__all__ = ["COLLECTIVE_S", "JoinedPart"]

T = TypeVar("T")

COLLECTIVE_S = 900.0
"""A rank that waits for the others for this long fails."""


def _data_parallel(workload: Workload, spec: RunSpec) -> Callable[[Any], None]:
    del spec
    wrapper = wrap_data_parallel(workload)
    return lambda system: system.watch(wrapper)


def _sharded(workload: Workload, spec: RunSpec) -> None:
    shard(workload, spec.device)


def _zero(stage: int) -> _Way:
    def way(workload: Workload, spec: RunSpec) -> Callable[[Any], None]:
        from lastgood.training.deepspeed_engine import partition

        partition(workload, stage, _batch_size(spec), spec.device)
        return _mark_deepspeed

    return way


def _pipeline(workload: Workload, spec: RunSpec) -> Callable[[Any], None]:
    from lastgood.training.deepspeed_engine import cut_into_stages

    cut_into_stages(workload, spec.ranks, _batch_size(spec), spec.device)
    return _mark_deepspeed


def _mark_deepspeed(system: Any) -> None:
    from lastgood.integrations.deepspeed_traffic import mark_communication

    mark_communication(system.traffic)


def _batch_size(spec: RunSpec) -> int:
    """Of one rank, or of one micro-batch."""
    return int(str(spec.workload_options["batch_size"]))


_Way = Callable[[Workload, RunSpec], Callable[[Any], None] | None]
_WAYS: Final[Mapping[Parallel, _Way]] = {
    "ddp": _data_parallel,
    "fsdp2": _sharded,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "pipeline": _pipeline,
}
"""Each spreads a workload that was just built over all ranks, and returns what shows its communication to a
checkpointer that follows it."""


class JoinedPart(Part):
    """Rank `dist.get_rank()` of several. torch.distributed is initialised by `join`."""

    def __init__(self, spec: RunSpec, *, restoring: bool, local_rank: int = 0) -> None:
        super().__init__(spec)
        self._local_rank = local_rank
        self._restoring = restoring
        self._writers = writers_of(spec.system, spec.parallel)
        self._workload: Workload | None = None
        self._show: Callable[[Any], None] | None = None
        """Shows the training's communication to a checkpointer; None until the workload is built."""
        self.rank = dist.get_rank()

    @classmethod
    def join(cls, spec: RunSpec, local_rank: int, *, restoring: bool) -> JoinedPart:
        """Meet the other ranks where the launcher's environment says. Raises LastgoodError for too many or few."""
        if spec.device == "cuda":
            torch.cuda.set_device(local_rank)
        # Messages between ranks and barriers go over gloo, also if gradients go over NCCL: no device has to wait then.
        backend = "gloo" if spec.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_S))
        if dist.get_world_size() != spec.ranks:
            raise LastgoodError(f"{dist.get_world_size()} ranks were started for a run of {spec.ranks}")
        return cls(spec, restoring=restoring, local_rank=local_rank)

    def parallelise(self, workload: Workload) -> None:
        """The way of the spec, and this rank's part of the stream, which a pipeline's ranks all have whole.

        All ranks seed their generators alike: a state that rank 0 writes for all is that of all.
        """
        if self._spec.parallel != "pipeline":
            workload.data = RankStream(workload.data, self.rank, self._spec.ranks)
        self._show = _WAYS[self._spec.parallel](workload, self._spec)
        self._workload = workload

    def checkpointer(self, checkpoints: Path) -> Checkpointer:
        """If rank 0 writes for all, the others have none: they wait for it in the next exchange of gradients."""
        spec = self._spec
        kind = checkpointer_class(spec.system)
        if self._writers == "first" and self.rank != 0 and not self._restoring:
            return NoCheckpointing(checkpoints)
        own = trainer_options(spec, checkpoints)
        over_shards = kind.traits.over_shards
        if self._writers == "together" and over_shards is not None:
            kind = cast("type[Checkpointer]", load_function(over_shards))
        elif self._writers == "each":
            own |= {"rank": self.rank, "world_size": spec.ranks}
        elif self._writers == "apart":
            checkpoints = rank_directory(checkpoints, self.rank)
        elif self._writers == "peers":
            # They agree in each save: a kill between two ranks' saves must not leave them at different steps.
            own |= {"machine": self.rank, "machines": spec.ranks, "peers": "own"}
        found = kind(checkpoints, kind.Options.model_validate({**spec.system_options, **own}))
        found.events_kept = None
        if self._writers in ("shadows", "peers") and self._show is not None:
            self._show(found)
        return found

    def common_step(self, checkpointer: Checkpointer) -> int | None:
        """If ranks write apart, the newest step that every rank has; None: the system finds it out.

        Raises NoCheckpoint if a rank has none.
        """
        if self._writers != "apart":
            return None
        newest = self.gather(checkpointer.latest())
        lacking = [rank for rank, step in enumerate(newest) if step is None]
        if lacking:
            raise NoCheckpoint(f"{self._spec.title()}: ranks {lacking} have no checkpoint, ranks' newest: {newest}")
        return min(step for step in newest if step is not None)

    def check(self, state: dict[str, Any]) -> None:
        """If rank 0 writes for all, its state must be all ranks'. Raises LastgoodError, naming another one."""
        if self._writers != "first":
            return
        digests = self.gather(state_digest(state))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise LastgoodError(
                f"{self._spec.title()}: rank {other}'s state is not rank 0's, which {self._spec.system} writes for "
                "all: it could not be restored"
            )

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, as DDP does in each forward pass.

        Between two steps each rank has statistics of its own batch, which nothing ever reads: a state that rank 0
        writes for all is that of all.
        """
        if self._spec.parallel == "ddp" and self._workload is not None:
            for buffer in self._workload.model.buffers():
                dist.broadcast(buffer, 0)

    def begin_meters(self, checkpoints: Path) -> Meter:
        """Rank 0 reports for all."""
        return super().begin_meters(checkpoints) if self.rank == 0 else dict

    def writer(self, reader: Checkpointer, checkpoints: Path) -> Checkpointer:
        """All ranks restore; if rank 0 writes for all, the others are done with their systems then."""
        self._restoring = False
        if self._writers != "first" or self.rank == 0:
            return reader
        reader.close()
        return self.checkpointer(checkpoints)

    def barrier(self) -> None:
        """Wait for all ranks, at most `COLLECTIVE_S`."""
        dist.all_reduce(torch.zeros(1))

    def follow(self, decided: T) -> T:
        """What rank 0 decided. Waits for it, at most `COLLECTIVE_S`."""
        found: list[Any] = [decided]
        dist.broadcast_object_list(found, 0)
        return cast("T", found[0])

    def gather(self, value: T) -> list[T]:
        """Each rank's value. Waits for all, at most `COLLECTIVE_S`."""
        found: list[Any] = [None] * self._spec.ranks
        dist.all_gather_object(found, value)
        return found

    def processes_to_watch(self, folder: Path) -> frozenset[int] | None:
        """The first rank of each host looks. Launchers, ranks and services have the run's folder on their lines."""
        return processes_naming(folder.name) | {os.getpid()} if self._local_rank == 0 else None
