"""Brings gradients from a CUDA device to page-locked host memory, and from there, in the background, to the shadows."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lastgood._lazy import torch
from lastgood.gradients.layout.spans import Span
from lastgood.gradients.link.data_link import Ticket
from lastgood.gradients.link.gradient_stream import GradientStream, keep_for_ever

__all__ = ["DeviceMover"]

_log = logging.getLogger("lastgood")

_POLL_S = 0.001
_END_S = 5.0


@dataclass(frozen=True)
class _Moved:
    """Gradients on their way to the host."""

    iteration: int
    arrived: Any
    memory: torch.Tensor
    spans: Sequence[Span]
    base: int


class DeviceMover:
    """A side stream, a bounded amount of page-locked memory, and the thread that hands what has arrived to `stream`.

    With no room for so long as `patience_s` gradients are left out: their shadows find their buckets torn.
    """

    def __init__(self, stream: GradientStream, device: torch.device, limit_bytes: int, patience_s: float) -> None:
        self._stream = stream
        self._device = device
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._side = torch.cuda.Stream(device=device)
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._lent: list[tuple[torch.Tensor, list[Ticket]]] = []
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Moved | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkmate-mover", daemon=True)
        self._thread.start()
        self.left_out = 0
        """Pieces that found no room."""

    def move(self, iteration: int, tensors: Sequence[torch.Tensor], spans: Sequence[Span], base: int) -> None:
        """Send `spans` of the bytes of `tensors`, one after another; their sources count from `base`.

        Ordered after what the current stream has done; what it does next is ordered after the copy, so that the
        tensors may be overwritten.
        """
        memory = self._acquire(sum(tensor.nbytes for tensor in tensors))
        if memory is None:
            self.left_out += 1
            return
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            at = 0
            for tensor in tensors:
                flat = tensor.reshape(-1).view(torch.uint8)
                memory[at : at + flat.numel()].copy_(flat, non_blocking=True)
                tensor.record_stream(self._side)
                at += flat.numel()
            arrived = torch.cuda.Event()
            arrived.record(self._side)
        current.wait_event(arrived)
        self._queue.put(_Moved(iteration, arrived, memory, spans, base))

    def call(self, what: Callable[[], None]) -> None:
        """Call something in the thread, after all that was moved so far."""
        self._queue.put(what)

    def close(self) -> None:
        """Hand over what is on its way, within a bounded time, and end."""
        self._queue.put(None)
        self._thread.join(_END_S)

    def release(self) -> None:
        """Give all memory back, once no connection is left."""
        with self._lock:
            self._reclaim()
            keep_for_ever(self._lent)
            self._lent = []
            self._free.clear()

    # -- memory ----------------------------------------------------------------------------------------------------

    def _acquire(self, nbytes: int) -> torch.Tensor | None:
        deadline = time.monotonic() + self._patience_s
        while True:
            with self._lock:
                self._reclaim()
                if self._free[nbytes]:
                    return self._free[nbytes].pop()
                if self._held_bytes + nbytes <= max(self._limit_bytes, nbytes):
                    self._held_bytes += nbytes
                    break
                self._forget_free()
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except BaseException:
            with self._lock:
                self._held_bytes -= nbytes
            raise

    def _reclaim(self) -> None:
        still = []
        for memory, tickets in self._lent:
            if all(ticket.returned for ticket in tickets):
                self._free[memory.numel()].append(memory)
            else:
                still.append((memory, tickets))
        self._lent = still

    def _forget_free(self) -> None:
        """Give back memory of sizes that are not wanted now."""
        self._held_bytes -= sum(size * len(found) for size, found in self._free.items())
        self._free.clear()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            try:
                if isinstance(one, _Moved):
                    self._hand_over(one)
                else:
                    one()
            except Exception:  # the training goes on; the shadow says what it lacks
                _log.exception("checkmate: gradients could not be sent")

    def _hand_over(self, moved: _Moved) -> None:
        moved.arrived.synchronize()
        address = moved.memory.data_ptr() - moved.base
        tickets = self._stream.send(moved.iteration, moved.spans, address, borrowed=True)
        with self._lock:
            self._lent.append((moved.memory, tickets))
