"""The tap for everything but DDP: each rank sends the gradients that its own optimizer's step takes.

Under FSDP2 those are its shards, under DeepSpeed its partition, and without ranks all there is. They are reduced,
unscaled and clipped already. The layout is the union over ranks, and every rank owns the buckets of its own parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lastgood._lazy import lazy_module
from lastgood.gradients.device_mover import DeviceMover
from lastgood.gradients.pieces import Span
from lastgood.gradients.stream import GradientStream
from lastgood.gradients.tracked import Tracked, flat_bytes
from lastgood.state.shards import local_part

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["StepTap"]


class StepTap:
    """Sends one rank's gradients; `first` is the index of its first parameter in the layout."""

    def __init__(self, stream: GradientStream, tracked: Tracked, first: int, mover: DeviceMover | None) -> None:
        self._stream = stream
        self._tracked = tracked
        self._mover = mover
        self._buckets: list[tuple[list[int], list[Span]]] = []
        own = range(first, first + len(tracked.parameters))
        for number, bucket in enumerate(stream.layout.buckets):
            if bucket.parameters[0] in own:
                self._buckets.append(
                    ([index - first for index in bucket.parameters], [Span(number, bucket.dtype, 0, 0, bucket.nbytes)])
                )

    def send(self) -> None:
        """Send the gradients as they are now; zeros where there is none. On return they may change."""
        iteration = self._stream.iteration
        for indices, spans in self._buckets:
            gradients = [self._gradient(index) for index in indices]
            if self._mover is not None:
                self._mover.move(iteration, gradients, spans, 0)
                continue
            at = 0
            for gradient in gradients:
                span = Span(spans[0].bucket, spans[0].dtype, at, 0, gradient.numel())
                if gradient.numel():
                    self._stream.send(iteration, [span], gradient.data_ptr(), borrowed=False)
                at += gradient.numel()

    def _gradient(self, index: int) -> torch.Tensor:
        """Its bytes, in the order of the parameter's."""
        parameter = self._tracked.parameters[index]
        local = local_part(parameter)
        gradient = torch.zeros_like(local) if parameter.grad is None else local_part(parameter.grad)
        return flat_bytes(gradient, self._tracked.order_for(index, gradient))
