"""One workload over several ranks: each trains on another part of the stream, and all hold, or share, one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.workloads.base import Batch, BatchStream, Workload

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["RankStream", "SampleStream", "loss_module", "shard", "wrap_data_parallel"]


class RankStream(BatchStream):
    """Rank r's part of a stream: its batch i is batch i * ranks + r of the whole.

    The position counts global batches, so it is one number on all ranks, and the state of a data-parallel training is
    the same everywhere.
    """

    def __init__(self, whole: BatchStream, rank: int, ranks: int) -> None:
        super().__init__()
        self._whole = whole
        self._rank = rank
        self._ranks = ranks

    def batch(self, index: int) -> Batch:
        """This rank's share of global batch `index`."""
        return self._whole.batch(index * self._ranks + self._rank)


class SampleStream(BatchStream):
    """Rank r's samples of a stream that all ranks take from, each as many as it is told.

    Sample s is row s % b of the stream's batch s // b, for its batches of b. In each iteration rank 0 has the next
    samples of all, rank 1 those after them, and so on. The position counts samples of all ranks: it is one number, no
    sample is left out or comes twice whatever the sizes are, and another number of ranks may go on from it.
    """

    def __init__(self, whole: BatchStream, rank: int, ranks: int) -> None:
        super().__init__()
        self._whole, self._rank, self._ranks = whole, rank, ranks
        self._newest: tuple[int, Batch] | None = None
        self._size: int | None = None

    @property
    def batch_samples(self) -> int:
        """Of a batch of the stream."""
        if self._size is None:
            self._size = len(next(iter(self._batch(0).values())))
        return self._size

    def batch(self, index: int) -> Batch:
        """This rank's share of global batch `index`, if all are as large as the stream's."""
        return self._whole.batch(index * self._ranks + self._rank)

    def take_share(self, samples: Sequence[int] | None) -> Batch:
        """This rank's samples if the ranks take so many each in an iteration; None: a batch of the stream each."""
        sizes = [self.batch_samples] * self._ranks if samples is None else samples
        found = self._samples(self.consumed + sum(sizes[: self._rank]), sizes[self._rank])
        self.consumed += sum(sizes)
        return found

    def __next__(self) -> Batch:
        return self.take_share(None)

    def _samples(self, first: int, count: int) -> Batch:
        size, pieces = self.batch_samples, []
        while count:
            number, begin = divmod(first, size)
            end = min(size, begin + count)
            pieces.append({name: part[begin:end] for name, part in self._batch(number).items()})
            first, count = first + end - begin, count - (end - begin)
        if len(pieces) == 1:
            return pieces[0]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def _batch(self, index: int) -> Batch:
        if self._newest is None or self._newest[0] != index:
            self._newest = index, self._whole.batch(index)
        return self._newest[1]

    def state_dict(self) -> dict[str, int]:
        """The position, in samples."""
        return {"samples": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved position, also that of `RankStream`, which counts batches of all ranks."""
        if "samples" in state:
            self.consumed = int(state["samples"])
        else:
            self.consumed = int(state["consumed"]) * self._ranks * self.batch_samples


def wrap_data_parallel(workload: Workload) -> DistributedDataParallel:
    """Average the gradients of `workload` over all ranks from now on (Li et al. 2020); returns torch's wrapper.

    The wrapper is around the loss, which calls the model; the workload's own model, and so its state and the names in
    it, stay as they are. torch.distributed must be initialised.
    """
    from torch.nn.parallel import DistributedDataParallel

    # A blob's ballast never gets a gradient, which DDP must be told to look for.
    wrapper = DistributedDataParallel(
        loss_module(workload.model, workload.loss), find_unused_parameters=workload.name == "blob"
    )
    workload.loss = wrapper
    return wrapper


def loss_module(model: torch.nn.Module, loss: Callable[[Batch], torch.Tensor]) -> torch.nn.Module:
    """A module that goes from a batch to its loss, and holds `model`, which `loss` calls."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Batch) -> torch.Tensor:
            return loss(batch)

    return Loss()


def shard(workload: Workload, device: Literal["cpu", "cuda"]) -> None:
    """Spread every parameter of a causal model over all ranks, layer by layer (FSDP2; Zhao et al. 2023).

    Its optimizer is made again, over the shards; it must not have stepped. Raises ConfigError for other models: their
    optimizers are not known here.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lastgood.workloads.causal import LEARNING_RATE
    from lastgood.workloads.training_parts import adamw_with_warmup

    if workload.name not in ("opt", "bloom"):
        raise ConfigError(f"fsdp2 is for opt and bloom, not for {workload.name}; use ddp")
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    (layers,) = (module for module in workload.model.modules() if isinstance(module, torch.nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(workload.model, mesh=mesh)
    workload.optimizer, workload.scheduler = adamw_with_warmup(workload.model, LEARNING_RATE)
