"""A training of a workload of ours by the sparse engine (StellaTrain): one rank of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.base import Checkpointer
from lastgood.sparse.engine import Engine
from lastgood.sparse.ranks import Ranks
from lastgood.state import state_digest
from lastgood.training.parallel import RankStream, SampleStream
from lastgood.workloads.base import Batch, BatchStream, Workload

__all__ = ["SparseTrained", "noise_like", "train_sparse"]

_TOLD_S = 10.0


@dataclass(frozen=True)
class SparseTrained:
    """What one rank's incarnation came to."""

    first_step: int
    """That it went on from; 0 for a new training."""
    last_step: int
    losses: list[float]
    """This rank's, of every step of this incarnation."""
    iterations_per_s: float
    """Without the first step, which makes buffers and waits for the others; 0 if there is no other."""
    sent_bytes: int
    """By this rank, what it passes on for others included."""
    durable: int
    failed: int
    """Checkpoints."""
    setting: dict[str, Any] | None
    """The controller's that held at the end."""
    digest: str
    """Of the live model and optimizer at the end, with all that was in flight applied."""


class _Noise(BatchStream):
    def __init__(self, like: Batch) -> None:
        super().__init__()
        self._like = like

    def batch(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        return {
            name: torch.randint(int(one.max()) + 1, one.shape, dtype=one.dtype, generator=generator)
            for name, one in self._like.items()
        }


def noise_like(data: BatchStream) -> BatchStream:
    """Random numbers in the shapes, types and range of the first batch of `data`."""
    return _Noise(data.batch(0))


def train_sparse(
    workload: Workload,
    checkpointer: Checkpointer,
    ranks: Ranks,
    options: dict[str, Any],
    steps: int,
    device: str,
    report: Callable[[str], None],
) -> SparseTrained:
    """Go on from this rank's checkpoints, or begin, and train up to step `steps`; all ranks call it.

    `options` are those of `Engine`. Batches are shared out over the ranks; with `telemetry` among the options samples
    are, so the workload must take batches of any size. Raises what `Engine` and `Checkpointer.attach` do.
    """
    place = workload.data, ranks.rank, ranks.ranks
    data: BatchStream = RankStream(*place) if options.get("telemetry") is None else SampleStream(*place)
    model = workload.model.train()
    engine = Engine(model, workload.optimizer, ranks=ranks, **options)
    try:
        parts = {"scheduler": workload.scheduler, **workload.extra}
        first = checkpointer.attach(model=model, optimizer=engine.optimizer, engine=engine, stream=data, **parts)
        report(f"goes on from step {first}" if first else "begins")
        losses: list[float] = []
        began = told = time.monotonic()
        step = first
        batches = engine.batches(data)
        while step < steps:
            batch = next(batches)
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            loss = workload.loss(moved)
            engine.backward(loss)
            engine.step()
            if workload.scheduler is not None:
                workload.scheduler.step()
            step += 1
            checkpointer.step()
            losses.append(float(loss.detach()))
            now = time.monotonic()
            if len(losses) == 1:
                began = now
            if now - told > _TOLD_S:
                told = now
                report(f"step {step} of {steps}: loss {losses[-1]:.4g}, {(len(losses) - 1) / (now - began):.3g}/s")
        lasted = time.monotonic() - began
        engine.finish()
        checkpointer.drain()
        digest = state_digest({"model": model, "optimizer": workload.optimizer})
        facts, setting = engine.facts()["exchange"], engine.facts()["setting"]
        outcomes = [event.outcome.value for event in checkpointer.events]
    finally:
        checkpointer.close()
        engine.close()
    return SparseTrained(
        first_step=first,
        last_step=step,
        losses=losses,
        iterations_per_s=(len(losses) - 1) / lasted if len(losses) > 1 else 0.0,
        sent_bytes=0 if facts is None else facts.sent_bytes,
        durable=outcomes.count("durable"),
        failed=outcomes.count("failed"),
        setting=None if setting is None else setting.model_dump(mode="json"),
        digest=digest,
    )
