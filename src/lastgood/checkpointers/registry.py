"""Names of systems, and the classes behind them. Needs no torch.

Other packages add a system through the entry-point group ``lastgood.checkpointers``; it then appears in every figure
whose configuration names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.metadata import entry_points

from lastgood.checkpointers.base import Checkpointer
from lastgood.errors import ConfigError

__all__ = ["ENTRY_POINT_GROUP", "checkpointer_class", "checkpointer_names", "why_unavailable"]

ENTRY_POINT_GROUP = "lastgood.checkpointers"

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
    """The class of system `name`. Raises ConfigError, naming the known systems, for an unknown name."""
    targets = _targets()
    if name not in targets:
        raise ConfigError(f"unknown system {name!r}; known: {', '.join(targets)}")
    module_name, _, attribute = targets[name].partition(":")
    loaded = getattr(importlib.import_module(module_name), attribute, None)
    if not (isinstance(loaded, type) and issubclass(loaded, Checkpointer)):
        raise ConfigError(f"system {name!r}: {targets[name]} is not a Checkpointer class")
    return loaded


def why_unavailable(names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that cannot be used on this machine, each with the reason. Raises ConfigError as above."""
    reasons = {name: checkpointer_class(name).unavailable() for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}
