"""No checkpoints at all: the line that every other system is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.traits import Traits
from lastgood.errors import NoCheckpoint

__all__ = ["NoCheckpointing", "NoneOptions"]


class NoneOptions(BaseOptions):
    """There is nothing to set."""

    def disk_bytes(self, state_bytes: int) -> int:
        """Nothing is written."""
        del state_bytes
        return 0


class NoCheckpointing(Checkpointer):
    """Saves nothing."""

    name: ClassVar[str] = "none"
    traits: ClassVar[Traits] = Traits(
        label="no checkpoints",
        colour="#000000",
        order=0,
        ranks_write="nobody",
        only_interval=0,
    )
    Options: ClassVar[type[BaseOptions]] = NoneOptions

    def save(self, step: int) -> None:
        """Do nothing."""

    def before_update(self) -> None:
        """Do nothing."""

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Do nothing."""

    def latest(self) -> int | None:
        """There never is one."""
        return None

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Raise NoCheckpoint."""
        del state, step
        raise NoCheckpoint(f"{self.directory}: system 'none' keeps no checkpoints")
