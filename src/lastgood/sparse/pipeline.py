"""A rank's layers on their way: from a complete gradient through compressor and exchange to all ranks' blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.compressors import Compressor, ValueType, keep_count, make_compressor
from lastgood.sparse.engine_state import LayerShape, most_bytes
from lastgood.sparse.host_copies import HostCopies
from lastgood.sparse.layers import Layer, flat_gradient
from lastgood.sparse.ranks import Gathers, Ranks
from lastgood.sparse.schedule import Schedule, Task
from lastgood.sparse.tasks import Tasks, results

__all__ = ["Pipeline", "Side"]


class Side:
    """What this rank holds of one layer."""

    def __init__(self, layer: Layer, compressor: Compressor, count: int, values_type: torch.dtype) -> None:
        self.layer = layer
        self.compressor = compressor
        self.count = count
        self.values_type = values_type
        self.residual = torch.zeros(layer.parameter.numel(), dtype=torch.float32, device="cpu")
        self.not_finite = 0
        """Iterations in which some rank's gradient was not finite."""

    def nothing(self) -> SparseGradient:
        """What is sent of a layer that no loss used; its residual waits for the next time."""
        values = torch.empty(0, dtype=self.values_type, device="cpu")
        return SparseGradient(self.compressor.elements, self.compressor.width, np.empty(0, np.uint32), values)


