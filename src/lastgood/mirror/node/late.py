"""For a capture that began in the middle: which step on the wire a state is of, proven by a second state.

Neither how many steps there were before the capture, nor which gradient lies where in a bucket, is on the wire then.
Both are guessed, and what was guessed counts only once the updates of the steps between two states, made from the
gradients that passed, lead from the first one to the second one in every bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from lastgood._lazy import torch
from lastgood.errors import LastgoodError
from lastgood.gradients.layout.entries import Entry
from lastgood.gradients.shadow.memory import ShadowMemory, tensor_bytes
from lastgood.gradients.trainer.parameters import PARAMETER
from lastgood.mirror.job.ddp import rebuilds
from lastgood.mirror.node.layout import NodeLayout
from lastgood.mirror.node.life import bucket_state
from lastgood.mirror.node.log import GradientLog, LoggedStep
from lastgood.mirror.node.states import GivenState
from lastgood.mirror.node.twin import Twin

__all__ = ["LateStates", "leads_to"]

_log = logging.getLogger("lastgood.mirror")
_PATIENCE_STEPS: Final = 16
"""So many steps after a state came, its own has passed, if the capture saw it."""
_MOST_STARTS: Final = 64
"""Places in the log that are tried, newest first."""
_MOST_FAILURES: Final = 3
_NO_LIMIT: Final = 1 << 62


class LateStates:
    """Two states of one incarnation, and where they lie on the wire. For one thread.

    Args:
        map_seen: whether the buckets of this incarnation came over the wire; otherwise they are DDP's rule's.
    """

    def __init__(self, layout: NodeLayout, *, map_seen: bool) -> None:
        self._layout = layout
        self._map_is_certain = map_seen or not rebuilds(layout.job.ddp)
        self._weights: dict[int, torch.Tensor] | None = None
        self._earlier: GivenState | None = None
        self._later: GivenState | None = None
        self._came = 0
        self._tried: set[int] = set()
        self._failures = 0

    def began_with(self, weights: dict[int, torch.Tensor]) -> None:
        """The incarnation was seen from its beginning, with these weights (by layout index), of a step not known."""
        self._weights = weights

    @property
    def waits(self) -> bool:
        """Whether the state that was given last is kept until more steps have passed."""
        return self._later is not None

    @property
    def gave_up(self) -> bool:
        """Whether several pairs of states did not fit: another one will not either."""
        return self._failures >= _MOST_FAILURES

    def step_after(self, given: GivenState, log: GradientLog, following: int) -> int | None:
        """The conversation's number of the step that follows `given`. None: it is not proven, or (`waits`) not yet.

        `following` is the first step that is not finished. To be called again with the same state after each step.
        """
        if self._weights is not None and _has(given, self._weights):
            return 0
        earlier = self._earlier
        if earlier is None or given.iteration <= earlier.iteration:
            self._earlier, self._later = given, None
            _log.info("the state of step %d is kept: a later one will prove which step that is", given.iteration)
            return None
        if self._later is not given:
            self._later, self._came = given, following
            self._tried.clear()
        count = given.iteration - earlier.iteration
        finished = log.finished()
        starts = sorted((one for one in finished if all(one + more in finished for more in range(count))), reverse=True)
        for start in starts[:_MOST_STARTS]:
            if start in self._tried:
                continue
            self._tried.add(start)
            if self._leads(log, start, earlier, given):
                self._later = None
                near = (one for one in (start - 1, start + 1) if one in starts)
                beside = [one for one in near if self._leads(log, one, earlier, given)]
                if not beside and (self._map_is_certain or self._tells_all(log, start, count)):
                    return start + count
                _log.warning(
                    "the gradients of %d steps before step %d are too much alike (or zero) to prove which is which",
                    count,
                    given.iteration,
                )
                return None
        if following - self._came > _PATIENCE_STEPS:
            self._earlier, self._later = given, None
            self._failures += 1
            _log.warning(
                "no %d steps in the log of gradients (%d are there) lead from the state of step %d to that of step %d: "
                "states must be close enough for the memory of the log, and buckets those of DDP's rule%s",
                count,
                len(finished),
                earlier.iteration,
                given.iteration,
                "; no more states are asked for: a restart of the training heals" if self.gave_up else "",
            )
        return None

    def _tells_all(self, log: GradientLog, start: int, count: int) -> bool:
        """Whether a parameter with another one's gradients would show: only one may have had none but zeros."""
        steps = log.since(start, start + count) or []
        places = range(len(self._layout.job.optimized))
        zero = [index for index in places if not any(one.gradients[index].count_nonzero() for one in steps)]
        return len(zero) <= 1

    def _leads(self, log: GradientLog, start: int, earlier: GivenState, later: GivenState) -> bool:
        steps = log.since(start, start + later.iteration - earlier.iteration)
        return steps is not None and leads_to(self._layout, earlier, steps, later)


def leads_to(layout: NodeLayout, before: GivenState, steps: Sequence[LoggedStep], after: GivenState) -> bool:
    """Whether the updates of these steps make exactly `after` of `before`: the shadow's own code, beside the shadow.

    Takes the memory of one more state, and of two gradients.
    """
    memory = ShadowMemory(layout.gradients, 0, slots=2, limit_bytes=_NO_LIMIT, threads=1, spills=False)
    try:
        for bucket in memory.owned:
            _fill(memory, layout, bucket, before)
        twin = Twin(layout)
        twin.begin(before.scaler, before.made)
        for iteration, one in enumerate(steps, before.iteration + 1):
            gradients = _put(memory, iteration, one)
            rule = twin.update(iteration, gradients, frozenset(one.absent))
            for bucket in memory.owned:
                memory.apply(bucket, iteration, rule, frozenset(one.absent))
    except LastgoodError as error:  # a state that is none of this optimizer's, or a step beyond the schedule
        _log.debug("no step of the log follows the state of step %d: %s", before.iteration, error)
        return False
    made = {
        (entry.parameter, entry.key): tensor
        for bucket in memory.owned
        for entry, tensor in memory.value(bucket).tensors()
    }
    return made.keys() == after.tensors.keys() and all(
        tensor_bytes(tensor) == tensor_bytes(after.tensors[place]) for place, tensor in made.items()
    )


def _has(state: GivenState, weights: dict[int, torch.Tensor]) -> bool:
    return all(
        tensor_bytes(state.tensors[index, PARAMETER]) == tensor_bytes(tensor) for index, tensor in weights.items()
    )


def _fill(memory: ShadowMemory, layout: NodeLayout, bucket: int, state: GivenState) -> None:
    held = list(bucket_state(layout, bucket, state.tensors))
    entries = [
        Entry(
            parameter=index,
            key=key,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            nbytes=tensor.nbytes,
        )
        for index, key, tensor in held
    ]
    value = memory.new_value(bucket)
    for view, (_, _, tensor) in zip(value.targets(entries, "a state"), held, strict=True):
        view[:] = tensor_bytes(tensor)
    value.finish()
    memory.put(value)


def _put(memory: ShadowMemory, iteration: int, one: LoggedStep) -> list[torch.Tensor]:
    """The gradients of a step into the memory for them, cast as DDP casts them; by layout index."""
    found: dict[int, torch.Tensor] = {}
    for bucket in memory.owned:
        indices = memory.layout.buckets[bucket].parameters
        for index, target in zip(indices, memory.gradients(bucket, iteration), strict=True):
            target.view(-1).copy_(one.gradients[index])
            found[index] = target
    return [found[index] for index in range(len(found))]
