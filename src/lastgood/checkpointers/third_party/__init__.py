"""Checkpoint libraries of others behind the same protocol."""

from lastgood._lazy import lazy_names

_HOMES = {
    "ResiliencyExtension": "lastgood.checkpointers.third_party.nvrx",
    "TorchSnapshot": "lastgood.checkpointers.third_party.torchsnapshot",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