class Pipeline:
    """All layers of this rank. Used in the training's thread; `threads` of its own compress.

    `begin` and `wait_compressed` in each iteration, then `wait_for` and `take` of what the schedule says. Residuals
    change between the two first, and in nothing else here. `timeout_s` is the limit of waits for other ranks.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        ranks: Ranks,
        schedule: Schedule,
        copies: HostCopies,
        *,
        compression: float,
        least_compression: float,
        compressor: str,
        values: ValueType,
        error_feedback: bool,
        threads: int,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._schedule = schedule
        self._copies = copies
        self._error_feedback = error_feedback
        self._timeout_s = timeout_s
        self.sides = [
            Side(
                layer,
                make_compressor(
                    compressor,
                    layer.parameter.numel(),
                    seed=(seed * len(layers) + layer.number) * ranks.ranks + ranks.rank,
                    values=values,
                    threads=threads,
                ),
                keep_count(layer.parameter.numel(), compression, ranks.ranks),
                getattr(torch, values),
            )
            for layer in layers
        ]
        self.compression = compression
        self._ranks = ranks.ranks
        self.shapes = [
            LayerShape(
                side.layer.name,
                side.residual.numel(),
                most_bytes(
                    side.compressor,
                    keep_count(side.residual.numel(), least_compression, ranks.ranks),
                    side.values_type.itemsize,
                ),
            )
            for side in self.sides
        ]
        self.value_bytes = self.sides[0].values_type.itemsize + (1.5 if self.sides[0].compressor.width == 1 else 0.4)
        """Sent for each chosen element, indices and checksums included, about (docs/wire-format.md)."""
        self.waited_s = 0.0
        """For other ranks' blocks, so far."""
        self.exchange: Gathers | None = None
        self._tasks = Tasks(threads, "sparse-compress")
        self._compressing: dict[Task, Future[SparseGradient]] = {}
        self._versions: list[tuple[Layer, torch.Tensor, int]] = []
        """Gradients of this iteration, with torch's count of their changes when they were begun."""
        self._sent: dict[Task, SparseGradient] = {}
        self._gathered: dict[Task, Future[list[SparseGradient]]] = {}

    def compress_by(self, compression: float) -> None:
        """From the next iteration on. Nothing of this one may have begun."""
        self.compression = compression
        for side in self.sides:
            side.count = keep_count(side.residual.numel(), compression, self._ranks)

    def begin(self, number: int) -> None:
        """The gradient of a layer is complete, or will not come in this iteration."""
        side, exchange = self.sides[number], self.exchange
        assert exchange is not None, "connected before the first backward pass"
        held = side.layer.parameter.grad
        gradient = None if held is None else self._copies.fetch(side.layer, flat_gradient(side.layer))
        task = self._schedule.begin(number)
        if held is not None:
            self._versions.append((side.layer, held, held._version))

        def work() -> SparseGradient:
            sparse = self._compressed(side, gradient)
            self._gathered[task] = exchange.submit(*task, sparse)
            return sparse

        self._compressing[task] = self._tasks.submit(task, work, gradient if self._copies.on_their_way else None)

    def _compressed(self, side: Side, gradient: Callable[[], torch.Tensor] | None) -> SparseGradient:
        if gradient is None:
            return side.nothing()
        sparse = side.compressor.compress(gradient(), side.residual, side.count)
        if not self._error_feedback:
            side.residual.zero_()
        return sparse

    def wait_compressed(self) -> None:
        """Return when everything that was begun is on its way: gradients are not needed any more.

        Raises ConfigError for a gradient that was changed since it was begun: another one has left.
        """
        what = f"the compressors of iteration {self._schedule.iteration}"
        sparse = results(self._compressing.values(), self._timeout_s, what)
        self._sent.update(zip(self._compressing, sparse, strict=True))
        self._compressing.clear()
        versions, self._versions = self._versions, []
        for layer, held, version in versions:
            if layer.parameter.grad is not held or held._version != version:
                raise ConfigError(
                    f"the gradient of {layer.name} was changed between engine.backward() and engine.step() (clipped?), "
                    "and had left before; change it by a hook of its parameter, as parameter.register_hook(...)"
                )

    def sent_values(self) -> list[torch.Tensor]:
        """What this rank has sent in this iteration, of each layer; after `wait_compressed`."""
        return [sent.values for task, sent in self._sent.items() if task.iteration == self._schedule.iteration]

    def traffic(self) -> tuple[int, float]:
        """Bytes sent to the next rank so far, and seconds in which something was on its way to it."""
        facts = getattr(self.exchange, "facts", None)
        if facts is None:
            return 0, 0.0
        found = facts()
        return found.sent_bytes, found.sending_s

    def wait_for(self, tasks: Sequence[Task]) -> None:
        """Return when all ranks' blocks of these are here. Raises what the exchange raises, and WaitTimeout."""
        if not tasks:
            return
        before = time.perf_counter()
        what = f"all ranks' blocks of iteration {tasks[0].iteration}"
        # The exchange has a limit of its own, and says more; this one is for an exchange that hangs.
        results([self._gathered[task] for task in tasks], 2 * self._timeout_s, what)
        self.waited_s += time.perf_counter() - before

    def arrived(self) -> list[Task]:
        """What has come from all ranks, and was not taken."""
        return [task for task, future in self._gathered.items() if future.done()]

    def take(self, task: Task) -> list[SparseGradient] | None:
        """All ranks' blocks of a task, in rank order; None if some rank's gradient was not finite.

        In that case no rank may apply it, and what this rank sent is in its residual again.
        """
        side = self.sides[task.layer]
        gathered, sent = self._gathered.pop(task).result(), self._sent.pop(task)
        if all(one.finite for one in gathered):
            return gathered
        side.not_finite += 1
        if sent.finite and self._error_feedback:
            side.compressor.give_back(sent, side.residual)
        return None

    def in_flight(self) -> dict[int, list[SparseGradient]]:
        """By layer, all ranks' blocks of what was sent and not taken, which is waited for."""
        tasks = self._schedule.in_flight()
        self.wait_for(tasks)
        return {task.layer: self._gathered[task].result() for task in tasks}

    def restore(self, in_flight: Mapping[Task, list[SparseGradient]], rank: int) -> None:
        """Go on with this in flight."""
        self._sent = {task: blocks[rank] for task, blocks in in_flight.items()}
        self._gathered = {}
        for task, blocks in in_flight.items():
            self._gathered[task] = Future()
            self._gathered[task].set_result(blocks)

    def close(self) -> None:
        """End threads and exchange. Safe to call twice."""
        self._tasks.close()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.close()
