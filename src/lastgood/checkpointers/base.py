"""The one protocol that every checkpointing system follows.

The training side calls, in this order::

    checkpointer.start(state)               # before the first step
    for step in ...:
        loss = forward(); loss.backward()
        optimizer.step()                    # calls before_update() by itself, through the optimizer's step pre-hook
        scheduler.step()
        checkpointer.save(step)             # at the steps that the interval asks for
    checkpointer.drain()
    checkpointer.close()

and, in a new process, ``checkpointer.restore(state)`` instead of starting from nothing.

A user's own loop needs less: ``attach(model=..., optimizer=...)`` restores what there is and starts, and ``step()``
counts and saves.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lastgood.checkpointers.attach.deadline import SLURM, check_deadline
from lastgood.checkpointers.attach.process_end import Ending
from lastgood.checkpointers.attach.rollback import RollsBack
from lastgood.checkpointers.attach.steppers import check_steppers
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.options import BaseOptions, check_when_to_save, made_options
from lastgood.checkpointers.recovery.beginnings import Beginnings
from lastgood.checkpointers.recovery.refusals import Refusals
from lastgood.checkpointers.save_health import SaveHealth, SaveStatus
from lastgood.checkpointers.steps.by_time import ByTime, by_time
from lastgood.checkpointers.steps.update_hooks import UpdateHooks, Waits, remove_all
from lastgood.checkpointers.steps.update_steps import UpdateSteps
from lastgood.checkpointers.telling import Tells
from lastgood.checkpointers.traits import Traits
from lastgood.errors import CheckpointError, ConfigError, MismatchError, NoCheckpoint
from lastgood.files import ReadableBy, make_directory, readers_of, storage_errors
from lastgood.locations import Location
from lastgood.locks import FileLock
from lastgood.state import FlatState, flatten, try_layout
from lastgood.state.optimizers import optimizers_beneath
from lastgood.state.rng import generators_kept
from lastgood.world import world_of_torch

if TYPE_CHECKING:
    from lastgood.checkpointers.attach.attachment import Attachment
    from lastgood.checkpointers.attach.data_facts import DataChanged

__all__ = ["DEFAULT_TIMEOUT_S", "Checkpointer"]

_log = logging.getLogger("lastgood")

DEFAULT_TIMEOUT_S = 600.0
"""Every wait in a checkpointer ends after this long at the latest, with an error that names what it waited for."""


class Checkpointer(Tells, RollsBack, Waits):
    """Takes the state of a running training and can give it back.

    A *state* is a mapping of names to objects with ``state_dict``/``load_state_dict``, plain tensors or plain values.

    It is made with a directory of its own (which need not exist) and either validated `options` or single ones by
    name; `step` saves every `interval_steps` steps, or every `interval_s` seconds. A relative directory is taken from
    where the process is now. What is made there can be read by its owner alone, unless `readable_by` is ``group`` or
    ``all``. With `max_unsaved_s`, `step` raises once so many seconds have gone by without a new durable checkpoint.
    By `deadline` (seconds since 1970; ``slurm``: the end of its Slurm job) training has saved and ended.
    Raises ConfigError for options that do not exist or cannot be, and for a directory that is a URL.

    Subclasses set class attributes: `name` (the registry's key), `METHOD` (a version of how this system is measured,
    part of every run's identity; raised when a change makes older records incomparable), `Options`, and `traits` (what
    figures, captions, plans and advice know of it).
    """

    name: ClassVar[str]
    METHOD: ClassVar[int] = 1
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    traits: ClassVar[Traits] = Traits()
    holds_directory: ClassVar[bool] = False
    """Whether ``DIRECTORY/lock`` is held here from `attach` or `start` to `close`, so that no second training writes
    there. False for a system whose store has a lock of its own, whose ranks share a directory, or that writes none."""

    def __init__(
        self,
        directory: Path | str | Location,
        options: BaseOptions | None = None,
        *,
        interval_steps: int | None = None,
        interval_s: float | None = None,
        readable_by: ReadableBy | str = ReadableBy.OWNER,
        max_unsaved_s: float | None = None,
        deadline: float | str | None = SLURM,
        **given: Any,
    ) -> None:
        self.options = made_options(self, directory, options, given)
        check_deadline(self.name, deadline, interval_steps)
        check_when_to_save(self.name, self.traits.only_interval, interval_steps, interval_s, max_unsaved_s)
        self.location = Location.parse(directory)
        self.directory = self.location.path
        self.interval_steps = interval_steps
        self.interval_s = interval_s
        self.deadline = deadline
        self._by_time: ByTime | None = None
        self.readable_by = readers_of(readable_by, self.name)
        self._lock = FileLock(
            self.directory / "lock",
            f"checkpoint directory {self.directory}",
            shared_with_forks=False,
            mode=self.readable_by.file_mode,
        )
        self.events: list[CheckpointEvent] = []
        self.events_kept: int | None = 100
        """So many of the newest stay in `events`, so that a long incarnation does not grow; None: all."""
        self._state: Mapping[str, Any] | None = None
        self._steps = UpdateSteps()
        self._hooks = UpdateHooks(self, self._steps, DEFAULT_TIMEOUT_S)
        self._tried = b""
        """Digest of the newest layout that was tried."""
        self._health = SaveHealth(self.name, max_unsaved_s)
        self._attachment: Attachment | None = None
        self._beginnings: Beginnings | None = None
        self._refusals: Refusals | None = None
        self._ending: Ending | None = None
        self._process = os.getpid()
        """The one that it was started in: a forked child has no thread of it, and must not write for its parent."""
        self._close_s = DEFAULT_TIMEOUT_S

    @property
    def saves_until_warm(self) -> int:
        """Saves after which a further one finds all files and buffers used before, and costs what later ones do."""
        return 3

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this system cannot be used here, as one sentence that says what to do, or None. Imports nothing large.

        Figures leave such a system out, with a note; it is an error only if it is asked for by itself.
        """
        return None

    # -- in a user's own loop --------------------------------------------------------------------------------------

    def attach(
        self,
        *,
        data: Iterable[Any] | None = None,
        resume_step: int | None = None,
        data_changed: DataChanged = "refuse",
        unattached: Literal["refuse", "allow"] = "refuse",
        **parts: Any,
    ) -> int:
        """Take charge of a training, resume it if there is something to resume from, and return its step (else 0).

        Call it once, before the first step. `parts` are what the run needs to go on: modules, optimizers, schedulers,
        scalers, tensors, dicts and lists of plain values; None is left out. Random generators and the number of steps
        are added. With `data` (a loader), iterate over ``self.data`` instead: it counts the batches that training has
        consumed; one that was given to `count` before is taken by itself.

        `data_changed` says what to do if the checkpoint was made in the middle of an epoch, and the loader has another
        batch size or other data now: raise MismatchError, or go on after the same number of ``"samples"``, or begin the
        next ``"epoch"``; what that skips or repeats is logged.

        What an optimizer trains and no part holds would begin again after a restart: that is refused, unless
        `unattached` is ``"allow"``.

        `resume_step` names the checkpoint to take instead of the newest. Until `close`, an exit of the process (the
        loop's end, an exception, Ctrl-C, SIGTERM) drains for a bounded time first.

        Raises NoCheckpoint (only for `resume_step`), CorruptCheckpoint (there are checkpoints, and none is complete),
        MismatchError (parts of other names, shapes or dtypes; another job or world; checkpoints of another system or
        number of ranks in the directory), LockHeld, ConfigError. If some ranks of torch.distributed resume and others
        find nothing, the first `step` raises MismatchError on all of them; if one is refused, all others hear of it
        (MismatchError here or in `step`, and a process that waits in a collective ends as by SIGTERM).
        """
        if self._state is not None:
            raise CheckpointError(f"{self.name}: a training is attached already; close() it first")
        refusals = Refusals(self.name)
        try:
            refusals.raise_earlier()
            step = self._attach(data, resume_step, data_changed, unattached, parts)
        except Exception as error:
            refusals.tell(error)
            raise
        self._refusals = refusals
        refusals.watch()
        return step

    def _attach(
        self,
        data: Iterable[Any] | None,
        resume_step: int | None,
        data_changed: DataChanged,
        unattached: Literal["refuse", "allow"],
        parts: dict[str, Any],
    ) -> int:
        """What `attach` does for this rank alone. Raises as it does."""
        from lastgood.checkpointers.attach.attachment import Attachment
        from lastgood.checkpointers.recovery.found_here import refuse_beside
        from lastgood.checkpointers.recovery.traces import Traces

        if self.interval_steps is None and self.interval_s is None and not self._chooses_interval():
            raise ConfigError(
                f"{self.name}: attach() needs interval_steps, for instance "
                f"{type(self).__name__}({str(self.directory)!r}, interval_steps=10)"
            )
        self._by_time = None if self.interval_s is None else by_time(self.name, self.interval_s, self._world())
        self._begin_deadline()
        attachment = Attachment(self.name, parts, self._data_of(data), data_changed)
        traces = Traces(self._folders())
        try:
            self._refuse_layout()
            self._hold_directory()
            resumed = True
            try:
                self._resume(attachment.state, resume_step)
            except NoCheckpoint:
                if resume_step is not None or self._rolls_back:
                    raise
                refuse_beside(self.directory, self.name, self._world()[1])
                resumed = False
            # Looking at the state may draw from generators: a loader of torchdata's does when it is asked for its own.
            with generators_kept():
                if unattached == "refuse":
                    attachment.trained.refuse_forgotten(attachment.state)
                self.start(attachment.state)
        except BaseException:
            try:
                self.close()
            finally:
                traces.take_back()
            raise
        attachment.begin()
        began = attachment.progress.step if resumed else None
        self._beginnings = Beginnings(self.name, attachment.state, self.directory, began)
        with generators_kept():
            self._begun()
        self._attachment = attachment
        self._begin_steps()
        self._hooks.began = attachment.update_begins
        if self._world()[0] == 0:  # all ranks of a job go on together
            attachment.tell_beginning(self.name, self._place_of(attachment.progress.step), resumed=resumed)
        return attachment.progress.step

    def step(self, loss: Any = None) -> int:
        """Note that a training step is finished, save if it is time to, and return its number.

        Call it after ``optimizer.step()`` and ``scheduler.step()``. `loss`, a number or a tensor of one element, lets
        systems that keep verdicts judge checkpoints by it.

        Raises CheckpointError if the newest durable checkpoint is older than `max_unsaved_s`; MismatchError if some
        ranks resumed and others began again; SystemExit if it was asked to end with this step.
        """
        attachment = self._attached()
        self._compare_beginnings()
        number = attachment.step_finished()
        saves = self._due(number)
        attachment.tell_lost_gradients(self.name, number, self._hooks.updates, saves=saves)
        if saves:
            self.save(number)
        if loss is not None:
            self._observe_loss(number, loss)
        self._health.check(number, self.events)
        self._step_over(number)
        return number

    def status(self) -> SaveStatus:
        """How old the newest durable checkpoint of this incarnation is, and how many saves have failed since."""
        return self._health.status(self.events)

    def _compare_beginnings(self) -> None:
        if self._refusals is not None:
            self._refusals.raise_fault()
        if self._beginnings is not None:
            self._beginnings.compare()

    def _place_of(self, step: int) -> Path:
        """The place of the checkpoint of `step`, for people."""
        del step
        return self.directory

    def _folders(self) -> list[Path]:
        """Where this training writes; what it has made there is removed if `attach` refuses it."""
        return [self.directory]

    def _chooses_interval(self) -> bool:
        """Whether this system decides by itself when to save, so that `attach` needs no interval_steps."""
        return self.traits.only_interval == 1

    def _due(self, step: int) -> bool:
        """Whether to save now; called by `step` once for every finished step."""
        if self._by_time is not None:
            return self._by_time.due(step)
        interval = 1 if self.traits.only_interval == 1 else self.interval_steps
        return interval is not None and interval > 0 and step % interval == 0

    def _resume(self, state: Mapping[str, Any], step: int | None) -> None:
        """Restore what a new incarnation begins with. Raises NoCheckpoint if it begins from nothing."""
        self.restore(state, step)

    def _world(self) -> tuple[int, int]:
        """(rank, number of ranks) of this training."""
        return world_of_torch()

    def _against_layout(self) -> str:
        """Why this training must not use its directory: what lies there is of another number of ranks. "" if nothing.

        Raises StorageError.
        """
        from lastgood.checkpointers.recovery.found_here import words_on_layout

        return words_on_layout(self.directory, *self._world(), parted=False)

    def _refuse_layout(self) -> None:
        """Raise MismatchError if something is against the layout of the directory."""
        why = self._against_layout()
        if why:
            raise MismatchError(why)

    def _begun(self) -> None:
        """Called by `attach` once all is ready: from here on what fails is the training."""

    def _observe_loss(self, step: int, loss: Any) -> None:
        """Judge by a loss; systems without verdicts have no use for it."""
        del step, loss

    # -- begin and end -------------------------------------------------------------------------------------------------

    def start(self, state: Mapping[str, Any]) -> None:
        """Take charge of `state`. Called once, before the first step and after any restore.

        Installs a step pre-hook on every optimizer in the state, so that user code never calls `before_update`. If
        it raises, everything is given back, as by `close`.
        """
        if self._state is not None:
            raise CheckpointError(f"{self.name}: start() was called twice; close() the first training before a second")
        self._state = state
        self._process = os.getpid()
        self._hooks.begin()
        self._tried = b""
        self._health.begin()
        # One that is dropped without close() leaves no hook in an optimizer that lives on.
        weakref.finalize(self, remove_all, self._hooks.handles).atexit = False
        try:
            check_steppers(self.name, state, self._optimizers(), takes_gradients=self.traits.takes_gradients)
            self._hooks.see(self._optimizers())
            self._hold_directory()
            self._start()
        except BaseException:
            self.close()
            raise
        self._ending = Ending(self)

    def close(self) -> None:
        """Give back threads, files and hooks. Safe to call twice, and after a failure."""
        self._hooks.remove()
        self._end_steps()
        self._state = None
        self._attachment = self._counted = None
        self._beginnings = None
        if self._refusals is not None:
            self._refusals.close()
            self._refusals = None
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._close()
        self._end_telling()
        self._lock.release()

    def _hold_directory(self) -> None:
        if not self.holds_directory or self._lock.held:
            return
        with storage_errors(self.directory, "making the checkpoint directory"):
            make_directory(self.directory, self.readable_by.directory_mode)
        self._lock.acquire()

    @property
    def state(self) -> Mapping[str, Any]:
        """The state given to `start`."""
        if self._state is None:
            raise CheckpointError(f"{self.name}: start(state) must be called first")
        return self._state

    def storage_facts(self) -> dict[str, Any]:
        """What a run record should say about how bytes reached the disk (for instance whether I/O was direct)."""
        return {}

    def _request(self, step: int) -> CheckpointEvent:
        """Note that a checkpoint of `step` was asked for."""
        event = CheckpointEvent(step, time.perf_counter(), why=self._why)
        self.events.append(event)
        if self.events_kept is not None:
            del self.events[: -self.events_kept]
        self._hooks.see(self._optimizers())
        return event

    def _flat(self, *, spread: bool = False) -> FlatState:
        """The state as it is now, flattened (`lastgood.state.flatten`).

        Raises StateError for what cannot be stored, and, at a layout's first appearance, for what could not be loaded
        again: what is called durable must be restorable.
        """
        flat = flatten(self.state, spread=spread)
        digest = flat.layout.digest()
        if digest != self._tried:
            try_layout(self.state, flat)
            self._tried = digest
        return flat

    def _optimizers(self) -> list[Any]:
        """All that the state holds now, also in containers and in a user's own objects."""
        return [optimizer for part in self.state.values() for optimizer in optimizers_beneath(part)]

    def _fail(self, event: CheckpointEvent, error: BaseException) -> None:
        """Note that a checkpoint failed, and log it at growing distances."""
        event.finished_s = time.perf_counter()
        event.error = f"{type(error).__name__}: {error}"
        event.outcome = Outcome.FAILED  # last: whoever sees it in another thread may ask why
        self._health.failed(event, f"{type(error).__name__} {getattr(error, 'errno', None)}", self.events)

    # -- what a system does ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Prepare storage; called by `start` once `self.state` is set."""

    def _close(self) -> None:
        """Release what the system holds; called by `close`, perhaps more than once."""

    def save(self, step: int) -> None:
        """Start a checkpoint of the state as it is now, after `step` finished steps; return when training may go on.

        A failure is recorded in `events`, logged, and never loses an older checkpoint; it does not raise. Asked for in
        the middle of an optimizer's step, when no state is complete, it waits for the step's end (of another thread)
        or fails (in a signal handler or a hook, and after a step that ended by an exception).
        """
        event = self._request(step)
        try:
            if os.getpid() != self._process:
                raise CheckpointError("save() in a forked child: only the process that attached or started it saves")
            self._compare_beginnings()
            with self._steps.kept_out(DEFAULT_TIMEOUT_S, self._optimizers):
                self._save(event)
        except Exception as error:  # a save never stops training: whatever went wrong is counted and logged
            self._fail(event, error)

    def _save(self, event: CheckpointEvent) -> None:
        """What `save` does, between two steps. What it raises is the failure of this checkpoint.

        On return all that changes outside ``optimizer.step()`` is copied (buffers, RNG states, schedule, data cursor
        and so on). Only parameters that an optimizer updates, and that optimizer's tensors, may be copied later, until
        `before_update` returns.
        """
        raise NotImplementedError(f"{type(self).__name__} has no _save")

    @abstractmethod
    def before_update(self) -> None:
        """Return when the old weights may be overwritten."""

    @abstractmethod
    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Return when every checkpoint asked for is finished (as safe as the system makes it, or failed).

        Raises WaitTimeout, naming the steps that are still in progress.
        """

    @abstractmethod
    def latest(self) -> int | None:
        """The newest step that `restore` would take, or None. Needs no `start`."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Load the newest complete checkpoint (or that of `step`) into `state`, to the bit, and return its step.

        Needs no `start`. Raises NoCheckpoint if there is none.
        """
