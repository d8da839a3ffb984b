"""The tap: takes gradients from where a training has reduced them, and sends this rank's piece to the shadows.

`BucketTap` is DDP's communication hook (`ddp.checkmate_hook`): it averages as DDP does without a hook, and sends a part
of each bucket as soon as it is reduced. `step_tap.StepTap` is for everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.gradients.layout.spans import Cover, Span, piece_of, spans_of
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.tap.device_copy import DeviceMover
from lastgood.gradients.trainer.parameters import Tracked
from lastgood.gradients.trainer.updates import UpdateNotes
from lastgood.wire.records import DType

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["BucketTap", "Session"]

_log = logging.getLogger("lastgood")

_FIRST_LOOKS = 3
"""Iterations on a device in which gradients are looked at; later ones only with each verification."""


@dataclass(frozen=True)
class _Plan:
    """What to do with a bucket of DDP's, for as long as the same parameters are in it."""

    parameters: tuple[int, ...]
    """Identities, in order."""
    spans: list[Span]
    piece: tuple[int, int]
    tracked: list[tuple[int, int, int]]
    """(index, first element, elements) of each parameter that the optimizer updates."""


@dataclass
class Session:
    """What a started checkpointer gives to the tap."""

    stream: GradientStream
    tracked: Tracked
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
        self._session: Session | None = None
        self._plans: dict[int, _Plan] = {}

    def open(self, session: Session) -> None:
        """Begin to send."""
        self._plans = {}
        self._session = session

    def close(self) -> None:
        """Send nothing any more."""
        self._session = None

    def settle(self) -> None:
        """Return when reduced buckets may be overwritten."""
        session = self._session
        if session is not None:
            session.stream.settle()

    def reduce(self, bucket: Any) -> Any:
        """The hook: average a bucket over all ranks; a future of it."""
        distributed = torch.distributed
        self.used = True
        gradients: torch.Tensor = bucket.buffer()
        # As DDP's own reduction does without a hook, to the bit: times the reciprocal, then the sum.
        gradients.mul_(1.0 / distributed.get_world_size(self.group))
        session = self._session
        plan = None
        if session is not None:
            if bucket.index() == 0:
                unsettled = session.stream.lends
                session.stream.begin()
                if unsettled:
                    self._stop_lending(session)
                session.notes.begin_iteration()
            plan = self._plan(session, bucket, gradients)
        work = distributed.all_reduce(gradients, group=self.group, async_op=True)

        def reduced(future: Any) -> torch.Tensor:
            result: torch.Tensor = future.value()[0]
            if session is not None and plan is not None:
                try:
                    _send(session, plan, result)
                except Exception as error:  # keeping a state must never stop the training of it
                    session.stream.fault = f"{type(error).__name__}: {error}"
                    _log.exception("checkmate: gradients could not be sent")
            return result

        return work.get_future().then(reduced)

    def _stop_lending(self, session: Session) -> None:
        """Nobody called `settle` between two backward passes: what was lent may have changed while it was read."""
        self.owns_memory = session.borrow = False
        session.stream.fault = (
            "a backward pass began before the gradients of the one before were known to be sent, and may have changed "
            "them: call the model itself, not its forward(), which runs no hooks. From here on gradients are copied"
        )
        _log.warning("checkmate: %s", session.stream.fault)

    def _plan(self, session: Session, bucket: Any, gradients: torch.Tensor) -> _Plan | None:
        """Made anew where DDP has put other parameters into its bucket."""
        parameters = bucket.parameters()
        known = self._plans.get(bucket.index())
        identities = tuple(map(id, parameters))
        if known is not None and known.parameters == identities:
            return known
        try:
            plan = self._make_plan(session, parameters, identities, gradients)
        except ValueError as error:
            session.stream.fault = str(error)
            return None
        self._plans[bucket.index()] = plan
        return plan

    @staticmethod
    def _make_plan(
        session: Session, parameters: Sequence[torch.Tensor], identities: tuple[int, ...], gradients: torch.Tensor
    ) -> _Plan:
        reduced = [(session.tracked.index_of.get(id(one)), one.numel()) for one in parameters]
        if sum(elements for _, elements in reduced) != gradients.numel():
            raise ValueError(f"a bucket of DDP's has {gradients.numel()} elements, and other parameters in it")
        piece = piece_of(gradients.numel(), session.rank, session.ranks, session.cover)
        dtype = DType.__members__.get(str(gradients.dtype).removeprefix("torch."))
        spans = spans_of(session.stream.layout, reduced, dtype, piece)
        tracked, begin = [], 0
        for index, elements in reduced:
            if index is not None:
                tracked.append((index, begin, elements))
            begin += elements
        return _Plan(identities, spans, piece, tracked)


def _send(session: Session, plan: _Plan, gradients: torch.Tensor) -> None:
    """Send this rank's piece of a reduced bucket. Runs where DDP's reduction has ended, in a thread of torch's."""
    iteration = session.stream.iteration
    if session.mover is None:
        if session.rank == 0:
            session.notes.samples.take(gradients, plan.tracked, iteration)
        keep = gradients if session.borrow else None
        session.stream.send(iteration, plan.spans, gradients.data_ptr(), borrowed=session.borrow, keep=keep)
        return
    if session.rank == 0 and (iteration <= _FIRST_LOOKS or iteration % session.look_every == 0):
        session.notes.samples.take(gradients, plan.tracked, iteration)
    begin, end = plan.piece
    if begin < end:
        session.mover.move(iteration, [gradients[begin:end]], plan.spans, begin * gradients.element_size())
