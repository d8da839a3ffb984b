"""Copies of a flattened state on the host, taken while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.errors import WaitTimeout
from lastgood.state import FlatState

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["CopyFence", "HostSnapshot", "copy_bytes", "freeze", "host_buffer"]


def freeze(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy blocks that training may change at once: on the CPU now, on CUDA in the order of the current stream."""
    return [block.clone() for block in blocks]


def host_buffer(size: int, pinned: bool) -> torch.Tensor:
    """A uint8 host tensor of `size` bytes, page-locked for copies from a CUDA device where asked for."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between two uint8 tensors of one size; on the CPU with one thread, and without the interpreter's lock.

    torch's own copy would start its intra-op threads a second time in a background thread, beside the training's.
    """
    if source.device.type == "cpu":
        target.numpy()[...] = source.numpy()
    else:
        target.copy_(source, non_blocking=True)


class CopyFence:
    """Between a background copy and the optimizer: opened when the live bytes may be overwritten.

    Copies from a CUDA device are waited for on the device: the current stream waits for an event, the CPU goes on.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._open = threading.Event()
        self._device_events: list[Any] = []

    def open(self, device_events: Sequence[Any] = ()) -> None:
        """Let updates go on, after `device_events` on the device if there are any."""
        self._device_events = list(device_events)
        self._open.set()

    def wait(self, timeout_s: float) -> None:
        """Return when an update may be issued. Raises WaitTimeout, naming what was copied."""
        if not self._open.wait(timeout_s):
            raise WaitTimeout(f"waited {timeout_s:.0f} s for {self._what} to be copied off the training's memory")
        for event in self._device_events:
            torch.cuda.current_stream().wait_event(event)


class HostSnapshot:
    """A whole state in host buffers. Made in save(), filled by `copy` in a background thread.

    On CUDA every copy is issued in save(), on a side stream, and the optimizer waits on the device.
    """

    def __init__(self, flat: FlatState, buffers: Sequence[torch.Tensor], what: str) -> None:
        self.layout = flat.layout
        self.buffers = list(buffers)
        self.fence = CopyFence(what)
        self._on_device = any(block.is_cuda for block in flat.blocks)
        immediate = self.buffers[flat.layout.deferred_blocks :]
        self._pending = list(zip(self.buffers, flat.deferred, strict=False))
        self._copied: list[Any] = []
        if self._on_device:
            self._pending += list(zip(immediate, freeze(flat.immediate), strict=True))
            self._issue()
        else:
            for buffer, block in zip(immediate, flat.immediate, strict=True):
                copy_bytes(buffer, block)

    def _issue(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for buffer, block in self._pending:
                copy_bytes(buffer, block)
                if block.is_cuda:
                    block.record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        self._copied = [event]
        self.fence.open(self._copied)

    def copy(self) -> None:
        """Return when all bytes are in the buffers; opens the fence on the CPU. Called in a background thread."""
        if self._on_device:
            for event in self._copied:
                event.synchronize()
        else:
            try:
                for buffer, block in self._pending:
                    copy_bytes(buffer, block)
            finally:
                self.fence.open()
        self._pending = []
