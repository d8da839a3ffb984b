"""Lastgood: the last good state of a training run, and what keeping it costs.

The names below are imported at their first use; ``import lastgood`` itself needs no torch. Type checkers read
``__init__.pyi``.
"""

from __future__ import annotations

from lastgood import _moved
from lastgood._lazy import lazy_names

_HOMES = {
    "CheckFreq": "lastgood.checkpointers.checkfreq.system",
    "Checkmate": "lastgood.checkpointers.checkmate.system",
    "Checkpointer": "lastgood.checkpointers.base",
    "FlowCheck": "lastgood.checkpointers.flowcheck.system",
    "GPM": "lastgood.checkpointers.gpm.system",
    "Gemini": "lastgood.checkpointers.gemini.system",
    "NoCheckpointing": "lastgood.checkpointers.baselines.none",
    "PCcheck": "lastgood.checkpointers.pccheck.system",
    "ResiliencyExtension": "lastgood.checkpointers.third_party.nvrx",
    "RngState": "lastgood.state",
    "SyncCheckpointer": "lastgood.checkpointers.baselines.sync",
    "TorchDCP": "lastgood.checkpointers.dcp.system",
    "TorchSnapshot": "lastgood.checkpointers.third_party.torchsnapshot",
    "checkpointer_class": "lastgood.checkpointers.registry",
    "checkpointer_names": "lastgood.checkpointers.registry",
    "load_parts": "lastgood.checkpointers.export.warm_start",
    "mirror_agent": "lastgood.mirror.agent.trainer",
    "read_checkpoint": "lastgood.checkpointers.export.warm_start",
    "sparse": "lastgood",
    "state_digest": "lastgood.state",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)

_moved.install()
