"""What a training's factory function returns, and how it is called by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import ConfigError

__all__ = ["Training", "call_factory", "training_of"]


@dataclass
class Training:
    """The objects of a training before its first step.

    A factory may also return a tuple of the first ones, or a mapping with these keys.
    """

    model: torch.nn.Module
    """What is given to DistributedDataParallel, or the wrapper itself."""
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of DistributedDataParallel, and `hook`: "fp16" or "bf16"."""
    clip_norm: float | None = None
    clip_norm_type: float = 2.0
    clip_value: float | None = None
    reductions_per_step: int = 1
    steps_per_schedule: int = 1
    """Updates for each scheduler.step()."""
    batches_per_step: int = 1
    batches_consumed: int = 0
    """At the first step."""
    name: str = ""


def call_factory(path: str) -> Training:
    """Import ``package.module:function`` and call it. Raises ConfigError for a path or a result that is none."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"--factory is MODULE:FUNCTION, not {path!r}")
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"--factory {path}: {error}") from error
    except AttributeError:
        raise ConfigError(f"--factory {path}: {module} has no {name}") from None
    return training_of(function(), path)


def training_of(made: Any, whose: str) -> Training:
    """What a factory returned, as one thing. Raises ConfigError, naming `whose`."""
    if isinstance(made, Training):
        found = made
    else:
        known = [one.name for one in fields(Training)]
        if isinstance(made, tuple) and 2 <= len(made) <= 4:
            made = dict(zip(known, made, strict=False))
        if not isinstance(made, Mapping) or set(made) - set(known) or not {"model", "optimizer"} <= set(made):
            raise ConfigError(
                f"{whose} returns a {type(made).__name__}; it is (model, optimizer[, scheduler[, scaler]]), or a "
                f"mapping of {', '.join(known)}"
            )
        found = Training(**made)
    if not isinstance(found.model, torch.nn.Module) or not isinstance(found.optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{whose}: model and optimizer are torch's own kinds, in this order")
    return found
