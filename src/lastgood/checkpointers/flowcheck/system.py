"""FlowCheck (EuroSys'25): a node that sees mirrored packets makes a checkpoint of every step; training does nothing.

The node (`lastgood mirror run`, `lastgood.mirror`) follows DistributedDataParallel's collectives from a switch's mirror
port, repeats each update, and gives any of the last steps back. `save` only counts steps; `drain` asks the node which
of them it holds. docs/flowcheck.md says what it promises.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lastgood._lazy import torch
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.flowcheck.options import FlowCheckOptions
from lastgood.checkpointers.flowcheck.tree import tree_of_node
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.recovery.checkmate_job import Promises, note_job
from lastgood.checkpointers.shadows.restore import Restored, find_newest, read_token, restore_together
from lastgood.checkpointers.traits import Traits
from lastgood.errors import CheckpointError, ConfigError, WaitTimeout
from lastgood.gradients.protocol.client import ShadowClient
from lastgood.gradients.protocol.messages import Status
from lastgood.locations import Location
from lastgood.sinks import Sink

__all__ = ["FlowCheck", "FlowCheckOptions"]

_POLL_S = 0.1
_CLOSE_S = 5.0


class FlowCheck(Checkpointer):
    """Every step is kept, in the memory of a mirror node.

    Give `attach` (or `restore`) the model before DistributedDataParallel wraps it: the node follows the weights that
    DDP broadcasts when it is made.
    """

    name: ClassVar[str] = "flowcheck"
    traits: ClassVar[Traits] = Traits(
        label="FlowCheck",
        colour="#7548B8",
        order=61,
        safe_in=Sink.MEMORY,
        safe_words="in its mirror node's memory",
        keeps="shadows",
        takes_gradients=True,
        only_interval=1,
    )
    Options: ClassVar[type[BaseOptions]] = FlowCheckOptions
    options: FlowCheckOptions

    def __init__(self, directory: Path | str | Location, options: FlowCheckOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._restored: Restored | None = None
        self._after: int = 0
        """Only what an incarnation after this one holds is of this training."""
        self._pending: list[CheckpointEvent] = []
        self._promises: Promises | None = None
        """On rank 0, once the node holds a step of this incarnation."""

    @classmethod
    def unavailable(cls) -> str | None:
        """It needs a switch that mirrors, and a node behind it; a run does not start them by itself."""
        return "it needs a mirror node that sees the training's packets (docs/flowcheck.md)"

    # -- begin and end -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._refuse_wrapped(self.state)
        status = self._ask(self.options.timeout_s)
        # What was restored fenced the node for this training; otherwise the next incarnation will be it.
        self._after = status.epoch - 1 if self._restored is not None else status.epoch
        self._restored = None
        self._pending = []

    @staticmethod
    def _refuse_wrapped(state: Mapping[str, Any]) -> None:
        for name, part in state.items():
            if isinstance(part, torch.nn.parallel.DistributedDataParallel):
                raise ConfigError(
                    f"flowcheck: {name} is wrapped in DistributedDataParallel already, which has broadcast its "
                    "weights: give the bare model, and wrap it after attach() or restore()"
                )

    def _close(self) -> None:
        if self._pending:
            with contextlib.suppress(CheckpointError):
                self.drain(min(self._close_s, _CLOSE_S))
            self._fail_pending("the training ended before the node held it")
        promises, self._promises = self._promises, None
        if promises is not None:
            promises.close()

    # -- every step ------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Nothing waits for anything here."""

    def _save(self, event: CheckpointEvent) -> None:
        event.copied_s = time.perf_counter()
        self._pending.append(event)
        if self.events_kept is not None:
            del self._pending[: -self.events_kept]  # who drains sooner hears of more

    def _ask(self, timeout_s: float) -> Status:
        token = read_token(self.options)
        with ShadowClient(self.options.nodes[0], token, timeout_s) as client:
            return client.status()

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Ask the node until it holds every counted step, or no new one for `patience_s`: then the others failed."""
        deadline = time.monotonic() + timeout_s
        newest, moved = -1, time.monotonic()
        while self._pending:
            status = self._ask(min(self.options.timeout_s, max(_POLL_S, deadline - time.monotonic())))
            held = max((one.step for one in status.memory if one.epoch == status.epoch > self._after), default=-1)
            now = time.perf_counter()
            if held >= 0 and status.job is not None and self._world()[0] == 0:
                self._note(status.job, held)  # on the disk before anybody is told
            for event in [one for one in self._pending if one.step <= held]:
                self._pending.remove(event)
                event.finished_s, event.outcome = now, Outcome.DURABLE
            if held > newest:
                newest, moved = held, time.monotonic()
            if not self._pending:
                return
            if time.monotonic() - moved > self.options.patience_s:
                self._fail_pending(
                    f"the mirror node holds no step after {held if held >= 0 else 'the beginning'}; "
                    "`lastgood mirror status` on it says why"
                )
                return
            if time.monotonic() > deadline:
                steps = ", ".join(str(event.step) for event in self._pending[:5])
                raise WaitTimeout(f"waited {timeout_s:g} s for the mirror node to hold steps {steps}")
            time.sleep(_POLL_S)

    def _note(self, job: str, step: int) -> None:
        if self._promises is None:
            note_job(self.directory, job, self.readable_by)
            self._promises = Promises(self.directory, job, self.readable_by)
        self._promises.made(step)

    def _fail_pending(self, why: str) -> None:
        pending, self._pending = self._pending, []
        for event in pending:
            self._fail(event, CheckpointError(why))

    def _drain_beside(self, timeout_s: float) -> None:
        self.drain(timeout_s)

    def _abandon(self) -> None:
        self._fail_pending("given up at exit")

    # -- back ------------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The newest step that the node holds. Raises CheckpointError if it cannot be asked."""
        return find_newest(self.directory, self.options)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Fence off every older incarnation of the job, and load the newest step that the node holds.

        All ranks call it together, any number of them, before DistributedDataParallel wraps the model; if one fails,
        all do, and no state is changed. Raises NoCheckpoint, CorruptCheckpoint, MismatchError, CheckpointError,
        WaitTimeout as Checkmate's; CheckpointError in a training that has started.
        """
        if self._state is not None:
            raise CheckpointError(
                "flowcheck: restore before the training starts: the node follows weights that DDP broadcasts"
            )
        self._refuse_wrapped(state)
        self._restored = restore_together(self.directory, state, self.options, step, tree_of_node)
        return self._restored.step

    def storage_facts(self) -> dict[str, Any]:
        """Where checkpoints are."""
        return {"direct_io": False, "durability": "in the memory of the mirror node; on its disk if it spills"}
