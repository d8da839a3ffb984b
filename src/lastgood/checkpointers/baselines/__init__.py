"""What every system is compared with: no checkpoints, and a stop of the training for each."""

from lastgood._lazy import lazy_names

_HOMES = {
    "NoCheckpointing": "lastgood.checkpointers.baselines.none",
    "SyncCheckpointer": "lastgood.checkpointers.baselines.sync",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
