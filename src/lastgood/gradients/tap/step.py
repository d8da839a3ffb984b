"""The tap for everything but DDP: each rank sends the gradients that its own optimizer's step takes.

Under FSDP2 those are its shards, under DeepSpeed its partitions, and without ranks all there is. They are reduced,
unscaled and clipped already. The layout is the union over ranks, and every rank owns the buckets of its own parameters.

An iteration's gradients may be taken in parts: DeepSpeed sets those of one group, steps it, and clears them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import groupby

from lastgood._lazy import torch
from lastgood.gradients.layout.spans import Span
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.tap.device_copy import DeviceMover
from lastgood.gradients.trainer.parameters import TrackedParameters, flat_bytes
from lastgood.state.shards import local_part

__all__ = ["StepTap"]


class StepTap:
    """Sends one rank's gradients; `first` is the index of its first parameter in the layout.

    In each iteration `begin`, then `send` for each part of the update, then `finish`: each parameter's bytes go out
    once.
    """

    def __init__(
        self, stream: GradientStream, tracked: TrackedParameters, first: int, mover: DeviceMover | None
    ) -> None:
        self._stream = stream
        self._tracked = tracked
        self._first = first
        self._mover = mover
        own = range(first, first + len(tracked.parameters))
        self._buckets = [
            (number, [index - first for index in bucket.parameters])
            for number, bucket in enumerate(stream.layout.buckets)
            if bucket.parameters[0] in own
        ]
        self._sent: set[int] = set()

    def begin(self) -> None:
        """A new iteration: nothing of it is sent."""
        self._sent.clear()

    def send(self, parameters: Set[int]) -> bool:
        """Send these parameters' gradients as they are now; on return they may change. Says whether all are sent."""
        self._send(parameters, zeros=False)
        return len(self._sent) == len(self._tracked.parameters)

    def finish(self) -> None:
        """Send zeros in the place of what was not sent: parameters that the update leaves alone."""
        self._send(set(range(len(self._tracked.parameters))) - self._sent, zeros=True)

    def _send(self, parameters: Set[int], *, zeros: bool) -> None:
        for number, members in self._buckets:
            for run in _runs(members, parameters):
                self._send_run(number, run, zeros=zeros)
        self._sent |= parameters

    def _send_run(self, bucket: int, run: list[int], *, zeros: bool) -> None:
        """Send the gradients of neighbours in a bucket."""
        iteration, layout = self._stream.iteration, self._stream.layout
        declared = [layout.parameters[self._first + index] for index in run]
        gradients = [self._gradient(index, zeros=zeros) for index in run]
        if self._mover is not None:
            span = Span(bucket, declared[0].dtype, declared[0].offset, 0, sum(one.numel() for one in gradients))
            if span.nbytes:
                self._mover.move(iteration, gradients, [span], 0)
            return
        for one, gradient in zip(declared, gradients, strict=True):
            if gradient.numel():
                span = Span(bucket, one.dtype, one.offset, 0, gradient.numel())
                self._stream.send(iteration, [span], gradient.data_ptr(), borrowed=False)

    def _gradient(self, index: int, *, zeros: bool) -> torch.Tensor:
        """Its bytes, in the order of the parameter's."""
        parameter = self._tracked.parameters[index]
        held = None if zeros else parameter.grad
        gradient = torch.zeros_like(local_part(parameter)) if held is None else local_part(held)
        return flat_bytes(gradient, self._tracked.order_for(index, gradient))


def _runs(members: list[int], wanted: Set[int]) -> Iterator[list[int]]:
    """Neighbours that are wanted."""
    for chosen, run in groupby(members, key=wanted.__contains__):
        if chosen:
            yield list(run)
