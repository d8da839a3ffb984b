"""A rank's layers on their way: from a complete gradient through compressor and exchange to all ranks' blocks.

Neighbouring layers of which little is sent make up a group: their blocks go together, so that a model of many small
parameters (BatchNorm's) costs no exchange for each of them. What is sent of each layer is the same as without groups.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.host_memory import fresh_memory
from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.compressors import Compressor, ValueType, keep_count, make_compressor
from lastgood.sparse.correction import Correction, MomentumCorrection, clip_gradient, warm_up
from lastgood.sparse.engine_state import LayerShape, most_bytes
from lastgood.sparse.host_copies import HostCopies
from lastgood.sparse.layers import Layer, flat_gradient
from lastgood.sparse.optimizer import SparseOptimizer
from lastgood.sparse.ranks import Gathers, Ranks
from lastgood.sparse.schedule import Schedule, Task
from lastgood.sparse.tasks import Tasks, results
from lastgood.units import KIB

__all__ = ["GROUP_BYTES", "Applier", "Pipeline", "Side", "group_layers"]

_log = logging.getLogger("lastgood")

GROUP_BYTES: Final = 16 * KIB
"""A group is complete once its blocks may have so many bytes: a quarter of what goes in one record of the exchange."""


def group_layers(layer_bytes: Sequence[int], group_bytes: int) -> list[range]:
    """The groups of layers that go together: neighbours, the same on all ranks."""
    groups, begin, held = [], 0, 0
    for number, own in enumerate(layer_bytes):
        held += own
        if held >= group_bytes or number + 1 == len(layer_bytes):
            groups.append(range(begin, number + 1))
            begin, held = number + 1, 0
    return groups


class Side:
    """What this rank holds of one layer."""

    def __init__(
        self,
        layer: Layer,
        compressor: Compressor,
        count: int,
        values_type: torch.dtype,
        correction: MomentumCorrection | None,
    ) -> None:
        self.layer = layer
        self.compressor = compressor
        self.count = count
        """Elements that are sent once any warm-up is over."""
        self.values_type = values_type
        self.correction = correction
        self.residual = fresh_memory(4 * layer.parameter.numel()).view(torch.float32)
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
        correction: Correction,
        threads: int,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._schedule = schedule
        self._copies = copies
        self._error_feedback = error_feedback
        self._correction = correction
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
                correction.of_layer(layer.parameter.numel()),
            )
            for layer in layers
        ]
        self.compression = compression
        self._ranks = ranks.ranks
        least = least_compression
        if correction.warm_up:
            least = min(least, warm_up(compression, 0, correction.warm_up))
        self.shapes = [
            LayerShape(
                side.layer.name,
                side.residual.numel(),
                most_bytes(
                    side.compressor,
                    keep_count(side.residual.numel(), least, ranks.ranks),
                    side.values_type.itemsize,
                ),
            )
            for side in self.sides
        ]
        sizes = [most_bytes(side.compressor, side.count, side.values_type.itemsize) for side in self.sides]
        self.groups = group_layers(sizes, GROUP_BYTES)
        self._group_of = [number for number, group in enumerate(self.groups) for _ in group]
        self.value_bytes = self.sides[0].values_type.itemsize + (1.5 if self.sides[0].compressor.width == 1 else 0.4)
        """Sent for each chosen element, indices and checksums included, about (docs/wire-format.md)."""
        self.waited_s = 0.0
        """For other ranks' blocks, so far."""
        self.exchange: Gathers | None = None
        self._tasks = Tasks(threads, "sparse-compress")
        self._complete: dict[int, dict[int, Callable[[], torch.Tensor] | None]] = {}
        """By group, the gradients of its layers that are complete, until all are."""
        self._versions: list[tuple[Layer, torch.Tensor, int]] = []
        """Gradients of this iteration, with torch's count of their changes when they were begun."""
        # By iteration and group:
        self._compressing: dict[Task, Future[tuple[SparseGradient, ...]]] = {}
        self._sent: dict[Task, tuple[SparseGradient, ...]] = {}
        self._gathered: dict[Task, Future[list[tuple[SparseGradient, ...]]]] = {}
        self._untaken: dict[Task, int] = {}

    def group_elements(self) -> list[tuple[int, ...]]:
        """The elements of each layer of each group."""
        return [tuple(self.shapes[number].elements for number in group) for group in self.groups]

    def clip(self) -> None:
        """Scale the gradients of this iteration down to what this rank may have of the norm, before they are begun.

        Layers whose gradient is not finite count for nothing: they are skipped by all ranks.
        """
        limit = self._correction.clip
        gradients = [flat_gradient(side.layer) for side in self.sides if side.layer.parameter.grad is not None]
        if limit is None or not gradients:
            return
        norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in gradients])
        norm = float(torch.linalg.vector_norm(norms[torch.isfinite(norms)]))
        for side in self.sides:
            if side.layer.parameter.grad is not None:
                clip_gradient(side.layer.parameter.grad, norm, limit, self._ranks)

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
        iteration = self._schedule.begin(number).iteration
        if held is not None:
            self._versions.append((side.layer, held, held._version))
        place = self._group_of[number]
        group, complete = self.groups[place], self._complete.setdefault(place, {})
        complete[number] = gradient
        if len(complete) < len(group):
            return
        del self._complete[place]
        task = Task(iteration, place)

        def work() -> tuple[SparseGradient, ...]:
            made = tuple(self._compressed(self.sides[one], complete[one], iteration) for one in group)
            self._gathered[task] = exchange.submit_group(*task, made)
            return made

        def arrive() -> None:
            for gradient in complete.values():
                if gradient is not None:
                    gradient()

        self._compressing[task] = self._tasks.submit(task, work, arrive if self._copies.on_their_way else None)

    def _count(self, side: Side, iteration: int) -> int:
        """How many elements of a layer this rank sends in an iteration."""
        steps, elements = self._correction.warm_up, side.residual.numel()
        if iteration >= steps:
            return side.count
        return keep_count(elements, warm_up(self.compression, iteration, steps), self._ranks)

    def _compressed(self, side: Side, gradient: Callable[[], torch.Tensor] | None, iteration: int) -> SparseGradient:
        if gradient is None:
            return side.nothing()
        here = gradient()
        corrected = here if side.correction is None else side.correction.correct(here)
        sparse = side.compressor.compress(corrected, side.residual, self._count(side, iteration))
        if side.correction is not None and self._correction.masking:
            side.correction.mask(sparse)
        if not self._error_feedback:
            side.residual.zero_()
        return sparse

    def wait_compressed(self) -> None:
        """Return when everything that was begun is on its way: gradients are not needed any more.

        Raises ConfigError for a gradient that was changed since it was begun: another one has left.
        """
        what = f"the compressors of iteration {self._schedule.iteration}"
        made = results(self._compressing.values(), self._timeout_s, what)
        for task, group in zip(self._compressing, made, strict=True):
            self._sent[task], self._untaken[task] = group, len(group)
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
        now = self._schedule.iteration
        return [one.values for task, group in self._sent.items() if task.iteration == now for one in group]

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
        groups = dict.fromkeys(self._group_task(task) for task in tasks)
        results([self._gathered[group] for group in groups], 2 * self._timeout_s, what)
        self.waited_s += time.perf_counter() - before

    def arrived(self) -> list[Task]:
        """What has come from all ranks, and of whose group something was not taken."""
        done = [task for task, future in self._gathered.items() if future.done()]
        return [Task(task.iteration, number) for task in done for number in self.groups[task.layer]]

    def take(self, task: Task) -> list[SparseGradient] | None:
        """All ranks' blocks of a task, in rank order; None if some rank's gradient was not finite.

        In that case no rank may apply it, and what this rank sent is in its residual again.
        """
        side, group = self.sides[task.layer], self._group_task(task)
        gathered = self._of_layer(task)
        sent = self._sent[group][task.layer - self.groups[group.layer].start]
        self._untaken[group] -= 1
        if not self._untaken[group]:
            del self._gathered[group], self._sent[group], self._untaken[group]
        if all(one.finite for one in gathered):
            return gathered
        side.not_finite += 1
        if sent.finite and self._error_feedback:
            side.compressor.give_back(sent, side.residual)
        return None

    def _group_task(self, task: Task) -> Task:
        return Task(task.iteration, self._group_of[task.layer])

    def _of_layer(self, task: Task) -> list[SparseGradient]:
        group = self._group_task(task)
        place = task.layer - self.groups[group.layer].start
        return [one[place] for one in self._gathered[group].result()]

    def in_flight(self) -> dict[int, list[SparseGradient]]:
        """By layer, all ranks' blocks of what was sent and not taken, which is waited for."""
        tasks = self._schedule.in_flight()
        self.wait_for(tasks)
        return {task.layer: self._of_layer(task) for task in tasks}

    def restore(self, in_flight: Mapping[Task, list[SparseGradient]], rank: int) -> None:
        """Go on with this in flight."""
        self._sent, self._gathered, self._untaken = {}, {}, {}
        for group in dict.fromkeys(self._group_task(task) for task in in_flight):
            members = self.groups[group.layer]
            tasks = [Task(group.iteration, number) for number in members]
            blocks = [in_flight.get(task) or [self.sides[task.layer].nothing()] * self._ranks for task in tasks]
            gathered = list(zip(*blocks, strict=True))
            self._sent[group] = gathered[rank]
            self._untaken[group] = sum(task in in_flight for task in tasks)
            self._gathered[group] = Future()
            self._gathered[group].set_result(gathered)

    def close(self) -> None:
        """End threads and exchange. Safe to call twice."""
        self._tasks.close()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.close()


