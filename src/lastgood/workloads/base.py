"""What a workload is: one factory that gives a model, its optimizer and an endless, deterministic stream of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from lastgood._lazy import torch
from lastgood.models import HashedOptions

__all__ = ["Batch", "BatchStream", "Setting", "Stepper", "Workload", "WorkloadOptions"]

Batch = dict[str, "torch.Tensor"]


class WorkloadOptions(HashedOptions, ABC):
    """Base of every workload's options. All sizes are explicit, so that a record says what ran."""

    optimizer_moments: ClassVar[int] = 0
    """Tensors of the parameters' size that the optimizer keeps (SGD with momentum 1, Adam 2)."""

    @abstractmethod
    def parameters(self) -> int:
        """Number of trainable parameters, from a formula that needs no torch; a test holds it to the real model."""

    def state_bytes(self) -> int:
        """Predicted size of a checkpoint in bytes: fp32 parameters and optimizer moments."""
        return 4 * self.parameters() * (1 + self.optimizer_moments)

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that lie beside the state in a step: fp32, one for each parameter."""
        return 4 * self.parameters()


@dataclass(frozen=True)
class Setting:
    """What a workload is built in, beside its options; see `lastgood.workloads.registry.build_workload`."""

    data_dir: Path
    data_path: Path | None
    seed: int
    device: str


class BatchStream(ABC):
    """An endless iterator of batches whose position is the number of batches *consumed*, and part of the state.

    Batch `i` depends on the data, the seed and `i` alone, never on what was drawn before or on a worker's timing, so
    a restored position gives the same batches as a run that was never stopped.
    """

    def __init__(self) -> None:
        self.consumed = 0
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[Batch]] | None = None
        self._pinned = False

    @abstractmethod
    def batch(self, index: int) -> Batch:
        """Batch number `index` (from 0), on the CPU."""

    def prefetch(self, pinned: bool) -> None:
        """From here on make each batch in a thread while the one before it is trained on. For after all forks.

        `pinned` ones are copied to a CUDA device while the host goes on.
        """
        self._pinned = pinned
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lastgood-batches")

    def _make_ahead(self, index: int) -> Batch:
        found = self.batch(index)
        return {name: part.pin_memory() for name, part in found.items()} if self._pinned else found

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        found = None
        if self._ahead is not None:
            index, pending = self._ahead
            self._ahead = None
            wait([pending])  # also for one that nobody wants any more: batches are made one at a time
            found = pending.result() if index == self.consumed else None
        if found is None:
            found = self.batch(self.consumed)
        self.consumed += 1
        if self._thread is not None:
            self._ahead = self.consumed, self._thread.submit(self._make_ahead, self.consumed)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self.consumed = int(state["consumed"])


class Stepper(Protocol):
    """One complete training step: forward, backward, the optimizer's update, its schedule, gradients cleared."""

    def __call__(self, next_batch: Callable[[], Batch], update_reached: Callable[[], None]) -> torch.Tensor:
        """Take it, and return the scalar loss, detached.

        `next_batch` gives the next batch of `Workload.data`, on the device. `update_reached` is called once, with all
        gradients there and no weight changed yet.
        """


@dataclass
class Workload:
    """One training job, ready to step.

    `loss` runs the forward pass on a batch that is already on the device and returns the scalar loss.
    `extra` holds further parts of the state (objects with state_dict/load_state_dict), such as a recurrent memory.
    An engine that trains in the model's place brings a `step` of its own, which does not ask for `loss`.
    """

    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    data: BatchStream
    loss: Callable[[Batch], torch.Tensor]
    data_facts: dict[str, str]
    """What the data is: keys `name`, `source` and `sha256`, for the run record."""
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    precision: str = "float32"
    """Of the forward pass: `loss` casts by itself, and what does not call it must."""
    extra: dict[str, Any] = field(default_factory=dict)
    step: Stepper | None = None
    """None: `loss`, its backward pass, and the optimizer's own step."""
    weights: torch.nn.Module | None = None
    """What the optimizer updates, if that is not the model's own memory (a shard of it); loading it makes the
    model's weights again."""
    derived: Callable[[], dict[str, torch.Tensor]] | None = None
    """The model's tensors that are made from `weights`: in no checkpoint, but a restore must bring them back too."""

    def state(self) -> dict[str, Any]:
        """All that this training needs to go on, but for the random number generators (the loop adds those)."""
        weights = self.model if self.weights is None else self.weights
        state: dict[str, Any] = {"model": weights, "optimizer": self.optimizer, "data": self.data}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler
        state.update(self.extra)
        return state
