"""A data-parallel training of a workload of ours, each step of which shadows keep (Checkmate): one rank of it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lastgood._lazy import dist
from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.checkpointers.events import Outcome
from lastgood.errors import NoCheckpoint
from lastgood.gradients.shadow.launch_env import TrainerPlace
from lastgood.training.loop import TrainingLoop
from lastgood.training.parallel import RankStream, wrap_data_parallel
from lastgood.workloads.base import Workload

__all__ = ["Trained", "join_trainers", "leave_trainers", "train_with_shadows"]


@dataclass(frozen=True)
class Trained:
    """What one rank's incarnation came to."""

    first_step: int
    """That it went on from; 0 for a new training."""
    last_step: int
    losses: list[float]
    """This rank's, of every step of this incarnation."""
    durable: int
    """Saves that all shadows held in the end."""
    failed: int
    digest: str
    """Of the live state after the last step."""


def join_trainers(place: TrainerPlace, device: Literal["cpu", "cuda"], timeout_s: float) -> None:
    """Meet the other trainers where MASTER_ADDR and MASTER_PORT say, without shadows that a launcher counts in."""
    # Messages between ranks go over gloo, also if gradients go over NCCL.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, rank=place.rank, world_size=place.ranks, timeout=timeout)


def leave_trainers() -> None:
    """Wait for the other trainers: rank 0 may serve them a store, which ends with it."""
    dist.barrier()
    dist.destroy_process_group()


def train_with_shadows(
    workload: Workload,
    checkpointer: Checkmate,
    place: TrainerPlace,
    steps: int,
    device: Literal["cpu", "cuda"],
    report: Callable[[str], None],
) -> Trained:
    """Go on with what the shadows hold, or begin, and train up to step `steps`; every step is a checkpoint.

    All ranks call it, after `join_trainers`; batches are shared out over them. Raises what
    `Checkmate.restore` does, but for NoCheckpoint. A save that fails ends nothing: it is counted.
    """
    workload.data = RankStream(workload.data, place.rank, place.ranks)
    checkpointer.watch(wrap_data_parallel(workload))
    checkpointer.events_kept = None
    loop = TrainingLoop(workload, checkpointer, 1, device)
    loop.heartbeat = report
    try:
        first = loop.restore()
        report(f"restored step {first} from the shadows")
    except NoCheckpoint as error:
        report(f"begins again: {error}")
        first = 0
    loop.start()
    try:
        losses = loop.train(max(0, steps - first)).losses
        digest = loop.digest()
        checkpointer.drain()
    finally:
        checkpointer.close()
    outcomes = [event.outcome for event in checkpointer.events]
    return Trained(
        first, loop.progress.step, losses, outcomes.count(Outcome.DURABLE), outcomes.count(Outcome.FAILED), digest
    )
