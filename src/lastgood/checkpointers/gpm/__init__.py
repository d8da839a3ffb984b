"""GPM: the state is stored straight into a mapped file."""

from lastgood._lazy import lazy_names

_HOMES = {
    "GPM": "lastgood.checkpointers.gpm.system",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
