"""Checkmate (NSDI'26): shadows repeat every update from the gradients alone, so each step is a checkpoint.

The final gradients of each iteration go to shadows (`lastgood shadow serve`), processes on CPUs that hold parameters
and optimizer state, and apply the same update. Training saves nothing but a small side record of what gradients do not
carry. docs/checkmate.md says what it promises.

The parts are in `gradients`: taps take gradients, links send them, the conductor finds out which iteration is complete
on all shadows, and seeds a shadow that is new. Durable here means: complete on every shadow, so that it survives all
trainers; not the shadows, but for the steps that they spill.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from lastgood._lazy import torch
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.checkmate.incarnation import Incarnation, begin_incarnation
from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.recovery.checkmate_job import Promises
from lastgood.checkpointers.shadows.restore import Restored, check_held, find_newest, restore_together
from lastgood.checkpointers.traits import Traits
from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.gradients.layout.entries import Side
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.protocol.messages import Absent, Complete, Step
from lastgood.gradients.tap.bucket import BucketTap
from lastgood.gradients.tap.ring import RingTap
from lastgood.gradients.tap.step import StepTap
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.step_parts import StepPart
from lastgood.gradients.trainer.updates import Update
from lastgood.locations import Location
from lastgood.sinks import Sink
from lastgood.world import world_of_torch

__all__ = ["Checkmate", "CheckmateOptions"]

_log = logging.getLogger("lastgood")

_NO_SIDE = "a shadow lacks a side record"
_DISTRUST_LIMIT = 64
"""Iterations for which no seed is sent, at most, if gradients are changed again and again after the tap."""


class Checkmate(Checkpointer):
    """Every step is kept, in the memory of shadows.

    With DistributedDataParallel: ``checkpointer.watch(model)``, or ``model.register_comm_hook(checkpointer.tap,
    checkmate_hook)`` (`lastgood.gradients.tap.ddp_hook`), before `start`. Clip through this object's `clip_grad_norm_`.
    """

    name: ClassVar[str] = "checkmate"
    traits: ClassVar[Traits] = Traits(
        label="Checkmate",
        colour="#0F9A6D",
        order=60,
        safe_in=Sink.MEMORY,
        safe_words="in its shadows' memory",
        keeps="shadows",
        ranks_write="shadows",
        helper="shadows",
        takes_gradients=True,
        only_interval=1,
    )
    Options: ClassVar[type[BaseOptions]] = CheckmateOptions
    options: CheckmateOptions

    def __init__(self, directory: Path | str | Location, options: CheckmateOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._tap = RingTap() if self.options.tap == "ring" else BucketTap()
        self._hooked = False
        self._incarnation: Incarnation | None = None
        self._promises: Promises | None = None
        """On rank 0."""
        self._restored: Restored | None = None
        self._pending: dict[int, tuple[CheckpointEvent, GradientStream]] = {}
        self._settling = threading.Condition()
        self._saves = 0
        self._distrusted = 0
        self._seeds_from = 0
        self._verified = 0

    # -- the tap ---------------------------------------------------------------------------------------------------

    @property
    def tap(self) -> BucketTap:
        """The state for ``model.register_comm_hook(checkpointer.tap, checkmate_hook)``."""
        self._hooked = True
        return self._tap

    def watch(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register the communication hook, and let gradients leave from DDP's own memory, without a copy."""
        from lastgood.gradients.tap.ddp_hook import checkmate_hook

        model.register_comm_hook(self.tap, checkmate_hook)
        self._tap.group = model.process_group
        self._tap.owns_memory = not model.gradient_as_bucket_view
        # Buckets are overwritten by the backward pass that follows a forward pass.
        model.register_forward_hook(lambda *_: self._tap.settle())

    def clip_grad_norm_(self, parameters: Any, max_norm: float, **options: Any) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, over all parameters of the optimizer; shadows repeat it."""
        return self._living().notes.clip_norm(parameters, max_norm, **options)

    def clip_grad_value_(self, parameters: Any, clip_value: float, **options: Any) -> None:
        """As torch.nn.utils.clip_grad_value_, over all parameters of the optimizer; shadows repeat it."""
        self._living().notes.clip_value(parameters, clip_value, **options)

    def _living(self) -> Incarnation:
        if self._incarnation is None:
            raise CheckpointError("checkmate: start(state) or attach(...) must be called first")
        return self._incarnation

    # -- begin and end -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        TrackedParameters(self.state)  # what cannot be followed or stored is said first
        self._flat(spread=True)
        self._pending, self._saves = {}, 0
        incarnation = begin_incarnation(
            self.directory,
            self.state,
            self.options,
            self._tap if self._hooked else None,
            self._restored,
            self._close_unsaved,
            self._settled,
        )
        self._restored = None
        self._incarnation = incarnation
        self._promises = None if incarnation.rank else Promises(self.directory, incarnation.job, self.readable_by)
        self._seeds_from = incarnation.stream.iteration

    def _close(self) -> None:
        if self._incarnation is None:
            return
        try:
            with suppress(WaitTimeout):
                self.drain(min(self._close_s, 2 * self.options.behind_s))
        finally:
            self._end_life()

    def _end_life(self) -> None:
        incarnation, self._incarnation = self._incarnation, None
        self._tap.close()
        if incarnation is not None:
            incarnation.close()
            if self._promises is not None and incarnation.conductor.fenced is None:
                self._promises.close()
        self._fail_pending("the training ended before all shadows held it")

    # -- every iteration -------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Note what the optimizer's step will do; without a hook in DDP send its gradients now."""
        incarnation = self._incarnation
        if incarnation is None:
            return
        stream = incarnation.stream
        try:
            part = (
                self._take_step(incarnation)
                if incarnation.step_tap is None
                else self._take_part(incarnation, incarnation.step_tap)
            )
            stream.fault = stream.fault or part.fault
        except Exception as error:  # keeping a state must never stop the training of it: the save of it fails
            stream.fault = stream.fault or f"{type(error).__name__}: {error}"
        stream.phase = "updated"

    @staticmethod
    def _take_step(incarnation: Incarnation) -> StepPart:
        """Behind the hook's reduction: one step for each."""
        stream = incarnation.stream
        twice = stream.phase == "updated"
        if stream.phase != "reduced":
            if not twice:
                incarnation.begin_empty()
            what = "has begun twice" if twice else "has begun with no gradients reduced for it"
            stream.fault = f"optimizer.step() {what}; shadows apply one update for each reduction"
        part = incarnation.notes.look()
        if not twice:
            incarnation.notes.add(part)
        stream.end()
        return part

    @staticmethod
    def _take_part(incarnation: Incarnation, tap: StepTap) -> StepPart:
        """Without a hook: one step for all parameters, or several of some. One that comes again begins an iteration."""
        part = incarnation.notes.look()
        if incarnation.stream.phase == "closed" or not incarnation.notes.takes(part):
            incarnation.begin_iteration()
        incarnation.notes.add(part)
        if tap.send(part.stepped):
            incarnation.stream.end()
        return part

    def _save(self, event: CheckpointEvent) -> None:
        """Close the iteration: send the side record, and on rank 0 what the update was. Copies only what is small."""
        incarnation = self._living()
        if incarnation.conductor.fenced is not None:
            raise CheckpointError(incarnation.conductor.fenced)
        if incarnation.stream.phase == "closed":
            incarnation.begin_empty()
        self._close_iteration(incarnation, event)

    def _close_unsaved(self) -> None:
        """The next iteration begins, and nobody saved this one."""
        try:
            self._close_iteration(self._living(), None)
        except Exception:  # neither does this
            _log.exception("checkmate: an iteration could not be closed")

    def _close_iteration(self, incarnation: Incarnation, event: CheckpointEvent | None) -> None:
        stream, conductor = incarnation.stream, incarnation.conductor
        iteration, update = stream.iteration, Update(None)
        try:
            if incarnation.step_tap is not None:
                incarnation.step_tap.finish()
            stream.end()
            update = incarnation.notes.update()
        except Exception as error:  # this save fails, and shadows must hear of the iteration all the same
            stream.fault = stream.fault or f"{type(error).__name__}: {error}"
        fault = stream.fault
        stream.phase = "closed"
        if fault is not None:
            self._distrust(incarnation, iteration)
        trouble: Exception | None = None if fault is None else CheckpointError(fault)
        if event is not None and trouble is None:
            try:
                self._send_side(incarnation, event, iteration)
            except Exception as error:  # shadows must hear of the update all the same, or they can never go on from it
                trouble = error
        saved = event is not None and trouble is None
        if incarnation.rank == 0:
            self._saves += saved
            every = self.options.spill_every
            conductor.step(
                Step(
                    iteration=iteration,
                    rule=update.rule,
                    saved=saved,
                    step=event.step if event is not None and saved else None,
                    absent=update.absent,
                    void=fault is not None,
                    apart=incarnation.apart,
                    spill=bool(saved and every and self._saves % every == 0),
                )
            )
        else:
            if incarnation.apart:
                conductor.absent(
                    Absent(
                        iteration=iteration,
                        parameters=incarnation.left_alone(update),
                        updated=update.rule is not None,
                        void=fault is not None,
                    )
                )
            conductor.closed(iteration)
        try:
            self._seed(incarnation, iteration)
            self._verify(incarnation, iteration)
        except Exception:  # what was saved is on its way all the same
            _log.exception("checkmate: no seed could be copied after iteration %d; the next one tries again", iteration)
        if event is not None and trouble is not None:
            self._fail(event, trouble)

    def _send_side(self, incarnation: Incarnation, event: CheckpointEvent, iteration: int) -> None:
        record, arrives = incarnation.sides.take()
        event.copied_s = time.perf_counter()
        event.bytes_written = len(record)
        with self._settling:
            self._pending[iteration] = event, incarnation.stream
        side = Side(
            rank=incarnation.rank,
            iteration=iteration,
            step=event.step,
            layout=incarnation.sides.layout,
            nbytes=len(record),
        )
        incarnation.conductor.side(side, record, arrives)

    def _distrust(self, incarnation: Incarnation, iteration: int) -> None:
        """Shadows have other gradients than the update used: give them the state itself, less and less often."""
        self._distrusted += 1
        incarnation.conductor.distrust(incarnation.layout.buckets_of, iteration)
        self._seeds_from = iteration + min(2**self._distrusted - 1, _DISTRUST_LIMIT)

    def _seed(self, incarnation: Incarnation, iteration: int) -> None:
        """Copy some of the buckets that shadows want, as they are now."""
        if iteration < self._seeds_from:
            return
        if (
            self._send_seeds(incarnation, iteration)
            and self.options.policy != "drop"
            and incarnation.conductor.seeds_are_outrun()
        ):
            incarnation.conductor.wait_seeded(self.options.behind_s)

    def _send_seeds(self, incarnation: Incarnation, iteration: int) -> bool:
        """Whether any was wanted."""
        wanted = incarnation.conductor.wanted_seeds(
            self.options.seed_bytes_per_step, lambda bucket: incarnation.layout.buckets[bucket].nbytes
        )
        for shadow, bucket in wanted:
            incarnation.conductor.seed(shadow, incarnation.copy_bucket(bucket, iteration))
        return bool(wanted)

    def _verify(self, incarnation: Incarnation, iteration: int) -> None:
        """Let a shadow compare one of this rank's buckets, the next one each time."""
        every = self.options.verify_every
        if every and iteration % every == 0 and incarnation.own_buckets:
            bucket = incarnation.own_buckets[self._verified % len(incarnation.own_buckets)]
            self._verified += 1
            incarnation.conductor.verify(
                incarnation.layout.shadow_of(bucket), incarnation.copy_bucket(bucket, iteration)
            )

    # -- what became of saves --------------------------------------------------------------------------------------

    def _settled(self, word: Complete) -> None:
        """Rank 0 has said what became of everything up to an iteration."""
        now = time.perf_counter()
        with self._settling:
            promised = [
                event.step for one, (event, _) in self._pending.items() if one <= word.iteration and word.promises(one)
            ]
        if promised and self._promises is not None:
            self._promises.made(max(promised))  # on the disk before anybody is told
        with self._settling:
            for number in [one for one in self._pending if one <= word.iteration]:
                event = self._take_pending(number)
                if word.promises(number):
                    event.finished_s, event.outcome = now, Outcome.DURABLE
                    continue
                why = f"a shadow was lost, or was brought up to date by a later seed, before iteration {word.floor}"
                if number in word.spoiled:
                    why = _NO_SIDE
                elif word.lost:
                    names = ", ".join(self.options.shadows[shadow] for shadow in word.lost)
                    why = f"shadow {names} is lost, is being brought up to date, or lacks a side record"
                self._fail(event, CheckpointError(why))
            self._settling.notify_all()

    def _take_pending(self, iteration: int) -> CheckpointEvent:
        """It is known what became of this save, and by now what was sent for it."""
        event, stream = self._pending.pop(iteration)
        event.bytes_written += stream.take_sent(iteration)
        return event

    def _fail_pending(self, why: str) -> None:
        with self._settling:
            while self._pending:
                self._fail(self._take_pending(next(iter(self._pending))), CheckpointError(why))
            self._settling.notify_all()

    def _fail_spoiled(self, iterations: Set[int]) -> None:
        """Whatever comes of these iterations, what was saved in them cannot be given back."""
        with self._settling:
            for number in [one for one in self._pending if one in iterations]:
                self._fail(self._take_pending(number), CheckpointError(_NO_SIDE))

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until every saved step is complete on all shadows, or has failed."""
        deadline = time.monotonic() + timeout_s
        away_since: float | None = None
        while True:
            incarnation = self._incarnation
            others_wait = not self._pending and self._others_wait(deadline)
            with self._settling:
                if not self._pending and not others_wait:
                    return
                steps = [event.step for event, _ in self._pending.values()]
                self._settling.wait(0.05)
                if not self._pending:
                    continue
                newest_saved = max(self._pending, default=-1)
            now = time.monotonic()
            if incarnation is None or incarnation.conductor.fenced is not None:
                self._fail_pending("it was closed" if incarnation is None else str(incarnation.conductor.fenced))
                continue
            self._fail_spoiled(incarnation.conductor.spoiled())
            iteration = incarnation.stream.iteration
            if incarnation.stream.phase == "closed" and (iteration >= self._seeds_from or iteration == newest_saved):
                # What was torn at the end has no later step to be healed in. A save is not put off for what was before.
                self._send_seeds(incarnation, iteration)
            # Rank 0 says what is lost, through shadows; with none of them nobody says anything.
            away_since = None if incarnation.conductor.reachable else away_since or now
            if away_since is not None and now - away_since > self.options.behind_s:
                self._fail_pending("no shadow can be reached")
            if now > deadline:
                raise WaitTimeout(
                    f"waited {timeout_s:g} s for shadows to hold steps {', '.join(map(str, steps[:5]))}"
                    f"{' ...' if len(steps) > 5 else ''}"
                )

    def _others_wait(self, deadline: float) -> bool:
        """Whether other ranks still have to hear of an iteration that failed here alone."""
        incarnation = self._incarnation
        if incarnation is None or incarnation.stream.phase != "closed" or time.monotonic() > deadline:
            return False
        return world_of_torch()[1] > 1 and incarnation.conductor.tell_without_seeds()

    def _drain_beside(self, timeout_s: float) -> None:
        # Without seeds: they are copies of live tensors, which the training's thread may change meanwhile.
        with self._settling:
            if not self._settling.wait_for(lambda: not self._pending, timeout_s):
                raise WaitTimeout(f"waited {timeout_s:.3g} s for shadows to hold {len(self._pending)} steps")

    def _abandon(self) -> None:
        self._fail_pending("given up at exit")

    # -- back ------------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The newest step that all shadows hold. Raises CheckpointError if one of them cannot be asked."""
        return find_newest(self.directory, self.options)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Fence off every older incarnation of the job, and load the newest step that all shadows hold.

        All ranks call it together; if one fails, all do, and no state is changed. Raises NoCheckpoint (no step was
        ever complete on all shadows); CorruptCheckpoint (one was, and none is any more); MismatchError for another
        world size or other parameters; CheckpointError for a shadow that cannot be reached; WaitTimeout.
        """
        running = self._incarnation is not None
        if running:
            self.drain()
            check_held(
                self.directory, self.options, step
            )  # before this incarnation, and what shadows keep of it, ends for it
            self._end_life()
        try:
            restored = self._restored = restore_together(self.directory, state, self.options, step)
        finally:
            if running:
                self._start()
        return restored.step

    # -- facts -----------------------------------------------------------------------------------------------------

    def storage_facts(self) -> dict[str, Any]:
        """Where checkpoints are, and what went wrong on the way there and was healed."""
        facts: dict[str, Any] = {
            "direct_io": False,
            "durability": "in the memory of all shadows; on their disks where they spill",
            "policy": self.options.policy,
            "shadows": len(self.options.shadows),
        }
        if self._incarnation is not None:
            facts |= self._incarnation.facts()
        return facts
