"""Systems that let a library write a directory of files for each checkpoint, one checkpoint at a time.

Shared here: names, durability and checks of the directories, waiting in bounded time, failures, restoring. A system
says how its library takes tensors by name and gives them back.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lastgood._lazy import torch
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.manifest import check_files
from lastgood.checkpointers.directories.named_state import live_tensors
from lastgood.checkpointers.directories.store import CheckpointStore, Draft
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.options import BaseOptions, KeepOptions
from lastgood.errors import CheckpointError, CorruptCheckpoint, NoCheckpoint, StorageError, WaitTimeout
from lastgood.locations import Location
from lastgood.state import apply_tree
from lastgood.state.compare import Keys

__all__ = ["DirectoryOptions", "DirectorySystem", "LibrarySave", "in_thread", "synchronize"]

_log = logging.getLogger("lastgood")

_GIVE_UP_S = 5.0


class DirectoryOptions(KeepOptions):
    """Options of every such system."""

    keep: int = Field(default=2, ge=2)
    """Complete checkpoints kept."""
    limit_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    """Seconds that one checkpoint may be in progress before it counts as failed."""

    def host_bytes(self, state_bytes: int) -> int:
        """The library's copy."""
        return state_bytes


class DirectorySystem(Checkpointer):
    """A library behind the protocol. Its copy of the state is complete when `save` returns."""

    holds_directory: ClassVar[bool] = True
    Options: ClassVar[type[BaseOptions]] = DirectoryOptions
    options: DirectoryOptions

    def __init__(self, directory: Path | str | Location, options: DirectoryOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._store: CheckpointStore = LocalStore(self.directory, self.options.keep, self.readable_by)
        self._flight: LibrarySave | None = None
        self._late: Future[Any] | None = None
        """A save of the library that outlived its checkpoint, and may still read the copied memory."""

    # -- what a system does --------------------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, tensors: dict[str, torch.Tensor], draft: Draft) -> Future[Any] | None:
        """Copy the tensors and let the library write them into `draft`: by streams, or into its folder.

        Returns what tells of the end of it, or None if it is done, and the draft sealed.
        """

    @abstractmethod
    def _read(self, checkpoint: Path, nbytes: int) -> tuple[dict[str, Any], frozenset[Keys]]:
        """The state's tree, and which of its entries are objects', from a directory whose `nbytes` were checked.

        Raises CorruptCheckpoint.
        """

    def _seal(self, draft: Draft) -> None:
        """Called in a thread when the library is done: seal the draft, unless the writer has done that."""
        draft.seal()

    def _stop(self, flight: LibrarySave) -> None:
        """Called when a save failed, perhaps while the library still writes: end that if it can be ended."""

    def _explained(self, error: BaseException) -> BaseException:
        """The cause of a failure in the library, an Exception unless it is Ctrl-C."""
        return error

    # -- saving --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._flat()  # refuses what cannot be stored to the bit before the first step, as every system does
        self._store.prepare()

    def _save(self, event: CheckpointEvent) -> None:
        """Wait for the checkpoint before; then let the library copy the state and write it."""
        draft = self._store.begin(event.step)
        try:
            self.drain()
            self._refuse_late()
            future = self._take(live_tensors(self._flat()), draft)
            event.copied_s = time.perf_counter()
            if future is None:
                self._commit(event, draft)
                return
            flight = LibrarySave(self, event, draft, future)
            try:
                flight.start()
            except BaseException:
                self._end_late(flight)
                raise
            self._flight = flight
        except BaseException as error:
            cause = self._explained(error)
            self._store.give_up(draft)
            if cause is error or not isinstance(cause, Exception):
                raise  # perhaps Ctrl-C and its like
            raise cause from error

    def _commit(self, event: CheckpointEvent, draft: Draft) -> None:
        event.bytes_written = self._store.commit(draft)
        event.finished_s = time.perf_counter()
        event.outcome = Outcome.DURABLE

    def _land(self, flight: LibrarySave) -> None:
        """Called in the flight's thread when the library is done, or took too long."""
        try:
            flight.result()
            self._seal(flight.draft)
            self._commit(flight.event, flight.draft)
        except BaseException as error:  # this thread has no caller: the event and the log carry the failure
            self._end_late(flight)
            self._store.give_up(flight.draft)
            self._fail(flight.event, self._explained(error))

    def _end_late(self, flight: LibrarySave) -> None:
        self._stop(flight)
        self._late = flight.future

    def _refuse_late(self) -> None:
        if self._late is not None and not self._late.done():
            raise CheckpointError(
                f"{self.directory}: a save that took more than {self.options.limit_s:.0f} s still runs; look "
                "into the kernel log for the disk, or raise limit_s"
            )
        self._late = None

    def before_update(self) -> None:
        """All is copied when save() returns."""

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until the checkpoint in progress is durable, or has failed."""
        flight = self._flight  # a signal handler, or another thread, may drain as well
        if flight is None:
            return
        flight.join(timeout_s)
        if flight.is_alive():
            raise WaitTimeout(
                f"waited {timeout_s:.0f} s for {self.name} to write the checkpoint of step {flight.event.step} "
                f"into {self.directory}"
            )
        if self._flight is flight:
            self._flight = None

    def _abandon(self) -> None:
        if self._flight is not None:
            self._flight.give_up()
            self._flight.join(_GIVE_UP_S)

    def _close(self) -> None:
        self.drain(self._close_s)

    # -- restoring -----------------------------------------------------------------------------------------------------

    def _place_of(self, step: int) -> Path:
        return next((Path(found.where) for found in self._store.found() if found.step == step), self.directory)

    def latest(self) -> int | None:
        """The newest checkpoint's step."""
        return next((found.step for found in self._store.found()), None)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest checkpoint whose checksums hold (or that of `step`) into `state`.

        Every file is read twice: for its checksum, and then, mostly from the page cache, by the library. Raises
        NoCheckpoint, CorruptCheckpoint (there are some, and none is complete), MismatchError.
        """
        self.drain()
        known = self._store.found()
        refused = []
        for candidate in known:
            if step is not None and candidate.step != step:
                continue
            try:
                with self._store.local_folder(candidate) as folder:
                    tree, objects = self._read(folder, check_files(folder, candidate.step))
            except (CorruptCheckpoint, StorageError) as error:
                _log.warning("%s; trying the checkpoint before it", error)
                refused.append(str(error))
                continue
            apply_tree(state, tree, candidate.where, objects)
            return candidate.step
        if refused:
            raise CorruptCheckpoint(f"{self.directory}: no checkpoint can be read: {'; '.join(refused)}")
        asked = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        steps = [found.step for found in known]
        raise NoCheckpoint(f"{self.directory}: no {asked}; checkpoints of steps {steps or 'none'}")


def synchronize(tensors: Mapping[str, torch.Tensor]) -> None:
    """Wait for the devices of `tensors`: a library's threads read on streams that do not wait for the training's."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def in_thread(wait: Callable[[], object], name: str) -> Future[Any]:
    """Call `wait` in a thread that keeps no process from ending; the future has its error, if it raises one."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(wait())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class LibrarySave(threading.Thread):
    """Waits for one save of a system's library, for a bounded time, and then lets it land."""

    def __init__(self, system: DirectorySystem, event: CheckpointEvent, draft: Draft, future: Future[Any]) -> None:
        super().__init__(name=f"{system.name}-commit-{event.step}")
        self.event = event
        self.draft = draft
        self.future = future
        self._system = system
        self._woken = threading.Event()
        self._given_up = False

    def run(self) -> None:
        """In the thread: wait, then commit or fail."""
        self.future.add_done_callback(lambda _: self._woken.set())
        self._woken.wait(self._system.options.limit_s)
        self._system._land(self)

    def give_up(self) -> None:
        """Fail now, if the library is not done."""
        self._given_up = True
        self._woken.set()

    def result(self) -> None:
        """Raise what went wrong there, or WaitTimeout if it is not done."""
        what = f"writing the checkpoint of step {self.event.step}"
        if self.future.done():
            self.future.result()
        elif self._given_up:
            raise CheckpointError(f"given up while {what}")
        else:
            raise WaitTimeout(f"waited {self._system.options.limit_s:.0f} s while {what}")
