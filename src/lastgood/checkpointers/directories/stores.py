"""Which store keeps the checkpoints of a location: one line for each scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.store import CheckpointStore
from lastgood.files import ReadableBy
from lastgood.locations import Location

__all__ = ["open_store"]

_STORES: Final[Mapping[str, Callable[[Location, int, ReadableBy], CheckpointStore]]] = {
    "file": lambda location, keep, readable_by: LocalStore(location.path, keep, readable_by),
}


def open_store(location: Location, keep: int, readable_by: ReadableBy) -> CheckpointStore:
    """The store of `location`, which keeps `keep` checkpoints; it touches nothing yet.

    Raises ConfigError if there is none for its scheme.
    """
    factory = _STORES.get(location.scheme)
    if factory is None:
        raise location.refusal()
    return factory(location, keep, readable_by)
