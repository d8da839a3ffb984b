"""Real probes of a workload for a profile of the loss's lag (StellaTrain, section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Callable

from lastgood._lazy import torch
from lastgood.errors import ConfigError, DataError
from lastgood.sparse.engine import Engine
from lastgood.sparse.ranks import Ranks
from lastgood.training.parallel import SampleStream
from lastgood.workloads.base import Workload

__all__ = ["Probed", "probe"]

_JUDGED = 0.25
"""The last part of the samples, over which the loss is averaged: nothing has been trained on them before."""


class Probed:
    """What a probe came to."""

    def __init__(self, loss: float, steps: int, step_s: float) -> None:
        self.loss, self.steps, self.step_s = loss, steps, step_s


def probe(
    build: Callable[[], Workload],
    device: str,
    *,
    samples: int,
    compression: float,
    compressor: str,
    staleness: int,
    part_samples: int,
    first_sample: int,
) -> Probed:
    """Train a new workload on `part_samples` samples of its data from `first_sample` on, in batches of `samples`.

    In one process, which stands for all workers: its batch is that of all, and it keeps as much of the gradient as all
    of them together. All probes see the same samples in the same order; the loss is the mean over the last quarter of
    them. The learning rate is the workload's own, as it is in a training whose batch a controller changes.

    Raises ConfigError if the loss is not finite in the end, or the workload cannot be cut into other batches.
    """
    workload = build()
    data = SampleStream(workload.data, 0, 1)
    data.consumed = first_sample
    model = workload.model.train()
    engine = Engine(model, workload.optimizer, compression, compressor, staleness, ranks=Ranks(0, 1))
    judged, weight, steps = 0.0, 0, part_samples // samples
    began = time.perf_counter()
    try:
        for step in range(steps):
            batch = {name: tensor.to(device) for name, tensor in data.take_share((samples,)).items()}
            try:
                loss = workload.loss(batch)
            except (RuntimeError, ValueError) as error:
                raise DataError(f"{workload.name} takes no batch of {samples} samples: {error}") from error
            engine.backward(loss)
            engine.step()
            if workload.scheduler is not None:
                workload.scheduler.step()
            if (step + 1) * samples > part_samples * (1 - _JUDGED):
                judged += float(loss.detach()) * samples
                weight += samples
    finally:
        engine.close()
    found = judged / weight
    if not torch.isfinite(torch.tensor(found)):
        raise ConfigError(
            f"{workload.name}: the loss is {found} after {steps} steps of {samples} samples at compression "
            f"{compression:g}; nothing can be said of its lag"
        )
    return Probed(found, steps, (time.perf_counter() - began) / steps)
