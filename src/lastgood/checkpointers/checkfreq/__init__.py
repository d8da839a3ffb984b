"""CheckFreq: a copy beside the training, at an interval that is tuned as it runs."""

from lastgood._lazy import lazy_names

_HOMES = {
    "CheckFreq": "lastgood.checkpointers.checkfreq.system",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
