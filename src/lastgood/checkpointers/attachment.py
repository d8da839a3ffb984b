"""A training that a checkpointer was attached to: its whole state under names, its step and its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lastgood.checkpointers.data_cursor import CountedLoader
from lastgood.checkpointers.data_facts import DataChanged
from lastgood.errors import ConfigError, DataError
from lastgood.state import RngState, holds_its_values

__all__ = ["Attachment", "Progress"]

_OWN_NAMES = ("data", "progress", "rng")


class Progress:
    """The number of finished steps, as a part of the state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """The step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved step."""
        self.step = int(state["step"])


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
            raise ConfigError(f"{system}: attach() makes {taken} by itself; give your part another name")
        for name, part in parts.items():
            if part is not None and not holds_its_values(part):
                raise ConfigError(
                    f"{system}: attach({name}={part!r:.80}): a plain {type(part).__name__} would be saved as it is now "
                    f"for ever, and could not be given back; put it into a dict, attach({name}={{...}}), and change it "
                    "there"
                )
        self.progress = Progress()
        self.data = None if data is None else CountedLoader(data, data_changed)
        self.state: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        if not self.state:
            raise ConfigError(f"{system}: attach() was given nothing to keep; pass at least model=...")
        self.state["progress"] = self.progress
        if self.data is not None:
            self.state["data"] = self.data
        self.state["rng"] = RngState()
        self._first_batches = 0

    def begin(self) -> None:
        """The state is restored: from here on batches and steps are counted."""
        self._first_batches = 0 if self.data is None else self.data.total_batches

    def step_finished(self) -> int:
        """Count a step. Raises DataError if no batch was ever taken from the attached loader."""
        if self.data is not None and self.data.total_batches == self._first_batches:
            raise DataError(
                "a step was finished, and no batch was taken through the checkpointer, so a restart could not come "
                "back to this place in the data; iterate over its `data` instead of the loader itself"
            )
        if self.data is not None:
            self.data.trained()
        self.progress.step += 1
        return self.progress.step
