"""What a shadow gives back to those who restore, from memory or from a spill that it reads back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from lastgood.errors import CheckpointError, NoCheckpoint, WaitTimeout
from lastgood.gradients.layout.entries import Entry, Saved
from lastgood.gradients.shadow.body import ShadowBody
from lastgood.gradients.shadow.memory import BucketValue, tensor_bytes
from lastgood.gradients.shadow.spill_store import SideRecord

__all__ = ["read_side", "reading_tensors"]

_log = logging.getLogger("lastgood.shadow")
_LOAD_S = 600.0


@contextlib.contextmanager
def reading_tensors(
    body: ShadowBody, incarnation: int, saved: Saved, source: str
) -> Iterator[list[tuple[Entry, memoryview]]]:
    """All tensors at a saved iteration; they do not change before this is left.

    Raises MismatchError for another incarnation, CheckpointError or NoCheckpoint if it cannot be given back.
    """
    if source == "durable":
        _read_back(body, incarnation, saved)
    with body.change:
        body.check_fenced(incarnation)
        if not body.state.restored(saved):
            body.state.restore_to(saved)
            body.flow()
            done = body.change.wait_for(
                lambda: (
                    body.state.restored(saved)
                    or saved not in body.state.held.restorable()
                    or body.state.incarnation != incarnation
                    or body.state.declared
                ),
                _LOAD_S,
            )
            body.check_fenced(incarnation)
            if not done:
                raise WaitTimeout(f"waited {_LOAD_S:g} s for iteration {saved.iteration} to be applied")
            if not body.state.restored(saved):
                raise CheckpointError(
                    f"iteration {saved.iteration} could not be applied here; the shadow's log says why"
                )
        body.restored = saved
        body.readers += 1
    try:
        assert body.memory is not None
        yield [
            (entry, tensor_bytes(tensor))
            for bucket in body.memory.owned
            for entry, tensor in body.memory.value(bucket).tensors()
        ]
    finally:
        with body.change:
            body.readers -= 1
            body.change.notify_all()


def read_side(body: ShadowBody, incarnation: int, saved: Saved, rank: int, source: str) -> SideRecord:
    """A rank's side record. Raises as `reading_tensors` does."""
    with body.change:
        body.check_current(incarnation)
        if source == "memory":
            if body.state.saved_at(saved.iteration) != saved:
                raise NoCheckpoint(f"iteration {saved.iteration} of incarnation {saved.epoch} is not held in memory")
            return body.sides.get(saved.iteration, rank)
        store = body.spills()
    return store.read_side(store.find(saved), rank)


def _read_back(body: ShadowBody, incarnation: int, saved: Saved) -> None:
    """Make a spill this shadow's state, unless it is already."""
    with body.change:
        if body.restored == saved and body.state.restored(saved):
            return  # another rank has asked for it, and may be reading it now
    with body.stopped():
        body.check_fenced(incarnation)
        store = body.spills()
        spill = store.find(saved)
        if body.restored == saved and body.state.restored(saved):
            return
        if body.memory is not None:
            store.verify(spill)  # before what is in memory is given up for it
        body.settle_memory(spill.layout)
        memory = body.memory
        assert memory is not None
        memory.forget(values=True)
        body.state.emptied()
        values: dict[int, BucketValue] = {}

        def take(bucket: int, entries: Sequence[Entry]) -> list[memoryview]:
            values[bucket] = memory.new_value(bucket)
            return values[bucket].targets(entries, str(spill.info.path))

        store.read(spill, take)
        sides = {side.rank: store.read_side(spill, side.rank) for side in spill.sides}
        for value in values.values():
            value.finish()
            memory.put(value)
        body.state.replaced(saved, spill.layout.digest, memory.owned, list(sides))
        body.flow()
        for record in sides.values():
            body.sides.put(record)
        body.restored = saved
    _log.info("iteration %d of incarnation %d read back from %s", saved.iteration, saved.epoch, spill.info.path)
