"""Workloads that train under a DeepSpeedEngine: ZeRO 1 to 3, and a pipeline of stages (DeepSpeed's own forms of both).

Each rank's state is its own: its partitions under ZeRO, its stage's layers in a pipeline.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError, LastgoodError
from lastgood.integrations.deepspeed_live import EngineCounters, LiveZero, import_deepspeed
from lastgood.training.parallel import loss_module
from lastgood.workloads.base import Batch, Workload

__all__ = ["cut_into_stages", "partition"]

_MOST: Final = 500_000_000
"""Elements of DeepSpeed's buckets, as it has them; fewer if the model has fewer."""


def partition(workload: Workload, stage: int, batch_size: int, device: str) -> None:
    """Train `workload` under ZeRO `stage` from now on, its state partitioned over all ranks.

    torch.distributed must be initialised, the optimizer must not have stepped. Raises ConfigError if DeepSpeed is
    missing, or has another interface.
    """
    deepspeed = _prepare(device)
    elements = min(_MOST, sum(parameter.numel() for parameter in workload.model.parameters()))
    zero = {
        "stage": stage,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements + elements % 2,
        # One update for all partitions, as all else here has one in a step.
        "sub_group_size": 10**12,
    }
    engine = _initialize(deepspeed, workload, loss_module(workload.model, workload.loss), batch_size, zero=zero)
    live = LiveZero(engine)
    update = _Update(live.optimizer)

    def step(next_batch: Callable[[], Batch], update_reached: Callable[[], None]) -> torch.Tensor:
        loss = engine(next_batch())
        engine.backward(loss)
        with update.expected(update_reached):
            engine.step()
        live.settle()
        found: torch.Tensor = loss.detach()
        return found

    workload.step, workload.weights, workload.derived = step, live.weights, live.model_tensors
    workload.extra["engine"] = EngineCounters(engine)


def cut_into_stages(workload: Workload, stages: int, batch_size: int, device: str) -> None:
    """Train a causal workload as a pipeline with a stage on each rank (Huang et al. 2019), cut by parameters.

    A step trains on as many micro-batches as there are stages, so that its batch is that of as many data-parallel
    ranks. The embedding, which is the output matrix too, lies on the first and on the last stage. Raises as
    `partition`, and ConfigError for a model of too few layers or one that casts.
    """
    from lastgood.workloads.causal import LEARNING_RATE
    from lastgood.workloads.causal_layers import causal_layers
    from lastgood.workloads.training_parts import adamw_with_warmup

    if workload.precision != "float32":
        raise ConfigError(f"{workload.name}: a pipeline trains in float32; leave the option precision out")
    deepspeed = _prepare(device)
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    cut = causal_layers(workload.model)
    # Every stage that has the embedding holds it alike; at the end the head takes the place of its own forward pass.
    tied = ("embedding", type(cut.embedding))
    specs = [
        _given(TiedLayerSpec, cut.embedding, *tied),
        *(_given(LayerSpec, layer, type(layer)) for layer in cut.layers),
        _given(TiedLayerSpec, cut.embedding, *tied, forward_fn=cut.head),
    ]
    if stages > len(specs):
        raise ConfigError(f"{workload.name} has {len(specs)} layers, too few for a pipeline of {stages} stages")
    module = PipelineModule(layers=specs, num_stages=stages, loss_fn=cut.loss)
    for spec in specs:
        spec.forget()
    workload.model, workload.loss = module, _no_loss
    workload.optimizer, workload.scheduler = adamw_with_warmup(module, LEARNING_RATE)
    engine = _initialize(deepspeed, workload, module, batch_size, micro_batches=stages)
    update = _Update(workload.optimizer)

    def step(next_batch: Callable[[], Batch], update_reached: Callable[[], None]) -> torch.Tensor:
        # Every rank draws all micro-batches, so that the position is one; stages without use for them drop them.
        tokens = [next_batch()["input_ids"] for _ in range(stages)]
        with update.expected(update_reached):
            loss = engine.train_batch(iter([(one, one) for one in tokens]))
        found: torch.Tensor = loss.detach().clone()
        return found

    workload.step = step
    workload.extra["engine"] = EngineCounters(engine)


def _prepare(device: str) -> Any:
    """Import DeepSpeed for this device and let it use the process group that there is."""
    os.environ["DS_ACCELERATOR"] = device
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = import_deepspeed()
    # Its transport through shared memory is for inference alone, and would be compiled for a minute here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if device == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _initialize(
    deepspeed: Any,
    workload: Workload,
    module: torch.nn.Module,
    batch_size: int,
    *,
    micro_batches: int = 1,
    zero: dict[str, Any] | None = None,
) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": sys.maxsize,
        # DeepSpeed's default is 1; nothing else here clips gradients.
        "gradient_clipping": 0.0,
        "zero_optimization": zero or {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=workload.optimizer,
        lr_scheduler=workload.scheduler,
        config=config,
        dist_init_required=False,
    )
    return engine


def _given(kind: Any, layer: torch.nn.Module, *arguments: Any, **more: Any) -> Any:
    """A specification, of DeepSpeed's class `kind`, of a layer that is there already and not built."""

    class Given(kind):  # type: ignore[misc] # DeepSpeed has no types, and `kind` is one of two of its classes
        layer: torch.nn.Module | None

        def build(self, log: bool = False) -> torch.nn.Module | None:
            del log
            return self.layer

        def forget(self) -> None:
            """PipelineModule keeps the specs of all stages, which would keep all their layers in memory."""
            self.layer = None

    spec = Given(*arguments, **more)
    spec.layer = layer
    return spec


def _no_loss(_: Batch) -> torch.Tensor:
    raise LastgoodError("a pipeline's stage has no loss of its own; the workload's step gives it")


class _Update:
    """Tells when an optimizer begins its update, which DeepSpeed does somewhere within its own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._tell: Callable[[], None] | None = None
        # Before a checkpointer's own hook, so that waiting for a copy is no part of the time before the update.
        optimizer.register_step_pre_hook(lambda *_: self._reached())

    @contextmanager
    def expected(self, tell: Callable[[], None]) -> Iterator[None]:
        """A block in which the update must come; `tell` is called then. Raises LastgoodError if it does not."""
        self._tell = tell
        yield
        if self._tell is not None:
            raise LastgoodError("DeepSpeed left an update out: gradients are infinite or no numbers; this run diverges")

    def _reached(self) -> None:
        if self._tell is not None:
            self._tell()
            self._tell = None
