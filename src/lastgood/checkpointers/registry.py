"""The classes of systems, by name. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.known import (
    BASELINE,
    ENTRY_POINT_GROUP,
    all_traits,
    load_system,
    system_targets,
    system_traits,
)
from lastgood.errors import ConfigError

__all__ = [
    "BASELINE",
    "ENTRY_POINT_GROUP",
    "all_traits",
    "checkpointer_class",
    "checkpointer_names",
    "system_traits",
    "why_unavailable",
]


def checkpointer_names() -> list[str]:
    """Every known system, built-in ones first."""
    return list(system_targets())


def checkpointer_class(name: str) -> type[Checkpointer]:
    """The class of system `name`.

    Raises ConfigError for an unknown name, with the known ones, and for a class that cannot be loaded.
    """
    loaded = load_system(name)
    if not (isinstance(loaded, type) and issubclass(loaded, Checkpointer)):
        raise ConfigError(f"system {name!r}: {system_targets()[name]} is not a Checkpointer class")
    return loaded


def why_unavailable(names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that cannot be used on this machine, each with the reason. Raises ConfigError as above."""
    reasons = {name: checkpointer_class(name).unavailable() for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}