class Applier:
    """Applies tasks of `pipeline` by `sparse`, divided by `ranks`. It writes weights: inside the optimizer's step."""

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, sparse: SparseOptimizer, copies: HostCopies, ranks: int
    ) -> None:
        self._pipeline, self._schedule, self._sparse, self._ranks = pipeline, schedule, sparse, ranks
        self._copies = copies
        self.applied = self.early = 0
        """Layers so far, and those of them that were not due yet."""

    def apply(self, due: Sequence[Task]) -> None:
        """What is due, and then what may be applied early."""
        self._apply(due)
        early = self._schedule.early(self._pipeline.arrived())
        self._apply(early)
        self.early += len(early)
        self._copies.settle()

    def flush(self) -> None:
        """All that is in flight; every element is up to date then."""
        self._apply(self._schedule.flush(), flushed=True)
        with self._copies.all_stepped():
            self._sparse.catch_up(self._schedule.iteration - 1)
        self._copies.settle()

    def _apply(self, tasks: Sequence[Task], *, flushed: bool = False) -> None:
        """Those of an iteration in one call."""
        for iteration, together in itertools.groupby(tasks, lambda task: task.iteration):
            given = []
            for task in together:
                if not flushed:
                    self._schedule.apply(task)
                layer, gathered = self._pipeline.sides[task.layer].layer, self._pipeline.take(task)
                self.applied += 1
                if gathered is None:
                    _log.warning(
                        "sparse: the gradient of %s was not finite in iteration %d; no rank applies it",
                        layer.name,
                        iteration,
                    )
                elif any(len(one.indices) for one in gathered):
                    given.append((layer, gathered))
            if given:
                with contextlib.ExitStack() as stepped:
                    for layer, _ in given:
                        stepped.enter_context(self._copies.stepped(layer))
                    blocks = [(layer.parameter, gathered) for layer, gathered in given]
                    self._sparse.apply_all(blocks, iteration=iteration, scale=1.0 / self._ranks)
