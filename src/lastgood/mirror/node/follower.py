"""Makes iterations of what was extracted: begins incarnations, finishes steps, and says from when on it is blind.

One step after the other: its gradients go into the shadow's slots as buckets become complete; when all of them are
there, its update is told; and once the buffers that open the next forward have come (if the model has any), it can be
given back. A step that cannot become complete makes the node blind: the shadow keeps what it holds, later gradients
are logged, and the node sees again from a state that comes in another way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from lastgood._lazy import torch
from lastgood.errors import LastgoodError, WaitTimeout
from lastgood.gradients.protocol.messages import Complete
from lastgood.gradients.shadow.core import ShadowCore
from lastgood.gradients.trainer.parameters import PARAMETER
from lastgood.mirror.conversation.places import (
    Buckets,
    Contradiction,
    Expect,
    Incarnation,
    Learned,
    LostStep,
)
from lastgood.mirror.extract.extractor import Extracted
from lastgood.mirror.extract.slots import Filled, Gone
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.node.blind import LATE, Blind, other_weights
from lastgood.mirror.node.digests import WeightDigests
from lastgood.mirror.node.held import find_held, held_side, holds_something, next_incarnation, updates_made
from lastgood.mirror.node.late import LateStates
from lastgood.mirror.node.layout import NodeLayout
from lastgood.mirror.node.life import Life, Start
from lastgood.mirror.node.link import Ear
from lastgood.mirror.node.log import GradientLog, LoggedStep
from lastgood.mirror.node.settings import NodeSettings
from lastgood.mirror.node.states import GivenState
from lastgood.mirror.node.steps import Steps
from lastgood.mirror.node.twin import Twin
from lastgood.mirror.node.weights import Broadcast, frozen_of, initial_tensors, weights_of

__all__ = ["Follower"]

_log = logging.getLogger("lastgood.mirror")

Buffer = npt.NDArray[np.uint8]
_MOST_BUFFERS = 64
"""Steps whose buffers are kept: several may begin in one batch of packets."""


class Follower:
    """Follows one job. For one thread.

    Args:
        core: the shadow; its receiver is a `MirrorReceiver`.
        ear: what the core tells goes to it.
        job_id: of a job that begins here, 32 hex digits.
    """

    def __init__(self, job: JobDescription, core: ShadowCore, ear: Ear, settings: NodeSettings, job_id: str) -> None:
        self.job = job
        self.layout = NodeLayout(job, settings.bucket_bytes)
        self._core = core
        self._ear = ear
        self._settings = settings
        self._job_id = job_id
        self._twin = Twin(self.layout)
        self._log = GradientLog(settings.log_bytes)
        self._life: Life | None = None
        self._steps = Steps(self._wants_used)
        self._initial: Broadcast | None = None
        self._buffers: dict[int, Broadcast] = {}
        self._base: int | None = None
        """Updates before step 0 of this incarnation; None: not known."""
        self._unsided: int | None = None
        """The iteration whose buffers come with the next forward."""
        self._frozen: dict[str, torch.Tensor] = {}
        self._static_absent: frozenset[int] = frozenset()
        self._given: GivenState | None = None
        self._late = LateStates(self.layout, map_seen=True)
        self.blind: Blind | None = None
        self.refused: str | None = None
        """The traffic is not that of the job description."""
        self.learned: Learned | None = None
        self.iteration = 0
        """The newest iteration whose gradients are all there."""
        self.ended = False
        """The source has ended: what is open does not count as lost."""
        self.counters: Counter[str] = Counter()
        """steps, incarnations, lost_steps, resyncs, logged, digests_compared, digests_different."""
        self.digests = WeightDigests(self.counters)
        self._untrue: int | None = None
        """From this iteration on nothing that is held may be given back, and it still is."""

    def hear(self, events: Iterable[Extracted]) -> list[Buffer]:
        """Follow what was extracted, in order; returns buffers that are read."""
        read: list[Buffer] = []
        for event in events:
            if isinstance(event, Filled):
                read.append(event.memory)
            if self.refused is not None and not isinstance(event, Incarnation):
                continue
            try:
                self._hear(event)
            except (LastgoodError, RuntimeError, ValueError) as error:
                _log.exception("mirror node: %s", type(event).__name__)
                self._go_blind(self._next_iteration, str(error) or repr(error))
                if isinstance(event, Filled) and event.expected.kind in ("gradient", "used"):
                    self._lost(event.expected.step, str(error) or repr(error))
        self._check_life()
        try:
            self._check_digests()
        except LastgoodError as error:  # tried again in the next turn
            _log.error("mirror node: what it holds cannot be given up: %s", error)
        return read

    def _hear(self, event: Extracted) -> None:
        if isinstance(event, Incarnation):
            self._begin_incarnation(event)
        elif isinstance(event, Buckets):
            self._steps.learn(event)
        elif isinstance(event, Filled):
            self._filled(event.expected, event.memory)
        elif isinstance(event, Gone):
            self._gone(event.expected, event.why)
        elif isinstance(event, LostStep):
            if event.what == "gradients":
                self._lost(event.step, event.why)
            else:
                self._buffers_lost(event.step, event.why)
        elif isinstance(event, Contradiction):
            self.refused = event.text
            self._go_blind(self._next_iteration, f"the traffic contradicts the job description: {event.text}")
        elif isinstance(event, Learned):
            self.learned = event

    def _wants_used(self, step: int) -> bool:
        ddp = self.job.ddp
        return step == 0 if ddp.static_graph else ddp.find_unused_parameters

    # -- beginnings ------------------------------------------------------------------------------------------------

    def _begin_incarnation(self, event: Incarnation) -> None:
        self.close()
        self.counters["incarnations"] += 1
        self.refused = None
        self._steps = Steps(self._wants_used)
        self._initial = Broadcast(initial_tensors(self.job))
        self._buffers.clear()
        self._log.clear()
        self._base = self._unsided = self._given = None
        self._late = LateStates(self.layout, map_seen=event.complete)
        self._static_absent = frozenset()
        self.blind = None
        _log.info("incarnation %d of the training begins", event.number)
        if not event.complete:
            self._initial = None
            self._go_blind(None, LATE)

    def _initial_complete(self, initial: Broadcast) -> None:
        """The first broadcasts are over: find what they are the state of."""
        self._initial = None
        tensors = initial.tensors
        self._frozen = frozen_of(self.job, tensors)
        weights = weights_of(self.layout, tensors)
        core, body = self._core, self._core.body
        with body.change:
            number = body.state.incarnation
            fresh_fence = body.state.declared or number == 0
        if fresh_fence:
            number = next_incarnation(core)
            core.fence(body.state.job or self._job_id, number)
        found = find_held(core, number, weights)
        if found is not None:
            part = held_side(core, found)
            self._twin.begin(part["scaler"], updates_made(core))
            self._begin_at(number, Start(found.iteration, True, {}))
            return
        if holds_something(core) and not self._settings.fresh:
            self._go_blind(
                None,
                "the weights that the training began with are those of no step that is held here, so the optimizer's "
                "state is not known",
            )
            self._late.began_with(weights)
            return
        self._twin.begin(None, {})
        self._begin_at(number, Start(0, False, {(index, PARAMETER): one for index, one in weights.items()}))

    def _begin_at(self, number: int, start: Start) -> None:
        """Follow from the beginning on. Gradients of the first steps may have been complete before the weights were."""
        before = self.blind
        self._start(number, start)
        logged = self._logged_since(0)
        if logged is None:
            why = "gradients that came before the first weights found no room" if before is None else before.why
            self._go_blind(start.iteration + 1, why)
            return
        self._catch_up(logged)

    def _start(self, number: int, start: Start) -> None:
        settings = self._settings
        if self._base is None:
            self._base = start.iteration
        self.iteration = start.iteration
        life = Life(
            self._core,
            self._ear,
            self.layout,
            number,
            start,
            spill_every=settings.spill_every,
            wait_s=settings.wait_s,
            on_complete=self._completed,
        )
        try:
            life.begin()
        except BaseException:
            life.close()
            raise
        self._life = life
        self.blind = self._unsided = None
        _log.info("follows the training from step %d on, in incarnation %d", start.iteration, number)

    def _completed(self, word: Complete) -> None:
        self.counters["complete"] = word.iteration

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def _next_iteration(self) -> int | None:
        return None if self._base is None else self.iteration + 1

    def _iteration_of(self, step: int) -> int:
        return (self._base or 0) + step + 1

    def _filled(self, expected: Expect, memory: Buffer) -> None:
        if expected.kind == "parameters":
            if self._initial is not None:
                self._initial.take(expected, memory)
                if self._initial.complete:
                    self._initial_complete(self._initial)
        elif expected.kind == "buffers":
            self._buffers_came(expected, memory)
        elif expected.kind == "gradient":
            self._bucket_came(expected, memory)
        elif expected.kind == "used":
            used = memory.view(np.int32)
            absent = frozenset(np.flatnonzero(used == 0).tolist())
            if self.job.ddp.static_graph:
                self._static_absent = absent
            self._steps.used_came(expected.step, absent)
            self._finish_steps()

    def _bucket_came(self, expected: Expect, memory: Buffer) -> None:
        self._check_life()
        step, bucket = expected.step, expected.bucket
        if bucket is None or step < self._steps.following:
            return
        known = self._steps.buckets(step)
        if bucket >= len(known):
            return  # the map of buckets was never seen
        indices = known[bucket]
        iteration = self._iteration_of(step)
        life = self._life
        tensor = torch.from_numpy(memory)
        for part in self.layout.parts(indices):
            if part.index is None:
                continue
            gradient = tensor[part.begin : part.begin + part.nbytes].view(getattr(torch, part.dtype))
            if life is not None and self.blind is None:
                life.receiver.put(iteration, part.index, gradient, self._settings.wait_s)
            else:
                self._log.put(step, part.index, gradient)
        self._steps.bucket_came(step, bucket)
        self._finish_steps()

    def _finish_steps(self) -> None:
        while (found := self._steps.next_finished()) is not None:
            step, unused = found
            absent = self.layout.optimized(unused | self._static_absent)
            if self.blind is not None or self._life is None:
                self._log.finish(step, absent, len(self.job.optimized))
                self.counters["logged"] += 1
                self._try_given()
                continue
            self._finish(self._life, self._iteration_of(step), absent)
            self._side_if_there(step + 1)

    def _finish(self, life: Life, iteration: int, absent: tuple[int, ...], *, saved: bool = True) -> None:
        """All gradients of an iteration are in their slots. `saved`: it is to be given back, with its buffers."""
        rule = self._twin.update(iteration, life.gradients(iteration), frozenset(absent))
        life.step(iteration, rule, absent, saved=saved)
        self.iteration = iteration
        self.counters["steps"] += 1
        if not saved:
            return
        if self.job.buffers:
            self._unsided = iteration
        else:
            self._end(life, iteration, {})

    def _buffers_came(self, expected: Expect, memory: Buffer) -> None:
        """Of the forward of a step: what the step before left behind."""
        step = expected.step
        held = self._buffers.setdefault(step, Broadcast(self.job.buffers))
        for older in sorted(self._buffers)[:-_MOST_BUFFERS]:
            del self._buffers[older]
        held.take(expected, memory)
        self._side_if_there(step)

    def _side_if_there(self, step: int) -> None:
        """Both must have come: the gradients of the step before, and the buffers that open this one."""
        held, iteration = self._buffers.get(step), self._iteration_of(step - 1)
        if held is None or not held.complete:
            return
        if self._life is not None and self.blind is None and self._unsided == iteration and step > 0:
            self._unsided = None
            for older in [one for one in self._buffers if one < step]:
                del self._buffers[older]
            self._end(self._life, iteration, held.tensors)

    def _end(self, life: Life, iteration: int, buffers: Mapping[str, torch.Tensor]) -> None:
        """All of an iteration has come, and nothing of a later one is told yet: its update is not made before."""
        life.side(iteration, self._twin.side(iteration, self._frozen, buffers))
        if self.digests.is_due(iteration) and life.wait_idle(self._settings.wait_s):
            self.digests.take(iteration, life.weights(iteration, self._frozen))

    # -- losses ----------------------------------------------------------------------------------------------------

    def _gone(self, expected: Expect, why: str) -> None:
        if expected.kind == "parameters":
            if self._initial is not None:
                self._initial = None
                self._go_blind(None, f"the weights that the training began with are lost: {why}")
        elif expected.kind in ("gradient", "used"):
            self._lost(expected.step, why)
        elif expected.kind == "buffers":
            self._buffers_lost(expected.step, why)

    def _buffers_lost(self, step: int, why: str) -> None:
        """The step before cannot be given back; those after it can."""
        if step > 0:
            self.counters["lost_buffers"] += 1
            _log.warning("step %d cannot be given back: %s", self._iteration_of(step - 1), why)

    def _lost(self, step: int, why: str) -> None:
        """The gradients of a step will never be complete."""
        if step < self._steps.following or self.ended:
            return
        self.counters["lost_steps"] += 1
        self._log.lose(step)
        self._steps.skip_to(step + 1)
        if self.blind is None:
            self._go_blind(None if self._base is None else self._iteration_of(step), why)
        elif self.blind.why.startswith(LATE) and step > 0:
            self.blind = Blind(None, f"{LATE}; then: {why}")

    def _go_blind(self, since: int | None, why: str) -> None:
        if self.blind is None:
            self.blind = Blind(since, why)
            _log.error("mirror node: %s; what was held before can still be given back", self.blind)

    def _check_life(self) -> None:
        life = self._life
        if life is not None and self.blind is None and (fault := life.fault) is not None:
            self._go_blind(self.iteration + 1, fault)

    def _check_digests(self) -> None:
        """If the trainer has other weights than were made here, nothing that followed them is of use."""
        wrong = self.digests.difference()
        if wrong is not None:
            self.close()
            self.blind = None
            self._go_blind(wrong, other_weights(wrong))
            self._untrue = wrong
        if self._untrue is not None:
            self._core.distrust(next_incarnation(self._core), self._untrue)
            self._untrue = None

    # -- a state from elsewhere ------------------------------------------------------------------------------------

    def give(self, given: GivenState) -> None:
        """A complete state of this training. While the node is blind, it goes on from there if it can.

        It needs all gradients since then: a state of a step that is still to come is kept until that has come.
        """
        self._given = given
        try:
            self._try_given()
        except (LastgoodError, RuntimeError, ValueError) as error:
            _log.exception("mirror node: the state of step %d", given.iteration)
            self._go_blind(self._next_iteration, str(error) or repr(error))

    def _try_given(self) -> None:
        given = self._given
        if given is None or self.blind is None or self.refused is not None:
            return
        if self._base is None and not self._late_base(given):
            return
        assert self._base is not None
        step = given.iteration - self._base
        if step > self._steps.following:
            return  # it is of a step that is not seen yet
        self._given = None
        logged = self._logged_since(step)
        if logged is None:
            _log.warning("the state of step %d is of no use: gradients that followed it are lost", given.iteration)
            return
        self._resync(given, logged)

    def _late_base(self, given: GivenState) -> bool:
        """Whether the gradients that passed prove which step a state is of, since nothing else tells."""
        if self._initial is not None or self._life is not None:
            return False
        step = self._late.step_after(given, self._log, self._steps.following)
        if step is None:
            if not self._late.waits:
                self._given = None
            return False
        self._base = given.iteration - step
        return True

    def _resync(self, given: GivenState, logged: list[LoggedStep]) -> None:
        core = self._core
        self.close()
        number = next_incarnation(core)
        core.fence(core.body.state.job or self._job_id, number)
        self._twin.begin(given.scaler, given.made)
        self._frozen = {**self._frozen, **given.frozen}
        self._start(number, Start(given.iteration, False, given.tensors))
        self.counters["resyncs"] += 1
        self._catch_up(logged)

    def _logged_since(self, step: int) -> list[LoggedStep] | None:
        """All gradients that have come since the beginning of a step; None if they are not all in the log."""
        found = self._log.since(step, self._steps.following)
        if found is None:
            return None
        for one, buckets in self._steps.open_buckets():
            known, logged = self._steps.buckets(one), self._log.of(one)
            indices = {part.index for bucket in buckets for part in self.layout.parts(known[bucket])} - {None}
            if not indices <= logged.gradients.keys():
                return None
            found.append(logged)
        return found

    def _catch_up(self, logged: list[LoggedStep]) -> None:
        """Give a life that has just begun what came before it did: finished steps, and what there is of open ones."""
        newest = max((one.step for one in logged if one.finished), default=None)
        for one in logged:
            self._replay(one, last=one.step == newest)
        self._log.clear()
        self._side_if_there(self._steps.following)

    def _replay(self, one: LoggedStep, *, last: bool) -> None:
        life = self._life
        assert life is not None
        iteration = self._iteration_of(one.step)
        for index, gradient in one.gradients.items():
            life.receiver.put(iteration, index, gradient, self._settings.wait_s)
        if one.finished:
            self._finish(life, iteration, one.absent, saved=last)

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def waits_for_state(self) -> bool:
        """Whether a state that was given waits for its step."""
        return self._given is not None

    @property
    def wants_state(self) -> bool:
        """Whether a state may make it see again."""
        return self.blind is not None and not self.waits_for_state and not self._late.gave_up

    @property
    def following(self) -> bool:
        """Whether an incarnation is being followed."""
        return self._life is not None

    def wait_idle(self, timeout_s: float) -> None:
        """Return once all that was heard is in the shadow. Raises WaitTimeout."""
        life = self._life
        if life is not None and not life.wait_idle(timeout_s):
            raise WaitTimeout(f"waited {timeout_s:g} s for the shadow to take all steps up to {self.iteration}")

    def close(self) -> None:
        """This incarnation is over. What the shadow holds stays."""
        life, self._life = self._life, None
        self.digests.clear()
        if life is not None:
            life.close()
