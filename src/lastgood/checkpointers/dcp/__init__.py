"""torch.distributed.checkpoint, one process at a time."""

from lastgood._lazy import lazy_names

_HOMES = {
    "TorchDCP": "lastgood.checkpointers.dcp.system",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
