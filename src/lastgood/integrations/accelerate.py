"""A training loop on Hugging Face's accelerate with a checkpointer of Lastgood's. docs/accelerate.md.

The Accelerator holds all that was prepared: models, optimizers, schedules, loaders, the loss scaler, and what was
registered for its own checkpoints. `use_lastgood` attaches that, counts the batches of the training's loader, and
counts a step where the Accelerator made an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.base import Checkpointer
from lastgood.errors import ConfigError
from lastgood.integrations.frameworks import (
    Accumulation,
    attach_training,
    claim,
    import_framework,
    made_checkpointer,
    warn_if_untried,
)
from lastgood.state import Checked

if TYPE_CHECKING:
    from lastgood.checkpointers.attach.data_facts import DataChanged

__all__ = ["Training", "use_lastgood"]

_TRIED = ("1.15", "1.15")
_HELD = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler", "step", "gradient_state")
"""What an Accelerator holds, and is looked at here."""
_WAYS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Kinds of distributed training whose state each rank has complete."""


def use_lastgood(
    accelerator: Any,
    directory: Path | str,
    interval_steps: int | None = None,
    *,
    data: Any = None,
    system: str = "pccheck",
    data_changed: DataChanged = "refuse",
    unattached: Literal["refuse", "allow"] = "refuse",
    parts: Mapping[str, Any] | None = None,
    **options: Any,
) -> Training:
    """Attach what an Accelerator has prepared, and resume it if there is something to resume from.

    Call it after `accelerator.prepare(...)`, on every rank, before the first step. Then iterate over ``.data`` of what
    is returned instead of the loader, and call its ``.step()`` at the end of the loop's body, also for micro-batches.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        directory: of the checkpoints; it need not exist.
        interval_steps: updates between checkpoints, 50 unless `interval_s` is given.
        data: the training's loader, if several were prepared.
        system: the name of a system.
        data_changed: as for `attach`.
        unattached: as for `attach`.
        parts: what else is to be kept, by name, as for `attach`.
        options: `interval_s` (seconds between checkpoints), `max_unsaved_s`, and those of the system, by name.

    Raises ConfigError if nothing was prepared, it is not clear which loader is the training's, or the way of training
    is one whose state is not kept here; and what `attach` raises.
    """
    accelerate = import_framework("accelerate", "huggingface")
    if not isinstance(accelerator, accelerate.Accelerator):
        raise ConfigError(f"use_lastgood: a {type(accelerator).__name__} is no accelerate.Accelerator")
    lacking = [name for name in _HELD if not hasattr(accelerator, name)]
    if lacking:
        raise ConfigError(
            f"accelerate {accelerate.__version__} is installed, whose Accelerator has no {', '.join(lacking)}: this "
            f"Lastgood knows that of {_TRIED[0]} to {_TRIED[1]}; install one of those, or a newer Lastgood"
        )
    warn_if_untried("accelerate", accelerate.__version__, _TRIED)
    way = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
    if way not in _WAYS:
        other = "lastgood.integrations.deepspeed keeps it" if way == "DEEPSPEED" else "docs/resharding.md has FSDP2"
        raise ConfigError(f"use_lastgood: this Accelerator trains by {way}, which is not kept here; {other}")
    own = _parts(accelerator)
    taken = sorted(set(own) & set(parts or ()) | set(parts or ()) & {"accelerate", "accumulation", "scaler"})
    if taken:
        raise ConfigError(f"use_lastgood: parts={taken} are what the Accelerator holds already; give yours other names")
    checkpointer = made_checkpointer(system, directory, interval_steps, options)
    claim(accelerator, checkpointer, "Accelerator")
    counted = checkpointer.count(_loader(accelerator, data))
    step = attach_training(
        checkpointer,
        "accelerate",
        _Steps(accelerator),
        **own,
        scaler=accelerator.scaler,
        accumulation=Accumulation(accelerator.gradient_accumulation_steps, counted, refuse=data_changed == "refuse"),
        data_changed=data_changed,
        unattached=unattached,
        **(parts or {}),
    )
    return Training(accelerator, checkpointer, step)


class Training:
    """An Accelerator's training with its checkpointer; what is not here, the checkpointer answers (`save`, `events`).

    Args:
        accelerator: the one that makes updates.
        checkpointer: attached.
        resumed: the step that it went on from; 0 if it begins.
    """

    def __init__(self, accelerator: Any, checkpointer: Checkpointer, resumed: int) -> None:
        self._accelerator = accelerator
        self.checkpointer = checkpointer
        self.resumed = resumed
        self._step = resumed

    def __getattr__(self, name: str) -> Any:
        """What the checkpointer has."""
        if name.startswith("__") or "checkpointer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.checkpointer, name)

    @property
    def data(self) -> CountedLoader:
        """The training's loader, counting; iterate over this one."""
        return self.checkpointer.data

    @property
    def epoch(self) -> int:
        """Finished passes over the data: ``for epoch in range(training.epoch, epochs)``."""
        return self.checkpointer.data.epoch

    def step(self, loss: Any = None) -> int:
        """Note the end of the loop's body, save if it is time to, and return the number of updates so far.

        In the middle of a window of accumulation nothing is counted. `loss` is as for `Checkpointer.step`.
        """
        if self._accelerator.sync_gradients:
            self._step = self.checkpointer.step(loss)
        return self._step

    def close(self) -> None:
        """Wait for what is in progress, and give everything back."""
        self.checkpointer.close()


class _Steps(Checked):
    """The Accelerator's own count of micro-batches, by which it knows when a window ends."""

    saved_keys = ("step",)

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """The number."""
        return {"step": int(self._accelerator.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self._accelerator.step = int(state["step"])


def _parts(accelerator: Any) -> dict[str, Any]:
    """All that was prepared or registered, each as an entry of its own. Raises ConfigError if there is no model."""
    found: dict[str, Any] = {}
    for name, held in (
        ("model", accelerator._models),
        ("optimizer", accelerator._optimizers),
        ("scheduler", accelerator._schedulers),
        ("object", accelerator._custom_objects),
    ):
        for number, part in enumerate(held):
            found[name if len(held) == 1 else f"{name}_{number}"] = part
    if not accelerator._models:
        raise ConfigError(
            "use_lastgood: this Accelerator has prepared no model; call accelerator.prepare(model, optimizer, loader) "
            "before, so that there is something to keep"
        )
    return found


def _loader(accelerator: Any, given: Any) -> Any:
    """The training's loader. Raises ConfigError if there are several, or the given one was not prepared."""
    prepared = accelerator._dataloaders
    if given is None:
        if len(prepared) == 1:
            return prepared[0]
        raise ConfigError(
            f"use_lastgood: this Accelerator has prepared {len(prepared)} loaders, and one is the training's; name it, "
            "as use_lastgood(accelerator, directory, data=loader)"
        )
    if not any(given is one for one in prepared):
        raise ConfigError(
            "use_lastgood: data is a loader that this Accelerator has not prepared: its batches would be on another "
            "device and not shared out to ranks; pass what accelerator.prepare(loader) returned"
        )
    return given
