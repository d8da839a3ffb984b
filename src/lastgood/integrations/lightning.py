"""Lightning's Trainer and Fabric with a checkpointer of Lastgood's. docs/lightning.md.

Lightning's own checkpoints are made in the middle of what it does after a batch, and it mends its counters when one is
loaded. Here a step is finished when Lightning is done with the batch (validation included), or, after the last one of
an epoch, with the epoch. There all counters agree, and a resumed training needs them as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.base import Checkpointer
from lastgood.errors import ConfigError, WaitTimeout
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

if TYPE_CHECKING:
    from lastgood.checkpointers.attach.data_facts import DataChanged

__all__ = ["Lastgood", "use_lastgood"]

_log = logging.getLogger("lastgood")

_TRIED = ("2.6", "2.6")
_OF_FIT = {"on_advance_start": [], "on_advance_end": [], "state_dict": [], "load_state_dict": ["state_dict"]}
_OF_EPOCH = {"on_advance_end": ["data_fetcher"], "on_run_start": ["data_fetcher"], "reset": []}
"""Methods of Lightning's loops that are relied on, with their parameters."""
_MIDWAY = "restarted_mid_epoch"
"""What Lightning calls an epoch that was begun in another life: nothing that begins an epoch is done again."""
_WAYS = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies under which each rank has the state complete."""


def Lastgood(  # noqa: N802 - the name of a callback, which is made once Lightning is imported
    directory: Path | str,
    interval_steps: int | None = None,
    *,
    system: str = "pccheck",
    data_changed: DataChanged = "refuse",
    unattached: Literal["refuse", "allow"] = "refuse",
    parts: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A callback for ``lightning.Trainer(callbacks=[...])`` that keeps its training in `directory`, and resumes it.

    `fit()` then begins, or goes on after the last batch of the newest checkpoint. Give it as the first callback.

    Args:
        directory: of the checkpoints; it need not exist.
        interval_steps: updates between checkpoints, 50 unless `interval_s` is given; accumulated batches count once.
        system: the name of a system.
        data_changed: as for `attach`.
        unattached: as for `attach`.
        parts: what else is to be kept, by name, as for `attach`.
        options: `interval_s` (seconds between checkpoints), `max_unsaved_s`, and those of the system, by name.

    The callback's ``checkpointer`` has `verdict`, `events` and `status`. Raises ConfigError if Lightning is missing or
    has another interface; `fit()` raises it for what would not come back.
    """
    lightning = import_framework("lightning", "lightning")
    import_framework("lightning.pytorch", "lightning")
    loops = import_framework("lightning.pytorch.loops", "lightning")
    check_methods(loops._FitLoop, _OF_FIT, lightning.__version__, _TRIED)
    check_methods(loops._TrainingEpochLoop, _OF_EPOCH, lightning.__version__, _TRIED)
    warn_if_untried("lightning", lightning.__version__, _TRIED)
    checkpointer = made_checkpointer(system, directory, interval_steps, options)
    given = {"data_changed": data_changed, "unattached": unattached}
    return _callback_class(lightning.pytorch.Callback)(_Saves(checkpointer, given, dict(parts or {})))


def use_lastgood(
    fabric: Any,
    directory: Path | str,
    interval_steps: int | None = None,
    *,
    data: Any = None,
    parts: Mapping[str, Any],
    system: str = "pccheck",
    data_changed: DataChanged = "refuse",
    unattached: Literal["refuse", "allow"] = "refuse",
    **options: Any,
) -> Checkpointer:
    """Attach a training on Fabric, and resume it if there is something to resume from.

    Call it after `fabric.setup(...)` and `fabric.setup_dataloaders(...)`, on every rank. Then iterate over ``.data`` of
    what is returned, and call its ``.step(loss)`` after each update.

    Args:
        fabric: a ``lightning.Fabric``.
        directory: of the checkpoints; it need not exist.
        interval_steps: updates between checkpoints, 50 unless `interval_s` is given.
        data: the training's loader.
        parts: what is to be kept, by name: model, optimizer, schedule. A loss scaler of Fabric's is added.
        system: the name of a system.
        data_changed: as for `attach`.
        unattached: as for `attach`.
        options: `interval_s` (seconds between checkpoints), `max_unsaved_s`, and those of the system, by name.

    Raises ConfigError if the strategy is one whose state is not kept here, and what `attach` raises.
    """
    lightning = import_framework("lightning", "lightning")
    if not isinstance(fabric, lightning.Fabric):
        raise ConfigError(f"use_lastgood: a {type(fabric).__name__} is no lightning.Fabric")
    warn_if_untried("lightning", lightning.__version__, _TRIED)
    _check_strategy(fabric.strategy)
    checkpointer = made_checkpointer(system, directory, interval_steps, options)
    claim(fabric, checkpointer, "Fabric")
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    attach_training(
        checkpointer,
        "fabric",
        {"version": str(lightning.__version__)},
        **parts,
        scaler=scaler,
        data=data,
        data_changed=data_changed,
        unattached=unattached,
    )
    return checkpointer


