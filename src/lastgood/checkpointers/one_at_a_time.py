"""Systems that copy the state to the host and then send it on in a thread, one checkpoint at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.copies.host import HostSnapshot
from lastgood.checkpointers.copies.still_weights import StillWeights
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import WaitTimeout
from lastgood.locks import finishes_beside
from lastgood.state import FlatState

__all__ = ["OneAtATime"]

_Persist = Callable[[HostSnapshot, CheckpointEvent], None]


class OneAtATime(Checkpointer):
    """`save` takes a `HostSnapshot`, which a thread fills and persists. The next update waits for the copy."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._snapshot: HostSnapshot | None = None
        self._still = StillWeights()
        self._worker: threading.Thread | None = None

    @abstractmethod
    def _buffers_for(self, flat: FlatState) -> list[torch.Tensor]:
        """The snapshot's buffers, one for each block, made again only when sizes change."""

    def _look_at_weights(self) -> None:
        """Called by `start`."""
        self._still = StillWeights()
        self._still.find(self._flat())

    def _copy_then(self, event: CheckpointEvent, persist: _Persist) -> None:
        """Start the copy, and the thread that calls `persist` after it. Called when none is in progress."""
        flat = self._flat()
        what = f"{self.name}'s snapshot of step {event.step}"
        snapshot = HostSnapshot(flat, self._buffers_for(flat), what, self._still.find(flat))
        worker = threading.Thread(
            target=self._run, args=(snapshot, event, persist), name=f"{self.name}-step-{event.step}", daemon=True
        )
        if self.holds_directory:
            finishes_beside(worker)
        self._snapshot, self._worker = snapshot, worker
        try:
            worker.start()
        except BaseException:
            if worker.ident is None:  # else Ctrl-C came while it began: it runs, and is waited for
                self._snapshot = self._worker = None
            raise

    def _run(self, snapshot: HostSnapshot, event: CheckpointEvent, persist: _Persist) -> None:
        try:
            snapshot.copy()
            event.copied_s = time.perf_counter()
            persist(snapshot, event)
            event.finished_s = time.perf_counter()
            event.outcome = Outcome.DURABLE
        except Exception as error:  # this thread has no caller: the event and the log carry the failure
            self._fail(event, error)

    def before_update(self) -> None:
        """Wait until the snapshot has left the training's memory."""
        snapshot = self._snapshot
        if snapshot is not None:
            self._hooks.wait_at(snapshot.fence, DEFAULT_TIMEOUT_S)

    def _hurried(self) -> contextlib.AbstractContextManager[object]:
        """Held while somebody waits for the checkpoint in progress."""
        return contextlib.nullcontext()

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until the checkpoint in progress is as safe as the system makes it, or has failed."""
        worker = self._worker  # a signal handler, or another thread, may drain as well
        if worker is None:
            return
        with self._hurried():
            worker.join(timeout_s)
        if worker.is_alive():
            raise WaitTimeout(f"waited {timeout_s:.0f} s for {worker.name} in {self.directory}")
        if self._worker is worker:
            self._worker = self._snapshot = None
