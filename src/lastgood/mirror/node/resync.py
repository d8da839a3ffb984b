"""Looks for a complete state of the training in a folder of checkpoints, while the node is blind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lastgood.errors import LastgoodError
from lastgood.mirror.node.layout import NodeLayout
from lastgood.mirror.node.states import GivenState, given_state

__all__ = ["ReadNewest", "Resync"]

_log = logging.getLogger("lastgood.mirror")

ReadNewest = Callable[[Path, int | None], tuple[int, Mapping[str, Any]] | None]
"""The newest checkpoint in a folder, as its step and its state's tree; None if it is the step that is given, or none.

Raises LastgoodError for what cannot be read.
"""
REQUEST_FILE = "resync"
_LOOK_S = 1.0


class Resync:
    """Made with a folder, or asked for one later by a file in the node's own folder (`mirror resync`)."""

    def __init__(self, read: ReadNewest, folder: Path | None, requests: Path) -> None:
        self._read = read
        self._folder = folder
        self._request = requests / REQUEST_FILE
        self._tried: int | None = None
        self._next = 0.0
        self._said = ""

    def look(self, layout: NodeLayout) -> GivenState | None:
        """The newest state that is there and that was not given before; looks once a second."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _LOOK_S
        try:
            if self._request.exists():
                self._folder, self._tried = Path(self._request.read_text().strip()), None
                self._request.unlink()
            if self._folder is None:
                return None
            found = self._read(self._folder, self._tried)
            if found is None:
                if self._tried is None:
                    self._tell(f"{self._folder} has no checkpoint yet: no slots, no ranks' folders, no checkpoint-*.pt")
                return None
            step, tree = found
            given = given_state(layout, tree, step, f"{self._folder}, step {step}")
            self._tried = step
            return given
        except (LastgoodError, OSError) as error:
            self._tell(str(error))
            return None

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _log.warning("resync: %s", text)
