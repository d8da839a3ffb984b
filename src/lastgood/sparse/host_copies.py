"""Host copies of parameters on a CUDA device, and the ways between them: the sparse engine compresses and steps here.

A gradient comes to page-locked memory on a stream beside the training's, while the backward pass goes on. Steps are
made in the host copy of the weights, which then go to the device on that stream; the training's next work waits for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lastgood._lazy import torch
from lastgood.sparse.layers import Layer
from lastgood.sparse.optimizer import SparseOptimizer

__all__ = ["HostCopies", "needs_copy"]


def needs_copy(parameter: torch.Tensor) -> bool:
    """Whether it cannot be stepped where it is."""
    return bool(parameter.device.type != "cpu")


class HostCopies:
    """Of those of `layers` that need one; all others are used where they are. `sparse` steps the copies from now on.

    Used in the training's thread and in autograd's; what `fetch` returns may be called in any thread.
    """

    def __init__(self, layers: Sequence[Layer], sparse: SparseOptimizer) -> None:
        streams: dict[torch.device, Any] = {}
        self._copies: dict[int, _Copy] = {}
        for layer in layers:
            if needs_copy(layer.parameter):
                device = layer.parameter.device
                if device.type == "cuda" and device not in streams:
                    streams[device] = torch.cuda.Stream(device=device)
                self._copies[layer.number] = copy = _Copy(layer, streams.get(device))
                sparse.set_target(layer.parameter, copy.weights)
        self._streams = streams

    @property
    def on_their_way(self) -> bool:
        """Whether what `fetch` gives may take long: until the device has made the gradient."""
        return bool(self._streams)

    def refresh(self) -> None:
        """Take the weights that are on the device: before the first step, behind all that may have restored them."""
        for copy in self._copies.values():
            copy.refresh()

    def fetch(self, layer: Layer, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to bring `gradient` (flat) here; the result waits for it.

        Ordered after what the current stream has done. The gradient must stay as it is until the result has returned,
        and what that returns is overwritten by the layer's next one.
        """
        copy = self._copies.get(layer.number)
        return (lambda: gradient) if copy is None else copy.fetch(gradient)

    @contextmanager
    def stepped(self, layer: Layer) -> Iterator[None]:
        """A block in which the layer's host copy is stepped; its weights are on their way to the device after it."""
        copy = self._copies.get(layer.number)
        if copy is None:
            yield
            return
        copy.prepare()
        yield
        copy.send()

    @contextmanager
    def all_stepped(self) -> Iterator[None]:
        """As `stepped`, for all layers."""
        for copy in self._copies.values():
            copy.prepare()
        yield
        for copy in self._copies.values():
            copy.send()

    def settle(self) -> None:
        """What the training's stream does next is ordered after all weights that were sent."""
        for device, side in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(side)


class _Copy:
    """One layer's weights and gradient in host memory. `side` is the stream for copies; None: they are made at once."""

    def __init__(self, layer: Layer, side: Any) -> None:
        self._parameter = layer.parameter
        self._side = side
        self._sent: Any = None
        """Recorded when the newest weights had left the host copy."""
        self._version: int | None = None
        """Torch's count of the parameter's changes when both were the same; None: they never were."""
        elements = layer.parameter.numel()
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "pin_memory": side is not None}
        self.weights = torch.empty(elements, **kind)
        self._gradient = torch.empty(elements, **kind)

    def refresh(self) -> None:
        self._wait_sent()
        self.weights.copy_(self._parameter.detach().view(-1))
        self._version = self._parameter._version

    def prepare(self) -> None:
        """Return when the host copy may be changed, and holds what the parameter does, whoever has changed that."""
        self._wait_sent()
        if self._version != self._parameter._version:
            self.refresh()

    def fetch(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        side = self._side
        if side is None:
            self._gradient.copy_(gradient)
            return lambda: self._gradient
        side.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(side):
            self._gradient.copy_(gradient, non_blocking=True)
            gradient.record_stream(side)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(side)

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return self._gradient

        return wait

    def _wait_sent(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def send(self) -> None:
        """Send the weights, after what the training's stream was told to wait for: copies of the old ones, say."""
        target, side = self._parameter.detach().view(-1), self._side
        if side is None:
            target.copy_(self.weights)
        else:
            side.wait_stream(torch.cuda.current_stream(target.device))
            with torch.cuda.stream(side):
                target.copy_(self.weights, non_blocking=True)
                self._sent = torch.cuda.Event(blocking=True)
                self._sent.record(side)
        self._version = self._parameter._version
