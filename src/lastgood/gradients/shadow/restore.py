"""What a shadow gives back to those who restore, from memory or from a spill that it reads back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lastgood.errors import CheckpointError, MismatchError, NoCheckpoint, WaitTimeout
from lastgood.gradients.layout.entries import Entry, Saved
from lastgood.gradients.shadow.memory import BucketValue, tensor_bytes
from lastgood.gradients.shadow.spill_store import SideRecord

if TYPE_CHECKING:
    from lastgood.gradients.shadow.core import ShadowCore

__all__ = ["fetch_side", "fetched"]

_log = logging.getLogger("lastgood.shadow")
_LOAD_S = 600.0


@contextlib.contextmanager
def fetched(core: ShadowCore, epoch: int, saved: Saved, source: str) -> Iterator[list[tuple[Entry, memoryview]]]:
    """All tensors at a saved iteration; they do not change before this is left.

    Raises MismatchError for another epoch, CheckpointError or NoCheckpoint where it cannot be given back.
    """
    if source == "durable":
        _read_back(core, epoch, saved)
    with core.change:
        core.check_fenced(epoch)
        if not core.state.restored(saved):
            core.state.restore_to(saved)
            core.flow()
            done = core.change.wait_for(
                lambda: (
                    core.state.restored(saved)
                    or saved not in core.state.restorable()
                    or core.state.epoch != epoch
                    or core.state.declared
                ),
                _LOAD_S,
            )
            core.check_fenced(epoch)
            if not done:
                raise WaitTimeout(f"waited {_LOAD_S:g} s for iteration {saved.iteration} to be applied")
            if not core.state.restored(saved):
                raise CheckpointError(
                    f"iteration {saved.iteration} could not be applied here; the shadow's log says why"
                )
        core.restored = saved
        core.readers += 1
    try:
        assert core.memory is not None
        yield [
            (entry, tensor_bytes(tensor))
            for bucket in core.memory.owned
            for entry, tensor in core.memory.value(bucket).tensors()
        ]
    finally:
        with core.change:
            core.readers -= 1
            core.change.notify_all()


def fetch_side(core: ShadowCore, epoch: int, saved: Saved, rank: int, source: str) -> SideRecord:
    """A rank's side record. Raises as `fetched` does."""
    with core.change:
        if epoch != core.state.epoch:
            raise MismatchError(f"epoch {epoch} is fenced off; this shadow's is {core.state.epoch}")
        if source == "memory":
            if core.state.saved_at(saved.iteration) != saved:
                raise NoCheckpoint(f"iteration {saved.iteration} of epoch {saved.epoch} is not held in memory")
            return core.sides.get(saved.iteration, rank)
        store = core.spills()
    return store.read_side(store.find(saved), rank)


def _read_back(core: ShadowCore, epoch: int, saved: Saved) -> None:
    """Make a spill this shadow's state, unless it is already."""
    with core.change:
        if core.restored == saved and core.state.restored(saved):
            return  # another rank has asked for it, and may be reading it now
    with core.stopped():
        core.check_fenced(epoch)
        store = core.spills()
        spill = store.find(saved)
        if core.restored == saved and core.state.restored(saved):
            return
        if core.memory is not None:
            store.verify(spill)  # before what is in memory is given up for it
        core.settle_memory(spill.layout)
        memory = core.memory
        assert memory is not None
        memory.drop_landed()
        for bucket in memory.owned:
            memory.drop(bucket)
        core.state.emptied()
        values: dict[int, BucketValue] = {}

        def take(bucket: int, entries: Sequence[Entry]) -> list[memoryview]:
            values[bucket] = memory.new_value(bucket)
            return values[bucket].targets(entries, str(spill.info.path))

        store.read(spill, take)
        sides = {side.rank: store.read_side(spill, side.rank) for side in spill.sides}
        for value in values.values():
            value.finish()
            memory.put(value)
        core.state.replaced(saved, spill.layout.digest, memory.owned, list(sides))
        core.flow()
        for record in sides.values():
            core.sides.put(record)
        core.restored = saved
    _log.info("iteration %d of epoch %d read back from %s", saved.iteration, saved.epoch, spill.info.path)
