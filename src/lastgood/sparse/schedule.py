"""Which part of which iteration may run when: plain rules, without threads, clocks or tensors.

A layer here is one parameter, numbered in the order of the model. In each iteration a layer's gradient becomes complete
(`begin`: it may be compressed and sent), all ranks' parts of it arrive, and it is applied. Under staleness s the step
of iteration i applies what iteration i - s sent, so the forward pass of iteration i sees updates up to i - 1 - s. With
`partial` a step also applies what of its own iteration has arrived already (StellaTrain, section 3.4).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["Schedule", "Task"]


class Task(NamedTuple):
    """One layer in one iteration. Tasks order as they should run: earlier iterations first, then earlier layers."""

    iteration: int
    layer: int


class Schedule:
    """The tasks of a training of `layers` layers that were begun and not yet applied.

    Every method raises ValueError for what may not be at this moment; nothing is changed then.
    """

    def __init__(self, layers: int, staleness: int, *, partial: bool = False) -> None:
        if layers < 1 or staleness not in (0, 1) or (partial and not staleness):
            raise ValueError(f"{layers} layers, staleness {staleness}, partial {partial}")
        self.layers = layers
        self.staleness = staleness
        self.partial = partial
        self.iteration = 0
        """The one whose gradients become complete now."""
        self._begun: set[int] = set()
        self._waiting: list[list[int]] = [[] for _ in range(layers)]
        """For each layer the iterations that were begun and not applied, in order."""

    def begin(self, layer: int) -> Task:
        """The gradient of a layer is complete: once in each iteration."""
        if layer in self._begun:
            raise ValueError(f"layer {layer} was begun before in iteration {self.iteration}")
        self._waiting[layer].append(self.iteration)
        self._begun.add(layer)
        return Task(self.iteration, layer)

    def has_begun(self, layer: int) -> bool:
        """Whether this iteration has begun a layer."""
        return layer in self._begun

    def missing(self) -> list[int]:
        """The layers that this iteration has not begun."""
        return [layer for layer in range(self.layers) if layer not in self._begun]

    @property
    def idle(self) -> bool:
        """Whether this iteration has not begun any layer: the moment between two iterations."""
        return not self._begun

    def due(self) -> list[Task]:
        """What this iteration's step has to apply, in the order in which it should."""
        newest = self.iteration - self.staleness
        return sorted(Task(i, layer) for layer, waiting in enumerate(self._waiting) for i in waiting if i <= newest)

    def early(self, arrived: Collection[Task]) -> list[Task]:
        """Of what has `arrived`, what this step may apply though it need not: nothing, if not `partial`.

        To be asked once all that is due is applied.
        """
        if not self.partial:
            return []
        return sorted(task for task in self.in_flight() if task in arrived and self._waiting[task.layer][0] == task[0])

    def apply(self, task: Task) -> None:
        """A task is applied: the oldest of its layer, and not before its step."""
        waiting = self._waiting[task.layer]
        if not waiting or waiting[0] != task.iteration:
            raise ValueError(f"{task} is not the next of its layer, which waits for {waiting}")
        if task.iteration > self.iteration - self.staleness and not self.partial:
            raise ValueError(f"{task} is applied in the step of iteration {self.iteration}")
        del waiting[0]

    def end(self) -> None:
        """The step of this iteration is finished, and the next iteration begins."""
        missing = self.missing()
        if missing:
            raise ValueError(f"layers {missing[:8]} were not begun in iteration {self.iteration}")
        due = self.due()
        if due:
            raise ValueError(f"{due[:8]} were not applied in the step of iteration {self.iteration}")
        self._begun.clear()
        self.iteration += 1

    def flush(self) -> list[Task]:
        """All that is in flight is applied now, between two iterations: what there is, in order."""
        if not self.idle:
            raise ValueError(f"iteration {self.iteration} has begun")
        flying = self.in_flight()
        for waiting in self._waiting:
            waiting.clear()
        return flying

    def in_flight(self) -> list[Task]:
        """What was begun and not applied."""
        return sorted(Task(i, layer) for layer, waiting in enumerate(self._waiting) for i in waiting)

    def restore(self, iteration: int, in_flight: Sequence[Task]) -> None:
        """Go on before `iteration`, with what was in flight then."""
        layers = [task.layer for task in in_flight]
        allowed = range(max(0, iteration - self.staleness), iteration)
        if len(set(layers)) != len(layers) or not set(layers) <= set(range(self.layers)):
            raise ValueError(f"layers {sorted(layers)[:8]} of {self.layers}")
        if iteration < 0 or any(task.iteration not in allowed for task in in_flight):
            raise ValueError(f"{sorted(in_flight)[:8]} in flight before iteration {iteration}")
        self.iteration = iteration
        self._begun.clear()
        self._waiting = [[] for _ in range(self.layers)]
        for task in in_flight:
            self._waiting[task.layer].append(task.iteration)
