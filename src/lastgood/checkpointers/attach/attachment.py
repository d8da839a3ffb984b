"""A training that a checkpointer was attached to: its whole state under names, its step and its data."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.attach.data_facts import DataChanged
from lastgood.checkpointers.attach.trained import Trained
from lastgood.errors import ConfigError, DataError
from lastgood.notices import tell
from lastgood.state import Checked, RngState, holds_its_values
from lastgood.units import format_seconds

__all__ = ["Attachment", "Progress"]

_log = logging.getLogger("lastgood")

_OWN_NAMES = ("data", "progress", "rng")


class Progress(Checked):
    """The number of finished steps, as a part of the state, and which parameters the optimizers' numbers were."""

    saved_keys = ("step",)

    def __init__(self, trained: Trained | None = None) -> None:
        self.step = 0
        self._trained = trained

    def state_dict(self) -> dict[str, Any]:
        """The step, and the order of parameters."""
        return {"step": self.step} | ({} if self._trained is None else {"parameters": dict(self._trained.order())})

    def check_saved(self, saved: Any, path: str) -> None:
        """Refuse optimizers whose parameters were in another order: their state is kept by number."""
        if self._trained is not None:
            self._trained.check_order(saved.get("parameters"), path)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved step."""
        self.step = int(state["step"])


class _Generators(RngState):
    """The generators; while a window of gradient accumulation is open, as they stood at the last update."""

    def __init__(self, data: CountedLoader | None) -> None:
        self._data = data
        self._at_update: dict[str, Any] | None = None

    def updated(self, *, accumulates: bool) -> None:
        """The batches that were taken so far are in the weights; with `accumulates`, there were several of them."""
        self._at_update = super().state_dict() if accumulates else None

    def state_dict(self) -> dict[str, Any]:
        """What the window that is open drew, it draws again after a restart."""
        open_window = self._at_update is not None and self._data is not None and self._data.in_window
        return dict(self._at_update or {}) if open_window else super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator."""
        self._at_update = None
        super().load_state_dict(state)


class Attachment:
    """The state made of a user's parts and of what every run needs beside them."""

    def __init__(
        self,
        system: str,
        parts: Mapping[str, Any],
        data: Iterable[Any] | None,
        data_changed: DataChanged = "refuse",
    ) -> None:
        taken = sorted(set(parts) & set(_OWN_NAMES))
        if taken:
            raise ConfigError(
                f"{system}: attach() makes {taken} by itself; give your part another name, as attach(my_{taken[0]}=...)"
            )
        for name, part in parts.items():
            if part is not None and not holds_its_values(part):
                raise ConfigError(
                    f"{system}: attach({name}={part!r:.80}): a plain {type(part).__name__} would be saved as it is now "
                    f"for ever, and could not be given back; put it into a dict, attach({name}={{'value': "
                    f"{part!r:.80}}}), and change it there"
                )
        if isinstance(data, CountedLoader):
            data.changed = data_changed
            self.data: CountedLoader | None = data
        else:
            self.data = None if data is None else CountedLoader(data, data_changed)
        self.state: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        if not self.state:
            raise ConfigError(
                f"{system}: attach() was given nothing to keep; pass at least the model, as attach(model=model)"
            )
        self.trained = Trained(dict(self.state))
        self.progress = Progress(self.trained)
        self.state["progress"] = self.progress
        if self.data is not None:
            self.state["data"] = self.data
        self._generators = self.state["rng"] = _Generators(self.data)
        self._first_batches = self._updated_batches = 0
        self._accumulates = False
        """Whether the newest update was made of several batches."""

    def parts(self) -> dict[str, Any]:
        """What the user gave."""
        return {name: part for name, part in self.state.items() if name not in _OWN_NAMES}

    def begin(self) -> None:
        """The state is restored: from here on batches and steps are counted."""
        self._first_batches = self._updated_batches = 0 if self.data is None else self.data.total_batches

    def tell_beginning(self, system: str, place: Path, *, resumed: bool) -> None:
        """Say where the training goes on, or that it begins again."""
        if not resumed:
            tell(f"{system}: begins at step 0, there is no checkpoint in {place}")
            return
        try:
            age_s = time.time() - place.stat().st_mtime
        except OSError:  # not on a disk, or gone by now
            age_s = -1.0
        age = f", saved {format_seconds(age_s)} ago" if age_s >= 0 else ""
        tell(f"{system}: resumed at step {self.progress.step}{age}, from {place}")

    def step_finished(self) -> int:
        """Count a step. Raises DataError if no batch was ever taken from the attached loader."""
        if self.data is not None and self.data.total_batches == self._first_batches:
            raise DataError(
                "a step was finished, and no batch was taken through the checkpointer, so a restart could not come "
                "back to this place in the data; iterate over its `data` instead of the loader itself, as "
                "for batch in checkpointer.data"
            )
        if self.data is not None:
            self._updated(self.data)
            self.data.trained()
        self.progress.step += 1
        return self.progress.step

    def update_begins(self) -> None:
        """An optimizer's step begins: what comes after it belongs to the next update.

        A loss scaler leaves steps out, whose batches have done their work all the same: there `step_finished` says it.
        """
        if self.data is not None and not self.trained.scales:
            self._updated(self.data)
            self.data.updated()

    def _updated(self, data: CountedLoader) -> None:
        taken = data.total_batches - self._updated_batches
        if taken:  # else it is an optimizer beside another one, or the end of the same step
            self._accumulates, self._updated_batches = taken > 1, data.total_batches
        self._generators.updated(accumulates=self._accumulates)

    def tell_lost_gradients(self, system: str, step: int, updates: int, *, saves: bool) -> None:
        """Warn if gradients are being accumulated while the checkpoint of `step` is made; `updates` as in Trained."""
        if self.trained.loses_gradients(updates, saves=saves):
            _log.warning(
                "%s: the checkpoint of step %d lies between two optimizer steps: gradients accumulated since the last "
                "one are in no checkpoint, and a restart goes on without them; call step() of the checkpointer once "
                "after each optimizer.step(), not after each micro-batch",
                system,
                step,
            )
