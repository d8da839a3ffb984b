"""Hugging Face's Trainer with a checkpointer of Lastgood's: it goes on after the last batch. docs/huggingface.md.

The Trainer makes model, optimizer and loader ready inside `train()`, and calls its own methods in between. So
`use_lastgood` puts its own around some of them, on this Trainer alone: the loader is counted when it is made, the
state comes back when the training begins, and a step is finished once the Trainer has logged and evaluated it.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lastgood._lazy import torch
from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.base import Checkpointer
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, WaitTimeout
from lastgood.integrations.frameworks import (
    Accumulation,
    attach_training,
    check_methods,
    claim,
    import_framework,
    made_checkpointer,
    put_around,
    refuse_folder,
    warn_if_untried,
)
from lastgood.state import Checked, RngState
from lastgood.text import parse_json

if TYPE_CHECKING:
    from lastgood.checkpointers.attach.data_facts import DataChanged

__all__ = ["use_lastgood"]

_log = logging.getLogger("lastgood")

_TRIED = ("5.24", "5.24")
_METHODS = {
    "train": ["resume_from_checkpoint", "trial"],
    "get_train_dataloader": [],
    "training_step": [],
    "_init_training_state": ["max_steps", "resume_from_checkpoint"],
    "_load_rng_state": ["checkpoint"],
    "_maybe_log_save_evaluate": ["tr_loss"],
    "_run_epoch": [
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
}
"""What this module puts its own around, with the parameters that it relies on."""
_FIELDS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Of TrainerState. The others follow from the arguments."""
_HISTORY_BYTES = 256 * 1024 * 1024


def use_lastgood(
    trainer: Any,
    directory: Path | str,
    interval_steps: int | None = None,
    *,
    system: str = "pccheck",
    data_changed: DataChanged = "refuse",
    unattached: Literal["refuse", "allow"] = "refuse",
    **options: Any,
) -> Checkpointer:
    """Let a Trainer keep its state in `directory`. Call it once, before `trainer.train()`, on every rank.

    `train()` then begins, or goes on after the last batch of the newest checkpoint, and returns as it does otherwise.

    Args:
        trainer: a ``transformers.Trainer``, of any subclass.
        directory: of the checkpoints; it need not exist.
        interval_steps: updates between checkpoints, 50 unless `interval_s` is given; accumulated batches count once.
        system: the name of a system.
        data_changed: as for `attach`.
        unattached: as for `attach`.
        options: `interval_s` (seconds between checkpoints), `max_unsaved_s`, and those of the system, by name.

    Returns the checkpointer, for `verdict`, `events` and `status`; it is closed when `train()` ends.

    Raises ConfigError if the installed transformers has another interface, or for arguments of the Trainer whose
    meaning could not be kept: each by its name.
    """
    transformers = import_framework("transformers", "huggingface")
    import_framework("accelerate", "huggingface")
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(
            f"use_lastgood: a {type(trainer).__name__} is no transformers.Trainer; for another loop on accelerate take "
            "lastgood.integrations.accelerate"
        )
    check_methods(transformers.Trainer, _METHODS, transformers.__version__, _TRIED)
    warn_if_untried("transformers", transformers.__version__, _TRIED)
    _check_arguments(trainer)
    checkpointer = made_checkpointer(system, directory, interval_steps, options)
    refuse_folder(checkpointer.directory, trainer.args.output_dir, "the Trainer's output_dir")
    before = trainer.__dict__.get("_lastgood")
    if before is not None:
        raise ConfigError(
            f"use_lastgood: this Trainer has a checkpointer in {before.checkpointer.directory} already, and one "
            "training has one; make a new Trainer for another one"
        )
    claim(trainer.accelerator, checkpointer, "Trainer's Accelerator")
    trainer._lastgood = _Saves(trainer, checkpointer, {"data_changed": data_changed, "unattached": unattached})
    return checkpointer


def _check_arguments(trainer: Any) -> None:
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise ConfigError(
            "use_lastgood: this Trainer trains with DeepSpeed, which keeps its state itself: use "
            "lastgood.integrations.deepspeed on its engine"
        )
    if trainer.is_fsdp_enabled:
        raise ConfigError(
            "use_lastgood: this Trainer trains with FSDP, whose parts of the state are not kept yet; leave `fsdp` out, "
            "or shard in a loop of your own (docs/resharding.md)"
        )
    refused = {
        "auto_find_batch_size": "it begins a training again with other batches",
        "enable_jit_checkpoint": "it takes SIGTERM for the Trainer's own checkpoint, and Lastgood takes it as well",
        "ignore_data_skip": "Lastgood goes on after the last batch in any case",
    }
    for name, why in refused.items():
        if getattr(args, name, False):
            raise ConfigError(f"use_lastgood: TrainingArguments({name}=True): {why}; leave it out")


