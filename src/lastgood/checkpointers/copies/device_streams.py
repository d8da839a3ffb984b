"""Side streams of CUDA devices, on which copies run beside the training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from lastgood._lazy import torch

__all__ = ["DeviceStreams", "copy_bytes", "side_stream"]


@functools.cache
def side_stream(device: torch.device) -> Any:
    """The side stream of a device, one for the whole process.

    torch keeps freed device memory by stream. A new stream for each save would have to ask the driver for memory, and
    the driver waits for the kernels that run: for ever, if one belongs to a collective that hangs.
    """
    return torch.cuda.Stream(device=device)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between two uint8 tensors of one size; on the CPU with one thread, and without the interpreter's lock.

    torch's own copy would start its intra-op threads a second time in a background thread, beside the training's.
    """
    if source.device.type == target.device.type == "cpu":
        target.numpy()[...] = source.numpy()
    else:
        target.copy_(source, non_blocking=True)


class DeviceStreams:
    """A side stream on each CUDA device that holds blocks, after what the training's own streams have done so far.

    Made in save(), on the training's thread; used in any thread, whose own current device does not matter.
    """

    def __init__(self, blocks: Sequence[torch.Tensor]) -> None:
        self._streams: dict[torch.device, Any] = {}
        for device in {block.device for block in blocks if block.is_cuda}:
            self.follow(device)

    def follow(self, device: torch.device) -> None:
        """What is copied from here on runs after what the calling thread's own stream of a device has done so far."""
        stream = self._streams.setdefault(device, side_stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from a device to the host or back on its side stream, and within the host at once."""
        on_device = source if source.is_cuda else target
        if not on_device.is_cuda:
            copy_bytes(target, source)
            return
        stream = self._streams[on_device.device]
        with torch.cuda.stream(stream):
            copy_bytes(target, source)
        on_device.record_stream(stream)

    @contextlib.contextmanager
    def after(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """While inside, what is issued for `device` runs after its copies so far. `tensors` stay until it has run."""
        with torch.cuda.stream(self._streams[device]):
            yield
        for tensor in tensors:
            tensor.record_stream(self._streams[device])

    def mark(self) -> list[Any]:
        """An event after all copies so far, on each device."""
        events = []
        for device, stream in self._streams.items():
            with torch.cuda.device(device):
                event = torch.cuda.Event()
                event.record(stream)
            events.append((device, event))
        return events

    def synchronize(self) -> None:
        """Wait until all copies so far have run."""
        for stream in self._streams.values():
            stream.synchronize()
