"""A data-parallel training in one process, and what an extractor would make of its packets."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lastgood.mirror.conversation.places import Buckets, Expect, Incarnation, Learned, StepOpen
from lastgood.mirror.extract.slots import Filled
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.factory import Training

__all__ = ["MODELS", "SimulatedLife", "bytes_of", "job_of", "make_training", "same_state"]

HOOKS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Normed(torch.nn.Module):
    """A BatchNorm, a frozen part and a weight in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 18)
        self.norm = torch.nn.BatchNorm1d(18)
        self.conv = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.frozen = torch.nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, batch):
        hidden = torch.relu(self.norm(self.first(batch))).view(-1, 2, 3, 3)
        return self.last(self.frozen(self.conv(hidden).flatten(1)))


def norm_training(hook: str = "") -> Training:
    torch.manual_seed(7)
    model = Normed()
    trainable = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9, weight_decay=1e-3)
    return Training(model, optimizer, ddp={"hook": hook} if hook else {})


def adamw_training(hook: str = "") -> Training:
    torch.manual_seed(8)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    groups = [{"params": model[0].parameters(), "lr": 3e-3}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step)
    return Training(model, optimizer, scheduler, ddp={"hook": hook} if hook else {}, clip_norm=0.05)


def scaled_training(hook: str = "") -> Training:
    torch.manual_seed(9)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return Training(model, optimizer, None, scaler, clip_norm=0.5)


class Skipping(torch.nn.Module):
    """Leaves a layer out in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.sometimes = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(5, 2)
        self.skips = False

    def forward(self, batch):
        hidden = torch.tanh(self.first(batch))
        return self.last(hidden if self.skips else self.sometimes(hidden))


def skipping_training(hook: str = "") -> Training:
    torch.manual_seed(10)
    model = Skipping()
    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.01), ddp={"find_unused_parameters": True})


def twins_training(hook: str = "") -> Training:
    """Two parameters of one size; no state but the weights."""
    torch.manual_seed(11)
    layers = [torch.nn.Linear(6, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 6, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.05), ddp={"hook": hook} if hook else {})


MODELS = {
    "norm": norm_training,
    "adamw": adamw_training,
    "scaled": scaled_training,
    "skipping": skipping_training,
    "twins": twins_training,
}


def make_training(kind: str, hook: str = "") -> Training:
    return MODELS[kind](hook)


def job_of(kind: str, hook: str = ""):
    return describe(make_training(kind, hook), ranks=2, steps=60)


def bytes_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Row-major, one after another."""
    return np.concatenate(
        [one.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for one in tensors] or [np.empty(0, np.uint8)]
    )


def memory_bytes(tensor: torch.Tensor) -> np.ndarray:
    """As it lies in memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    return tensor.detach().permute(order).contiguous().reshape(-1).view(torch.uint8).numpy()


class SimulatedLife:
    """One incarnation. `states[i]` is the whole state after `i` updates of the job."""

    def __init__(self, training: Training, hook: str = "", done: int = 0, number: int = 0, overflows=()) -> None:
        self.training = training
        self.model, self.optimizer = training.model, training.optimizer
        self.hook = HOOKS.get(hook)
        self.done = done
        self.first = done
        self.number = number
        self.overflows = overflows
        self.states = {}
        self.losses = {}
        self._collectives = itertools.count()
        self._trainable = [one for one in self.model.parameters() if one.requires_grad]
        self._names = {id(one): name for name, one in self.model.named_parameters()}

    @property
    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer}
        if self.training.scheduler is not None:
            parts["scheduler"] = self.training.scheduler
        if self.training.scaler is not None:
            parts["scaler"] = self.training.scaler
        return parts

    def _filled(self, kind, content, dtype, **more):
        content = np.ascontiguousarray(content).copy()
        return Filled(Expect(next(self._collectives), kind, len(content), dtype, **more), content)

    def begin(self) -> Iterator[object]:
        yield Incarnation(self.number, True)
        yield Learned(2, (("10.0.0.1", 0), ("10.0.0.2", 1)))
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        yield from self._broadcast("parameters", named, -1)
        yield Buckets(0, (tuple(range(len(self._trainable))),), False)

    def _broadcast(self, kind, named, step):
        for dtype in dict.fromkeys(one.dtype for _, one in named):
            held = [(name, one) for name, one in named if one.dtype == dtype]
            names = tuple(name for name, _ in held)
            yield self._filled(
                kind, bytes_of([one for _, one in held]), str(dtype).removeprefix("torch."), step=step, tensors=names
            )

    def step(self) -> Iterator[object]:
        """One update; what is seen of it, in order."""
        step = self.done - self.first
        yield StepOpen(step)
        buckets = (tuple(range(len(self._trainable))),)
        if step >= 1:  # DDP's rebuilt buckets
            order = list(reversed(range(len(self._trainable))))
            buckets = (tuple(order[:1]), tuple(order[1:]))
        if step == 1:
            yield Buckets(1, buckets, True)
        if any(True for _ in self.model.buffers()):
            yield from self._broadcast("buffers", list(self.model.named_buffers()), step)
        self._backward()
        wire = []
        for one in self._trainable:
            if one.grad is None:
                wire.append(memory_bytes(torch.zeros_like(one)))
                continue
            held = one.grad if self.hook is None else one.grad.to(self.hook)
            wire.append(memory_bytes(held))
            one.grad.copy_(held)
        dtype = "float32" if self.hook is None else str(self.hook).removeprefix("torch.")
        for number, bucket in enumerate(buckets):
            content = np.concatenate([wire[index] for index in bucket])
            yield self._filled("gradient", content, dtype, step=step, bucket=number)
        if self.training.ddp.get("find_unused_parameters"):
            used = np.array([0 if one.grad is None else 2 for one in self._trainable], np.int32)
            yield self._filled("used", used.view(np.uint8), "int32", step=step)
        self._update()

    def _backward(self) -> None:
        generator = torch.Generator().manual_seed(1000 + self.done)
        batch = torch.randn(8, 6, generator=generator)
        target = torch.randn(8, 2, generator=generator)
        self.optimizer.zero_grad()
        self.model.skips = self.done % 2 == 1
        loss = torch.nn.functional.mse_loss(self.model(batch), target)
        self.losses[self.done + 1] = loss.item()
        scaler = self.training.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        if self.done + 1 in self.overflows:
            self._trainable[0].grad.view(-1)[1] = float("inf")

    def _update(self) -> None:
        training = self.training
        if training.scaler is not None:
            training.scaler.unscale_(self.optimizer)
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.clip_norm)
        if training.scaler is None:
            self.optimizer.step()
        else:
            training.scaler.step(self.optimizer)
            training.scaler.update()
        if training.scheduler is not None:
            training.scheduler.step()
        self.done += 1
        self.states[self.done] = self.copied()

    def copied(self):
        return copy.deepcopy({name: part.state_dict() for name, part in self.state.items()})


def same_state(one, other, path="") -> list[str]:
    """Where two trees of state_dicts differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        same = alike and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
        return [] if same else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{path}.{key} is on one side" for key in one.keys() ^ other.keys()]
        return found + [
            bad for key in one.keys() & other.keys() for bad in same_state(one[key], other[key], f"{path}.{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [
            bad for i, (a, b) in enumerate(zip(one, other, strict=True)) for bad in same_state(a, b, f"{path}[{i}]")
        ]
    if callable(one) and callable(other):
        return []
    return [] if one == other else [f"{path}: {one!r} is not {other!r}"]