class _Later:
    """A number of epochs for `range` that is known only once the state was restored."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask

    def __index__(self) -> int:
        return self._ask()


class _TrainerState(Checked):
    """What a Trainer keeps beside model, optimizer and schedule: counts, the best metric, logs, callbacks."""

    saved_keys = ("numbers", "history", "callbacks", "loss")

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.stopped = False
        """Whether a callback had ended the training, before its last step."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the logs as one text, so that the layout does not change with each of them."""
        trainer = self._trainer
        state = trainer.state
        stopped = self.stopped or (trainer.control.should_training_stop and state.global_step < state.max_steps)
        return {
            "numbers": {name: _plain(getattr(state, name)) for name in _FIELDS if hasattr(state, name)}
            | {"current_flos": float(trainer.current_flos), "logged": trainer._globalstep_last_logged}
            | {"stopped": bool(stopped)},
            "history": json.dumps(_without_odd_numbers(state.log_history)),
            "callbacks": {name: [one.state()["attributes"] for one in held] for name, held in self._callbacks()},
            "loss": trainer._tr_loss.detach(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Into the Trainer, whose training has begun and has made no step yet."""
        trainer = self._trainer
        numbers = saved["numbers"]
        for name in _FIELDS:
            if name in numbers:
                setattr(trainer.state, name, numbers[name])
        history = parse_json(saved["history"], "huggingface: the logs", most_bytes=_HISTORY_BYTES)
        trainer.state.log_history = _with_odd_numbers(history)
        for name, held in self._callbacks():
            for callback, attributes in zip(held, saved["callbacks"].get(name, ()), strict=False):
                for key, value in attributes.items():
                    setattr(callback, key, value)
        trainer._tr_loss.copy_(saved["loss"])
        # The mean loss that train() returns is that of its own steps, as after a resume of the Trainer's.
        trainer._total_loss_scalar = -float(saved["loss"])
        trainer._globalstep_last_logged = int(numbers["logged"])
        trainer.current_flos = numbers["current_flos"]
        trainer._initial_global_step = trainer.state.global_step
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        self.stopped = bool(numbers["stopped"])

    def _callbacks(self) -> list[tuple[str, list[Any]]]:
        from transformers.trainer_callback import ExportableState

        found: dict[str, list[Any]] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback)
        return list(found.items())


class _Saves:
    """One Trainer's checkpointer, and what was put around the Trainer's methods."""

    def __init__(self, trainer: Any, checkpointer: Checkpointer, attach: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self.checkpointer = checkpointer
        self._attach = attach
        self._state = _TrainerState(trainer)
        self._data: CountedLoader | None = None
        self._loss: Any = None
        self._generators: dict[str, Any] | None = None
        """Where they stood in the checkpoint, until the first epoch of a resumed training begins."""
        self._steps_in_epoch = 0
        self._began_at = self._counted_steps = 0
        _let_counted_loaders_skip()
        for name in ("train", *_PUT_AROUND):
            put_around(trainer, name, getattr(self, f"_{name.lstrip('_')}"))
        callback = _callback_class()(self)
        trainer.callback_handler.callbacks.insert(0, callback)  # others find the state that came back

    # -- in the order of a training --------------------------------------------------------------------------------

    def _train(self, own: Any, resume_from_checkpoint: Any = None, trial: Any = None, *more: Any, **named: Any) -> Any:
        if resume_from_checkpoint not in (None, False):
            raise ConfigError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}): this Trainer keeps its state in "
                f"{self.checkpointer.directory} and goes on from there by itself; call train() without it, or begin "
                "from the Trainer's own checkpoint in a Trainer without use_lastgood"
            )
        if trial is not None:
            raise ConfigError(
                "train(trial=...): trials of a search begin again and again, and one directory keeps one training; "
                "leave use_lastgood out of a search"
            )
        if self.checkpointer.in_use:  # a training that an error has ended, begun again in this process
            self.checkpointer.close()
        return own(None, None, *more, **named)

    def _get_train_dataloader(self, own: Any) -> Any:
        if self.checkpointer.in_use:  # somebody's look at it, beside the training
            return own()
        self._data = self.checkpointer.count(own())
        return self._data

    def _init_training_state(self, own: Any, *given: Any, **named: Any) -> tuple[Any, int]:
        own(*given, **named)
        return _Later(lambda: self.checkpointer.data.epoch), 0

    def begin(self) -> None:
        """Everything is made and at step 0: restore it, or begin."""
        trainer = self._trainer
        args = trainer.args
        self._state.stopped, self._loss, self._generators = False, None, None
        step = attach_training(
            self.checkpointer,
            "huggingface",
            self._state,
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            accumulation=Accumulation(
                args.gradient_accumulation_steps, self._data, refuse=self._attach["data_changed"] == "refuse"
            ),
            **self._attach,
        )
        self._began_at = self._counted_steps = step
        if step:
            self._generators = RngState().state_dict()

    def begin_epoch(self) -> None:
        """Callbacks that draw between two epochs draw again, from where the generators stood."""
        if self._generators is not None and not self.checkpointer.data.batches:
            RngState().load_state_dict(self._generators)
            self._generators = None

    def _run_epoch(self, own: Any, **given: Any) -> None:
        trainer, data = self._trainer, self.checkpointer.data
        if self._is_over():
            trainer.control.should_training_stop = True
            return
        self._steps_in_epoch = given["steps_in_epoch"]
        if self._generators is not None:  # in the middle of an epoch: an evaluation at the start may have drawn
            RngState().load_state_dict(self._generators)
            self._generators = None
            given |= {
                "resume_from_checkpoint": _FROM_LASTGOOD,
                "epochs_trained": given["epoch"],
                "steps_trained_in_current_epoch": data.batches,
            }
        own(**given)
        ends = trainer.control.should_training_stop or given["epoch"] + 1 >= trainer.state.num_train_epochs
        if not trainer.control.should_training_stop or data.batches >= self._steps_in_epoch:
            data.end_epoch()
        if trainer.state.global_step > self._counted_steps:
            self._finish_step()
        if ends:
            self._finish_training()

    def _load_rng_state(self, own: Any, checkpoint: Any) -> None:
        if checkpoint != _FROM_LASTGOOD:
            own(checkpoint)

    def _training_step(self, own: Any, *given: Any, **named: Any) -> Any:
        loss = own(*given, **named)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        return loss

    def _maybe_log_save_evaluate(self, own: Any, *given: Any, **named: Any) -> None:
        own(*given, **named)
        trainer = self._trainer
        stops = trainer.control.should_training_stop or trainer.control.should_epoch_stop
        last = stops or self.checkpointer.data.batches >= self._steps_in_epoch
        # The epoch's last step is finished after what the Trainer does at its end.
        if trainer.state.global_step > self._counted_steps and not last:
            self._finish_step()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        state = self._trainer.state
        return self._state.stopped or state.global_step >= state.max_steps

    def _finish_step(self) -> None:
        loss, self._loss = self._loss, None
        self._counted_steps = self.checkpointer.step(loss)
        if self._counted_steps != self._trainer.state.global_step:
            raise CheckpointError(
                f"huggingface: the Trainer is at step {self._trainer.state.global_step}, and {self._counted_steps} "
                "were counted: something else than the Trainer changes its global_step"
            )

    def _finish_training(self) -> None:
        """Keep the last step as well: the Trainer may load other weights next (load_best_model_at_end)."""
        step, events = self._trainer.state.global_step, self.checkpointer.events
        if step > self._began_at and (not events or events[-1].step != step):
            self.checkpointer.save(step)
        try:
            self.checkpointer.drain()
        except WaitTimeout as error:
            _log.error("huggingface: the last checkpoints are not durable: %s", error)

    def end(self) -> None:
        """The Trainer is done."""
        self.checkpointer.close()


_PUT_AROUND = (
    "get_train_dataloader",
    "_init_training_state",
    "_run_epoch",
    "_load_rng_state",
    "training_step",
    "_maybe_log_save_evaluate",
)
_FROM_LASTGOOD = "the checkpoint of Lastgood"
"""Stands for a folder of the Trainer's, where that asks whether a training was resumed."""


def _callback_class() -> type:
    from transformers import TrainerCallback

    class LastgoodCallback(TrainerCallback):  # type: ignore[misc] # transformers carries no types here
        """Begins and ends a training's checkpoints."""

        def __init__(self, saves: _Saves) -> None:
            self._saves = saves

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            del args, state, control, named
            self._saves.begin()

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            del args, state, control, named
            self._saves.begin_epoch()

        def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            del args, state, control, named
            self._saves.end()

    return LastgoodCallback


def _let_counted_loaders_skip() -> None:
    """A counted loader comes back to its place by itself, where the Trainer makes another one that skips batches."""
    import transformers.trainer as module

    own = module.skip_first_batches
    if getattr(own, "of_lastgood", False):
        return

    @functools.wraps(own)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader if isinstance(dataloader, CountedLoader) else own(dataloader, num_batches)

    skip_first_batches.of_lastgood = True  # type: ignore[attr-defined]  # a mark on the function
    module.skip_first_batches = skip_first_batches


# -- logs as a text ----------------------------------------------------------------------------------------------------

_ODD = "not a number of JSON's"


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as Python's."""
    return value.item() if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy" else value


def _without_odd_numbers(value: Any) -> Any:
    value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {_ODD: repr(value)}
    if isinstance(value, dict):
        return {str(key): _without_odd_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_odd_numbers(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _with_odd_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ODD}:
            if value[_ODD] not in ("nan", "inf", "-inf"):
                raise CorruptCheckpoint(f"huggingface: the logs: {value[_ODD]!r:.80} is no number")
            return float(value[_ODD])
        return {key: _with_odd_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_odd_numbers(item) for item in value]
    return value
