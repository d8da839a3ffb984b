"""How a rank trains in each way that the figure compares: one small interface, so that all are timed alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from lastgood.experiments.records.stellatrain import ALONE, LinksSettings, Way
from lastgood.sparse.engine import Engine

__all__ = ["Training", "build_model", "make_training"]

_LEARNING_RATE: Final = 0.01
_MOMENTUM: Final = 0.9
_POWERSGD_BEGINS: Final = 2
"""Its error feedback needs a plain iteration before, and DDP rebuilds its buckets after the first."""
_ENGINE_S: Final = 120.0


def build_model(settings: LinksSettings) -> nn.Module:
    """The network that is trained."""
    if settings.model == "resnet18":
        network: nn.Module = resnet18(num_classes=settings.classes)
        return network
    width = settings.size_px
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, settings.classes))


class Training(ABC):
    """One training of this rank, from its first iteration."""

    def __init__(self, settings: LinksSettings, seed: int) -> None:
        self.settings = settings
        torch.manual_seed(seed)  # all ranks begin with the same weights
        self.model = build_model(settings)
        dice = torch.Generator().manual_seed(1009 * seed + dist.get_rank() + 1)
        shape = (3, settings.size_px, settings.size_px) if settings.model == "resnet18" else (settings.size_px,)
        self._pictures = torch.randn((settings.batch, *shape), generator=dice)
        self._labels = torch.randint(settings.classes, (settings.batch,), generator=dice)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Of this rank's batch, which is always the same: nothing is learnt here."""
        return nn.functional.cross_entropy(model(self._pictures), self._labels)

    @abstractmethod
    def step(self) -> None:
        """One iteration."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it has beside memory."""


class _Alone(Training):
    """Forward and backward, without an update: sparse ones are shorter than the dense one that would stand here."""

    def step(self) -> None:
        self.model.zero_grad()
        self.loss(self.model).backward()


class _Ddp(Training):
    """DistributedDataParallel, with one of torch's communication hooks or none."""

    def __init__(self, settings: LinksSettings, seed: int, way: Way) -> None:
        super().__init__(settings, seed)
        name, _, rank = way.partition("-")
        more: dict[str, Any] = {}
        if name == "powersgd":
            # With several buckets its second all-reduce comes in another order on each rank, and Gloo aborts.
            model_mib = sum(one.nbytes for one in self.model.parameters()) / 2**20
            more["bucket_cap_mb"] = int(2 * model_mib) + 1
        self._ddp = DistributedDataParallel(self.model, **more)
        if name == "fp16":
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, int(rank), start_powerSGD_iter=_POWERSGD_BEGINS)
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "post":
            alone, _ = dist.new_subgroups(group_size=1)
            self._ddp.register_comm_hook(PostLocalSGDState(None, alone, 0), post_localSGD_hook)
            averager = PeriodicModelAverager(period=settings.average_every, warmup_steps=0)
            self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self._ddp).backward()
        self.optimizer.step()


class _Ours(Training):
    """Lastgood's engine, with the compressor and the staleness that the way names."""

    def __init__(self, settings: LinksSettings, seed: int, way: Way) -> None:
        super().__init__(settings, seed)
        compressor, _, staleness = way.partition("-")
        self._engine = Engine(
            self.model,
            self.optimizer,
            settings.compression,
            compressor,
            int(staleness),
            threads=settings.threads,
            timeout_s=_ENGINE_S,
        )

    def step(self) -> None:
        self._engine.backward(self.loss(self.model))
        self._engine.step()

    def close(self) -> None:
        self._engine.finish()
        self._engine.close()


def make_training(way: Way, settings: LinksSettings, seed: int) -> Training:
    """A training in one way; all ranks must make it at the same place."""
    if way == ALONE:
        return _Alone(settings, seed)
    if way.endswith(("-0", "-1")) and not way.startswith("powersgd"):
        return _Ours(settings, seed, way)
    return _Ddp(settings, seed, way)
