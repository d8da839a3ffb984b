"""Names of systems, the classes behind them, and what those declare of themselves. Needs no torch.

Other packages add a system through the entry-point group ``lastgood.checkpointers``; it then appears in every figure
whose configuration names it, by the traits that its class declares.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import Final

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.traits import Traits, traits_of_class
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

ENTRY_POINT_GROUP = "lastgood.checkpointers"

BASELINE: Final = "none"
"""The system that takes no checkpoints. It is always measured: every figure shows ratios to it."""

_BUILT_IN = {
    "none": "lastgood.checkpointers.baselines.none:NoCheckpointing",
    "sync": "lastgood.checkpointers.baselines.sync:SyncCheckpointer",
    "checkfreq": "lastgood.checkpointers.checkfreq.system:CheckFreq",
    "gpm": "lastgood.checkpointers.gpm.system:GPM",
    "gemini": "lastgood.checkpointers.gemini.system:Gemini",
    "pccheck": "lastgood.checkpointers.pccheck.system:PCcheck",
    "dcp": "lastgood.checkpointers.dcp.system:TorchDCP",
    "torchsnapshot": "lastgood.checkpointers.third_party.torchsnapshot:TorchSnapshot",
    "nvrx": "lastgood.checkpointers.third_party.nvrx:ResiliencyExtension",
    "checkmate": "lastgood.checkpointers.checkmate.system:Checkmate",
}


@lru_cache(maxsize=1)
def _targets() -> dict[str, str]:
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    clash = sorted(found.keys() & _BUILT_IN.keys())
    if clash:
        raise ConfigError(
            f"entry-point group {ENTRY_POINT_GROUP}: {', '.join(clash)} is the name of a built-in system; "
            "rename it in the package that registers it"
        )
    return {**_BUILT_IN, **found}


def checkpointer_names() -> list[str]:
    """Every known system, built-in ones first."""
    return list(_targets())


@cache
def checkpointer_class(name: str) -> type[Checkpointer]:
    """The class of system `name`.

    Raises ConfigError for an unknown name, with the known ones, and for a class that cannot be loaded.
    """
    targets = _targets()
    if name not in targets:
        raise ConfigError(f"unknown system {name!r}; known: {', '.join(targets)}")
    module_name, _, attribute = targets[name].partition(":")
    try:
        loaded = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ConfigError(f"system {name!r}: {targets[name]} cannot be imported: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Checkpointer)):
        raise ConfigError(f"system {name!r}: {targets[name]} is not a Checkpointer class")
    return loaded


def system_traits(name: str) -> Traits:
    """What system `name` is; the defaults for a name that is not known here, as of records of other installations.

    Raises ConfigError for a class that cannot be loaded, or whose traits are none.
    """
    if name not in _targets():
        return Traits()
    try:
        return traits_of_class(checkpointer_class(name))
    except TypeError as error:
        raise ConfigError(f"system {name!r}: {error}") from error


def all_traits() -> tuple[dict[str, Traits], dict[str, str]]:
    """What every known system is, and why others cannot be loaded: a package that is broken harms only its own."""
    found: dict[str, Traits] = {}
    reasons: dict[str, str] = {}
    for name in checkpointer_names():
        try:
            found[name] = system_traits(name)
        except ConfigError as error:
            reasons[name] = str(error)
    return found, reasons


def why_unavailable(names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that cannot be used on this machine, each with the reason. Raises ConfigError as above."""
    reasons = {name: checkpointer_class(name).unavailable() for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}
