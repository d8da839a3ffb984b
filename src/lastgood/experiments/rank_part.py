"""What is different for a process that trains together with others: its model, its checkpointer, and that it waits."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.none import NoCheckpointing
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LastgoodError
from lastgood.experiments.ranks import writers_of
from lastgood.experiments.spec import RunSpec
from lastgood.state import state_digest
from lastgood.training.parallel import RankStream, shard, wrap_data_parallel
from lastgood.workloads.base import Workload

__all__ = ["COLLECTIVE_S", "JoinedPart", "Part"]

COLLECTIVE_S = 900.0
"""A rank that waits for the others for this long fails."""


class Part(Protocol):
    """One process's part in a run."""

    def parallelise(self, workload: Workload) -> None:
        """Make a workload that was just built this process's part of it."""

    def checkpointer(self, checkpoints: Path) -> Checkpointer:
        """The system, as this process uses it."""

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that the system would not give back. Called once, outside the measurement."""

    def meet(self) -> None:
        """Wait for the other processes."""


class JoinedPart:
    """Rank `dist.get_rank()` of several. torch.distributed is initialised by `join`."""

    def __init__(self, spec: RunSpec, *, restoring: bool) -> None:
        self._spec = spec
        self._restoring = restoring
        self._writers = writers_of(spec.system)
        self._wrapper: Any = None
        self.rank = dist.get_rank()

    @classmethod
    def join(cls, spec: RunSpec, local_rank: int, *, restoring: bool) -> JoinedPart:
        """Meet the other ranks where the launcher's environment says. Raises LastgoodError for too many or few."""
        if spec.device == "cuda":
            torch.cuda.set_device(local_rank)
        # Words between ranks and barriers go over gloo, also where gradients go over NCCL: no device has to wait then.
        backend = "gloo" if spec.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_S))
        if dist.get_world_size() != spec.ranks:
            raise LastgoodError(f"{dist.get_world_size()} ranks were started for a run of {spec.ranks}")
        return cls(spec, restoring=restoring)

    def parallelise(self, workload: Workload) -> None:
        """DDP or FSDP2, and this rank's part of the stream.

        All ranks seed their generators alike: a state that rank 0 writes for all is that of all.
        """
        workload.data = RankStream(workload.data, self.rank, self._spec.ranks)
        if self._spec.parallel == "fsdp2":
            shard(workload, self._spec.device)
        else:
            self._wrapper = wrap_data_parallel(workload)

    def checkpointer(self, checkpoints: Path) -> Checkpointer:
        """Where rank 0 writes for all, the others have none: they wait for it in the next exchange of gradients."""
        spec = self._spec
        kind = checkpointer_class(spec.system)
        if self._writers == "first" and self.rank != 0 and not self._restoring:
            return NoCheckpointing(checkpoints)
        own: dict[str, Any] = {}
        if self._writers == "each":
            own = {"rank": self.rank, "world_size": spec.ranks}
        elif self._writers == "peers":
            own = {"machine": self.rank, "machines": spec.ranks}
        found = kind(checkpoints, kind.Options.model_validate({**spec.knobs(), **own}))
        found.events_kept = None
        if self._writers == "peers":
            self._mark_traffic(found)
        return found

    def _mark_traffic(self, gemini: Any) -> None:
        from lastgood.checkpointers.gemini_memory.ddp import marked_all_reduce

        self._wrapper.register_comm_hook(gemini.traffic, marked_all_reduce)

    def check(self, state: dict[str, Any]) -> None:
        """Where rank 0 writes for all, its state must be all ranks'. Raises LastgoodError, naming another one."""
        if self._writers != "first":
            return
        digests: list[Any] = [None] * self._spec.ranks
        dist.all_gather_object(digests, state_digest(state))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise LastgoodError(
                f"{self._spec.title()}: rank {other}'s state is not rank 0's, which {self._spec.system} writes for "
                "all: it could not be restored"
            )

    def meet(self) -> None:
        """Wait for all ranks, at most `COLLECTIVE_S`."""
        dist.all_reduce(torch.zeros(1))
