"""The tap of switch mode: Lastgood's own ring reduces, and its final sends are what a switch copies to the shadows.

This rank sends nothing to shadows but messages: no gradient leaves it twice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lastgood._lazy import torch
from lastgood.gradients.tap.bucket import BucketTap, TapContext

if TYPE_CHECKING:
    from lastgood.gradients.tap.ring_hook import RingReducer

__all__ = ["RingTap"]

_log = logging.getLogger("lastgood")


class RingTap(BucketTap):
    """State of the communication hook. While no incarnation is open it averages as DDP does, without the ring."""

    def __init__(self) -> None:
        super().__init__()
        self._reducer: RingReducer | None = None

    @property
    def reduced_ranks(self) -> int:
        """How many ranks DDP reduces over."""
        return int(torch.distributed.get_world_size(self.group))

    def join(self, context: TapContext, reducer: RingReducer) -> None:
        """Begin to reduce by the ring, whose connections are made; it ends with `close`."""
        self.open(context)
        self._reducer = reducer

    def close(self) -> None:
        """Leave the ring, which ends for all ranks; what is in progress fails."""
        super().close()
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            reducer.close()

    def reduce(self, bucket: Any) -> Any:
        """The hook: average a bucket over all ranks; a future of it, or of the error that ended the ring."""
        context, reducer = self._context, self._reducer
        if context is None or reducer is None:
            return super().reduce(bucket)
        self.used = True
        if bucket.index() == 0:
            context.stream.begin()
            context.notes.begin_iteration()
        iteration = context.stream.iteration
        future = reducer.reduce(bucket, iteration)
        plan = self._plan(context, bucket, bucket.buffer()) if context.rank == 0 else None

        def reduced(done: Any) -> torch.Tensor:
            result: torch.Tensor = done.value()  # or the ring's error, which DDP would take for a tensor
            try:
                if plan is not None:
                    context.notes.samples.take(result, plan.tracked, iteration)
            except Exception as error:  # keeping a state must never stop the training of it
                context.stream.fault = f"{type(error).__name__}: {error}"
                _log.exception("checkmate: gradients could not be looked at")
            return result

        return future.then(reduced)

    def send_nothing(self, iteration: int) -> None:
        """Let zeros go round, for an iteration that will not be applied. All ranks must call it."""
        assert self._reducer is not None
        self._reducer.reduce_zeros(iteration)
