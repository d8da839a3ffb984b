"""The plain way: training stops, torch.save writes, fsync makes it durable, a rename makes it complete."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.options import BaseOptions, KeepOptions
from lastgood.checkpointers.torch_files.files import TorchFiles, plain_tree
from lastgood.checkpointers.traits import CostModel, Traits
from lastgood.locations import Location
from lastgood.sinks import Sink
from lastgood.state import apply_tree, stateful_paths

__all__ = ["SyncCheckpointer", "SyncOptions"]


class SyncOptions(KeepOptions):
    """Options of the synchronous baseline."""


class SyncCheckpointer(Checkpointer):
    """torch.save + fsync + rename + fsync of the directory, all inside save()."""

    name: ClassVar[str] = "sync"
    traits: ClassVar[Traits] = Traits(
        colour="#3F3F3F",
        order=10,
        safe_in=Sink.DISK,
        keeps="files",
        ranks_write="first",
        cost=CostModel(waits=True, takes="write"),
        loss="half_interval",
    )
    holds_directory: ClassVar[bool] = True
    Options: ClassVar[type[BaseOptions]] = SyncOptions
    options: SyncOptions

    def __init__(self, directory: Path | str | Location, options: SyncOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._files = TorchFiles(self.directory, self.options.keep, self.readable_by)

    def _start(self) -> None:
        self._flat()  # refuses what cannot be stored to the bit before the first step, as every system does
        self._files.check(plain_tree(dict(self.state)))
        self._files.prepare()

    def _save(self, event: CheckpointEvent) -> None:
        """Write the state; training goes on when it is durable."""
        objects = stateful_paths(self._flat().layout)  # also refuses what torch.save would write all the same
        event.bytes_written = self._files.write(event.step, plain_tree(dict(self.state)), event.phases, objects)
        event.copied_s = event.finished_s = time.perf_counter()
        event.outcome = Outcome.DURABLE

    def before_update(self) -> None:
        """Nothing is ever in progress here."""

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Nothing is ever in progress here."""

    def _place_of(self, step: int) -> Path:
        return self._files.path_of(step) or self.directory

    def latest(self) -> int | None:
        """The newest file's step."""
        return next(iter(self._files.steps()), None)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest readable file (or that of `step`) into `state`."""
        found, tree, where, objects = self._files.read(step)
        apply_tree(state, tree, where, objects)
        return found

    def storage_facts(self) -> dict[str, Any]:
        """Buffered writes, then fsync."""
        return {"direct_io": False, "durability": "torch.save, fsync, rename, fsync of the directory"}
