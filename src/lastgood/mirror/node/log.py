"""Gradients of steps that cannot be applied yet, since the state before them is not known. Bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

from lastgood._lazy import torch

__all__ = ["GradientLog", "LoggedStep"]


@dataclass
class LoggedStep:
    """All gradients of one step."""

    step: int
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layout index, as on the wire."""
    absent: tuple[int, ...] = ()
    finished: bool = False

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(one.nbytes for one in self.gradients.values())


class GradientLog:
    """Newest steps; older ones go if there is no room. Steps count as the conversation's."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._steps: dict[int, LoggedStep] = {}
        self._bytes = 0

    def put(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Copy a parameter's gradient."""
        self._make_room(gradient.nbytes)
        if gradient.nbytes > self._limit_bytes:
            return
        one = self._steps.setdefault(step, LoggedStep(step))
        one.gradients[index] = gradient.clone()
        self._bytes += gradient.nbytes

    def finish(self, step: int, absent: tuple[int, ...], count: int) -> None:
        """All of a step has come: `count` gradients. It is of no use if not all of them are here."""
        found = self._steps.get(step)
        if found is None:
            return
        if len(found.gradients) < count:
            self._drop(step)
        else:
            found.absent, found.finished = absent, True

    def lose(self, step: int) -> None:
        """A step will never be complete: what was before it is of no use."""
        for one in [one for one in self._steps if one <= step]:
            self._drop(one)

    def finished(self) -> frozenset[int]:
        """Steps that are here completely."""
        return frozenset(step for step, one in self._steps.items() if one.finished)

    def since(self, step: int, until: int) -> list[LoggedStep] | None:
        """The steps from `step` to before `until`, in order; None if one of them is not here completely."""
        found = [self._steps.get(one) for one in range(step, until)]
        complete = [one for one in found if one is not None and one.finished]
        return complete if len(complete) == len(found) else None

    def of(self, step: int) -> LoggedStep:
        """What is here of a step, finished or not."""
        return self._steps.get(step, LoggedStep(step))

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
        self._bytes = 0

    def _make_room(self, nbytes: int) -> None:
        while self._steps and self._bytes + nbytes > self._limit_bytes:
            self._drop(min(self._steps))

    def _drop(self, step: int) -> None:
        self._bytes -= self._steps.pop(step).nbytes
