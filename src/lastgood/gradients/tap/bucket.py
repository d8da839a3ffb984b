"""The tap: takes gradients from where a training has reduced them, and sends this rank's range to the shadows.

`BucketTap` is DDP's communication hook (`ddp.checkmate_hook`): it averages as DDP does without a hook, and sends a part
of each bucket as soon as it is reduced. `step_tap.StepTap` is for everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lastgood._lazy import torch
from lastgood.gradients.layout.spans import Cover, Span, sent_range, spans_of
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.tap.device_copy import DeviceMover
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.updates import UpdateNotes
from lastgood.wire.records import DType

__all__ = ["BucketTap", "TapContext"]

_log = logging.getLogger("lastgood")

_FIRST_LOOKS = 3
"""Iterations on a device in which gradients are looked at; later ones only with each verification."""


@dataclass(frozen=True)
class _Plan:
    """What to do with a bucket of DDP's, for as long as the same parameters are in it."""

    parameters: tuple[int, ...]
    """Identities, in order."""
    spans: list[Span]
    sent: tuple[int, int]
    tracked: list[tuple[int, int, int]]
    """(index, first element, elements) of each parameter that the optimizer updates."""


@dataclass
class TapContext:
    """What a started checkpointer gives to the tap."""

    stream: GradientStream
    tracked: TrackedParameters
    notes: UpdateNotes
    rank: int
    ranks: int
    cover: Cover
    borrow: bool
    look_every: int
    mover: DeviceMover | None


class BucketTap:
    """State of the communication hook. Until a checkpointer starts, and after it has closed, it only averages."""

    def __init__(self) -> None:
        self.group: Any = None
        """The process group that gradients are reduced over; None: the default one."""
        self.used = False
        """Whether a hook has it."""
        self.owns_memory = False
        """Whether reduced buckets stay as they are until `settle` is called, before the next backward pass."""
        self._context: TapContext | None = None
        self._plans: dict[int, _Plan] = {}

    def open(self, context: TapContext) -> None:
        """Begin to send."""
        self._plans = {}
        self._context = context

    def close(self) -> None:
        """Send nothing any more."""
        self._context = None

    def settle(self) -> None:
        """Return when reduced buckets may be overwritten."""
        context = self._context
        if context is not None:
            context.stream.settle()

    def reduce(self, bucket: Any) -> Any:
        """The hook: average a bucket over all ranks; a future of it."""
        distributed = torch.distributed
        self.used = True
        gradients: torch.Tensor = bucket.buffer()
        # As DDP's own reduction does without a hook, to the bit: times the reciprocal, then the sum.
        gradients.mul_(1.0 / distributed.get_world_size(self.group))
        context = self._context
        plan = None
        if context is not None:
            if bucket.index() == 0:
                unsettled = context.stream.lends
                context.stream.begin()
                if unsettled:
                    self._stop_lending(context)
                context.notes.begin_iteration()
            plan = self._plan(context, bucket, gradients)
        work = distributed.all_reduce(gradients, group=self.group, async_op=True)

        def reduced(future: Any) -> torch.Tensor:
            result: torch.Tensor = future.value()[0]
            if context is not None and plan is not None:
                try:
                    _send(context, plan, result)
                except Exception as error:  # keeping a state must never stop the training of it
                    context.stream.fault = f"{type(error).__name__}: {error}"
                    _log.exception("checkmate: gradients could not be sent")
            return result

        return work.get_future().then(reduced)

    def _stop_lending(self, context: TapContext) -> None:
        """Nobody called `settle` between two backward passes: what was lent may have changed while it was read."""
        self.owns_memory = context.borrow = False
        context.stream.fault = (
            "a backward pass began before the gradients of the one before were known to be sent, and may have changed "
            "them: call the model itself, not its forward(), which runs no hooks. From here on gradients are copied"
        )
        _log.warning("checkmate: %s", context.stream.fault)

    def _plan(self, context: TapContext, bucket: Any, gradients: torch.Tensor) -> _Plan | None:
        """Made again if DDP has put other parameters into its bucket."""
        parameters = bucket.parameters()
        known = self._plans.get(bucket.index())
        identities = tuple(map(id, parameters))
        if known is not None and known.parameters == identities:
            return known
        try:
            plan = self._make_plan(context, parameters, identities, gradients)
        except ValueError as error:
            context.stream.fault = str(error)
            return None
        self._plans[bucket.index()] = plan
        return plan

    @staticmethod
    def _make_plan(
        context: TapContext, parameters: Sequence[torch.Tensor], identities: tuple[int, ...], gradients: torch.Tensor
    ) -> _Plan:
        reduced = [(context.tracked.index_of.get(id(one)), one.numel()) for one in parameters]
        if sum(elements for _, elements in reduced) != gradients.numel():
            raise ValueError(f"a bucket of DDP's has {gradients.numel()} elements, and other parameters in it")
        sent = sent_range(gradients.numel(), context.rank, context.ranks, context.cover)
        dtype = DType.__members__.get(str(gradients.dtype).removeprefix("torch."))
        spans = spans_of(context.stream.layout, reduced, dtype, sent)
        tracked, begin = [], 0
        for index, elements in reduced:
            if index is not None:
                tracked.append((index, begin, elements))
            begin += elements
        return _Plan(identities, spans, sent, tracked)


def _send(context: TapContext, plan: _Plan, gradients: torch.Tensor) -> None:
    """Send this rank's range of a reduced bucket. Runs where DDP's reduction has ended, in a thread of torch's."""
    iteration = context.stream.iteration
    if context.mover is None:
        if context.rank == 0:
            context.notes.samples.take(gradients, plan.tracked, iteration)
        keep = gradients if context.borrow else None
        context.stream.send(iteration, plan.spans, gradients.data_ptr(), borrowed=context.borrow, keep=keep)
        return
    if context.rank == 0 and (iteration <= _FIRST_LOOKS or iteration % context.look_every == 0):
        context.notes.samples.take(gradients, plan.tracked, iteration)
    begin, end = plan.sent
    if begin < end:
        context.mover.move(iteration, [gradients[begin:end]], plan.spans, begin * gradients.element_size())
