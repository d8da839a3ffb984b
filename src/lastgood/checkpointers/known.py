"""Which systems there are, and what their classes declare of themselves. Needs neither torch nor the base class.

Other packages add a system through the entry-point group ``lastgood.checkpointers``; it then appears in every figure
whose configuration names it, by the traits that its class declares.
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import Any, Final

from lastgood.checkpointers.traits import Traits, traits_of_class
from lastgood.errors import ConfigError
from lastgood.names import nearest

__all__ = ["BASELINE", "BUILT_IN", "ENTRY_POINT_GROUP", "all_traits", "load_system", "system_targets", "system_traits"]

ENTRY_POINT_GROUP = "lastgood.checkpointers"

BASELINE: Final = "none"
"""The system that takes no checkpoints. It is always measured: every figure shows ratios to it."""

BUILT_IN = {
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
    "flowcheck": "lastgood.checkpointers.flowcheck.system:FlowCheck",
}


@lru_cache(maxsize=1)
def system_targets() -> dict[str, str]:
    """Every known system, built-in ones first, and where its class stands: ``module:name``."""
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    clash = sorted(found.keys() & BUILT_IN.keys())
    if clash:
        raise ConfigError(
            f"entry-point group {ENTRY_POINT_GROUP}: {', '.join(clash)} is the name of a built-in system; "
            "rename it in the package that registers it"
        )
    return {**BUILT_IN, **found}


@cache
def load_system(name: str) -> Any:
    """What stands where the class of system `name` should be.

    Raises ConfigError for an unknown name, with the known ones, and for a module that cannot be imported.
    """
    targets = system_targets()
    if name not in targets:
        raise ConfigError(f"unknown system {name!r}{nearest(name, targets)}; known: {', '.join(targets)}")
    module_name, _, attribute = targets[name].partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ConfigError(f"system {name!r}: {targets[name]} cannot be imported: {error}") from error


def system_traits(name: str) -> Traits:
    """What system `name` is; the defaults for a name that is not known here, as of records of other installations.

    Raises ConfigError for a class that cannot be loaded, or whose traits are none.
    """
    if name not in system_targets():
        return Traits()
    try:
        return traits_of_class(load_system(name))
    except TypeError as error:
        raise ConfigError(f"system {name!r}: {error}") from error


def all_traits() -> tuple[dict[str, Traits], dict[str, str]]:
    """What every known system is, and why others cannot be loaded: a package that is broken harms only its own."""
    found: dict[str, Traits] = {}
    reasons: dict[str, str] = {}
    for name in system_targets():
        try:
            found[name] = system_traits(name)
        except ConfigError as error:
            reasons[name] = str(error)
    return found, reasons