def _check_strategy(strategy: Any) -> None:
    way = type(strategy).__name__
    if way not in _WAYS:
        other = "lastgood.integrations.deepspeed keeps it" if "DeepSpeed" in way else "docs/resharding.md has FSDP2"
        raise ConfigError(f"lightning: this training goes by {way}, whose state is not kept here; {other}")


class _LightningState(Checked):
    """What a Trainer keeps beside modules and optimizers: its loops' counters, and the state of callbacks."""

    saved_keys = ("loops", "callbacks", "stopped")

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer = trainer
        self._own = own

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as Lightning's own checkpoints hold them."""
        loops = self._trainer.fit_loop.state_dict()
        loops["state_dict"] = {key: value for key, value in loops["state_dict"].items() if key != "combined_loader"}
        return {
            "loops": loops,
            "callbacks": {
                callback.state_key: state
                for callback in self._trainer.callbacks
                if callback is not self._own and (state := callback.state_dict())
            },
            "stopped": bool(self._trainer.should_stop),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Into the Trainer, whose training has begun and has made no step yet."""
        fit_loop = self._trainer.fit_loop
        fit_loop.load_state_dict(saved["loops"])
        for loop in _loops(fit_loop):  # nothing has to be mended: the counters agree
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        for callback in self._trainer.callbacks:
            if callback is not self._own and callback.state_key in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][callback.state_key])
        self._trainer.should_stop = bool(saved["stopped"])


def _loops(loop: Any) -> list[Any]:
    """A loop and those inside it."""
    kind = import_framework("lightning.pytorch.loops", "lightning")._Loop
    return [loop, *(one for value in vars(loop).values() if isinstance(value, kind) for one in _loops(value))]


class _Batches:
    """A counted loader as Lightning is to see it: without a state, which its own checkpoints would hold as well."""

    def __init__(self, counted: CountedLoader) -> None:
        self._counted = counted

    def __iter__(self) -> Iterator[Any]:
        return iter(self._counted)

    def __len__(self) -> int:
        return len(self._counted)

    def __getattr__(self, name: str) -> Any:
        """What the loader has."""
        if name.startswith("__") or "_counted" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._counted.loader, name)


class _Saves:
    """One callback's checkpointer, and what is put around the methods of the Trainer's loops during a fit."""

    def __init__(self, checkpointer: Checkpointer, given: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        self.checkpointer = checkpointer
        self._given = given
        self._parts = parts
        self._loss: Any = None
        self._put: list[Any] = []
        self._midway = False
        """Whether the next epoch is one that was begun in another life."""
        self._generators: dict[str, Any] | None = None
        self._began_at = self._counted = self._updates = 0

    def _check(self, trainer: Any) -> None:
        """Raise ConfigError for what would not come back."""
        if trainer.ckpt_path is not None:
            raise ConfigError(
                f"fit(ckpt_path={trainer.ckpt_path!r}): this training goes on from {self.checkpointer.directory} by "
                "itself; call fit() without it, or begin from Lightning's own checkpoint without the callback Lastgood"
            )
        if trainer.reload_dataloaders_every_n_epochs:
            raise ConfigError(
                "lightning: Trainer(reload_dataloaders_every_n_epochs=...) makes other loaders, in which there is no "
                "place to come back to; leave it out"
            )
        _check_strategy(trainer.strategy)
        for callback in trainer.checkpoint_callbacks:
            refuse_folder(
                self.checkpointer.directory, getattr(callback, "dirpath", None), "a ModelCheckpoint's dirpath"
            )

    def begin(self, trainer: Any, callback: Any) -> None:
        """Everything is made, and no step done: restore it, or begin."""
        self._check(trainer)
        fit_loop = trainer.fit_loop
        claim(trainer, self.checkpointer, "Trainer")
        counted = self._count(fit_loop)
        named = {"model": trainer.lightning_module}
        for name, held in (
            ("optimizer", trainer.optimizers),
            ("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
        ):
            named |= {name if len(held) == 1 else f"{name}_{number}": part for number, part in enumerate(held)}
        step = attach_training(
            self.checkpointer,
            "lightning",
            _LightningState(trainer, callback),
            **named,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            accumulation=Accumulation(
                trainer.accumulate_grad_batches, counted, refuse=self._given["data_changed"] == "refuse"
            ),
            **self._given,
            **self._parts,
        )
        self._began_at = self._counted = step
        self._updates = trainer.global_step
        self._midway = bool(counted.batches)
        self._generators = RngState().state_dict() if step else None
        epoch_loop = fit_loop.epoch_loop
        self._put = [
            put_around(fit_loop, "on_advance_start", lambda own: self._epoch_begins(fit_loop, own)),
            put_around(fit_loop, "on_advance_end", lambda own: self._epoch_ends(trainer, own)),
            put_around(epoch_loop, "reset", self._reset),
            put_around(epoch_loop, "on_advance_end", lambda own, *given: self._batch_ends(trainer, own, *given)),
        ]
        if trainer.current_epoch == 0:
            iter(fit_loop._data_fetcher)  # else the epoch's loop does

    def _count(self, fit_loop: Any) -> CountedLoader:
        combined = fit_loop._combined_loader
        if len(combined.flattened) != 1:
            raise ConfigError(
                f"lightning: this training goes through {len(combined.flattened)} loaders at once, and one place in "
                "one loader is kept; combine the data sets into one"
            )
        counted = self.checkpointer.count(combined.flattened[0])
        try:
            len(counted)
        except TypeError as error:
            raise ConfigError(
                "lightning: of a loader without a length Lightning takes a batch ahead, which would count as trained "
                "on; give its data set a length"
            ) from error
        combined.flattened = [_Batches(counted)]
        return counted

    # -- in the order of an epoch ----------------------------------------------------------------------------------

    def _epoch_begins(self, fit_loop: Any, own: Any) -> None:
        if self._generators is not None:  # what else begins with a training may have drawn
            RngState().load_state_dict(self._generators)
            self._generators = None
        if self._midway:
            fit_loop._restart_stage = _MIDWAY
        own()

    def _reset(self, own: Any) -> None:
        if not self._midway:
            own()
        self._midway = False

    def loss_of(self, outputs: Any) -> None:
        """Add a batch's loss to those of its update."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def _batch_ends(self, trainer: Any, own: Any, *given: Any) -> None:
        own(*given)
        if trainer.global_step > self._updates and not trainer.fit_loop.epoch_loop.done:
            self._finish_step(trainer)

    def _epoch_ends(self, trainer: Any, own: Any) -> None:
        own()
        self.checkpointer.data.end_epoch()
        if trainer.global_step > self._updates:
            self._finish_step(trainer)

    def _finish_step(self, trainer: Any) -> None:
        loss, self._loss = self._loss, None
        self._updates = trainer.global_step
        self._counted = self.checkpointer.step(loss)

    def end(self) -> None:
        """The training ended in order: its last step is kept as well."""
        while self._put:
            self._put.pop().remove()
        if not self.checkpointer.in_use:
            return
        events = self.checkpointer.events
        if self._counted > self._began_at and (not events or events[-1].step != self._counted):
            self.checkpointer.save(self._counted)
        try:
            self.checkpointer.drain()
        except WaitTimeout as error:
            _log.error("lightning: the last checkpoints are not durable: %s", error)
        self.checkpointer.close()

    def broken_off(self) -> None:
        """The training ends by an error; what is in progress is finished when the process ends."""
        while self._put:
            self._put.pop().remove()


def _callback_class(base: Any) -> Any:
    class LastgoodCallback(base):  # type: ignore[misc] # Lightning's class is known when it is imported
        """Begins and ends a training's checkpoints."""

        def __init__(self, saves: _Saves) -> None:
            self._saves = saves

        @property
        def checkpointer(self) -> Checkpointer:
            """The training's."""
            return self._saves.checkpointer

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            del pl_module
            self._saves.begin(trainer, self)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            del trainer, pl_module, batch, batch_idx
            self._saves.loss_of(outputs)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            del trainer, pl_module
            self._saves.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            del trainer, pl_module, exception
            self._saves.broken_off()

    return LastgoodCallback
