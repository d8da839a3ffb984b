"""Training over slow links (StellaTrain): a small part of each gradient is sent, and a sparse optimizer applies it."""

from lastgood._lazy import lazy_names

_HOMES = {
    "Correction": "lastgood.sparse.correction",
    "Engine": "lastgood.sparse.engine",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
