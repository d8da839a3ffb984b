"""CheckFreq (Mohan et al., FAST'21): snapshot beside the next forward and backward pass, persist in the background.

Section 4.1 of the paper: a snapshot is a copy of the state in host memory, overlapped with the computation up to the
next weight update, which waits for it; persisting writes that copy to storage. Only one checkpoint is in progress at a
time: the next one waits until its predecessor is durable. With an `overhead_budget` the interval is chosen and
changed as section 4.3 describes (`policy`). The paper snapshots into the GPU's memory if that has room;
here snapshots are always in host memory, page-locked for copies from a CUDA device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lastgood._lazy import torch
from lastgood.checkpointers.checkfreq.budget import BudgetKeeper
from lastgood.checkpointers.copies.host import HostSnapshot, host_buffer
from lastgood.checkpointers.events import CheckpointEvent
from lastgood.checkpointers.one_at_a_time import OneAtATime
from lastgood.checkpointers.options import BaseOptions, KeepOptions
from lastgood.checkpointers.torch_files.files import TorchFiles, plain_tree
from lastgood.checkpointers.traits import CostModel, Traits
from lastgood.errors import ConfigError
from lastgood.locations import Location
from lastgood.sinks import Sink
from lastgood.state import FlatState, apply_tree, stateful_paths, unflatten

__all__ = ["CheckFreq", "CheckFreqOptions"]


class CheckFreqOptions(KeepOptions):
    """Options of CheckFreq."""

    overhead_budget: float | None = Field(default=None, gt=0, le=10)
    """The slowdown that checkpoints may cost, 0.035 (3.5 %) in the paper: `step` then chooses when to save; None: saves
    come when they are told to."""

    def host_bytes(self, state_bytes: int) -> int:
        """One snapshot in host memory."""
        return state_bytes


class CheckFreq(OneAtATime):
    """Snapshot, then persist, one checkpoint at a time.

    With `overhead_budget` and no interval_steps, `attach` and `step` profile the first iterations and choose the
    interval. Raises ConfigError if both are given.
    """

    name: ClassVar[str] = "checkfreq"
    traits: ClassVar[Traits] = Traits(
        label="CheckFreq",
        colour="#E9A10E",
        order=20,
        safe_in=Sink.DISK,
        keeps="files",
        ranks_write="first",
        cost=CostModel(waits=False, takes="both"),
    )
    holds_directory: ClassVar[bool] = True
    Options: ClassVar[type[BaseOptions]] = CheckFreqOptions
    options: CheckFreqOptions

    def __init__(self, directory: Path | str | Location, options: CheckFreqOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._budget = self.options.overhead_budget
        if self._budget is not None and (self.interval_steps is not None or self.interval_s is not None):
            raise ConfigError(
                "checkfreq: overhead_budget chooses the interval, and interval_steps was given as well; leave one out"
            )
        self._keeper: BudgetKeeper | None = None
        """Made by `attach`; a loop that calls save() by itself has chosen already."""
        self._files = TorchFiles(self.directory, self.options.keep, self.readable_by)
        self._buffers: list[torch.Tensor] = []

    def _start(self) -> None:
        self._look_at_weights()
        self._files.check(plain_tree(dict(self.state)))
        self._files.prepare()

    def _chooses_interval(self) -> bool:
        return self._budget is not None

    def _begun(self) -> None:
        if self._budget is not None:
            device = next((block.device for block in self._flat().blocks if block.is_cuda), None)
            self._keeper = BudgetKeeper(self._budget, device)

    def _due(self, step: int) -> bool:
        return super()._due(step) if self._keeper is None else self._keeper.step_finished()

    def _save(self, event: CheckpointEvent) -> None:
        """Wait for the checkpoint before, then start the snapshot."""
        if self._keeper is not None:
            self._keeper.save_begun(event)
        self.drain()
        event.phases.append(("wait", event.requested_s, time.perf_counter()))
        self._copy_then(event, self._persist)

    def before_update(self) -> None:
        """Wait until the snapshot has left the training's memory."""
        if self._keeper is not None:
            self._keeper.update_reached()
        super().before_update()

    def _close(self) -> None:
        self.drain(self._close_s)
        self._buffers = []

    def _place_of(self, step: int) -> Path:
        return self._files.path_of(step) or self.directory

    def latest(self) -> int | None:
        """The newest file's step."""
        return next(iter(self._files.steps()), None)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest readable file (or that of `step`) into `state`."""
        self.drain()  # a copy in progress reads what a restore overwrites
        found, tree, where, objects = self._files.read(step)
        apply_tree(state, tree, where, objects)
        return found

    def storage_facts(self) -> dict[str, Any]:
        """Buffered writes, then fsync; with a budget, the interval, its inputs and each change."""
        facts: dict[str, Any] = {
            "direct_io": False,
            "durability": "torch.save, fsync, rename, fsync of the directory",
            "snapshot": "host memory",
        }
        if self._keeper is not None:
            facts["interval"] = self._keeper.facts()
        return facts

    def _buffers_for(self, flat: FlatState) -> list[torch.Tensor]:
        sizes = list(flat.layout.block_bytes)
        if [buffer.numel() for buffer in self._buffers] != sizes:
            pinned = any(block.is_cuda for block in flat.blocks)
            self._buffers = [host_buffer(size, pinned) for size in sizes]
        return self._buffers

    def _persist(self, snapshot: HostSnapshot, event: CheckpointEvent) -> None:
        tree = unflatten(snapshot.layout, snapshot.buffers, "checkfreq's snapshot")
        objects = stateful_paths(snapshot.layout)
        event.bytes_written = self._files.write(event.step, tree, event.phases, objects)
