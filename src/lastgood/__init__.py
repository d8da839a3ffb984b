"""Lastgood: the last good state of a training run, and what keeping it costs.

The names below are imported at their first use; ``import lastgood`` itself needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastgood.checkpointers.base import Checkpointer
    from lastgood.checkpointers.checkfreq import CheckFreq
    from lastgood.checkpointers.checkmate import Checkmate
    from lastgood.checkpointers.pccheck import PCcheck
    from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names
    from lastgood.checkpointers.sync import SyncCheckpointer
    from lastgood.state import RngState, state_digest

__all__ = [
    "CheckFreq",
    "Checkmate",
    "Checkpointer",
    "PCcheck",
    "RngState",
    "SyncCheckpointer",
    "checkpointer_class",
    "checkpointer_names",
    "state_digest",
]

_HOMES = {
    "CheckFreq": "lastgood.checkpointers.checkfreq",
    "Checkmate": "lastgood.checkpointers.checkmate",
    "Checkpointer": "lastgood.checkpointers.base",
    "PCcheck": "lastgood.checkpointers.pccheck",
    "RngState": "lastgood.state",
    "SyncCheckpointer": "lastgood.checkpointers.sync",
    "checkpointer_class": "lastgood.checkpointers.registry",
    "checkpointer_names": "lastgood.checkpointers.registry",
    "state_digest": "lastgood.state",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lastgood' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
