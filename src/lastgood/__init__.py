"""Lastgood: the last good state of a training run, and what keeping it costs.

The names below are imported at their first use; ``import lastgood`` itself needs no torch. Type checkers read
``__init__.pyi``.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "CheckFreq": "lastgood.checkpointers.checkfreq",
    "Checkmate": "lastgood.checkpointers.checkmate",
    "Checkpointer": "lastgood.checkpointers.base",
    "GPM": "lastgood.checkpointers.gpm",
    "Gemini": "lastgood.checkpointers.gemini",
    "NoCheckpointing": "lastgood.checkpointers.none",
    "PCcheck": "lastgood.checkpointers.pccheck",
    "ResiliencyExtension": "lastgood.checkpointers.nvrx",
    "RngState": "lastgood.state",
    "SyncCheckpointer": "lastgood.checkpointers.sync",
    "TorchDCP": "lastgood.checkpointers.dcp",
    "TorchSnapshot": "lastgood.checkpointers.torchsnapshot",
    "checkpointer_class": "lastgood.checkpointers.registry",
    "checkpointer_names": "lastgood.checkpointers.registry",
    "state_digest": "lastgood.state",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lastgood' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
