"""Gemini: checkpoints in the memory of other machines.

`placement` and `partition` are the paper's algorithms. A peer process on each machine keeps the checkpoints of others
(`peer`, `areas`); `peer_client` is the trainer's side: a writer connects to the newest peer of a machine or starts one
where it may, a restore starts none, since a peer that begins now holds nothing. `traffic` fits the sending into the
idle times of the network.
"""

from lastgood._lazy import lazy_names

_HOMES = {
    "Gemini": "lastgood.checkpointers.gemini.system",
    "GeminiOptions": "lastgood.checkpointers.gemini.system",
    "marked_all_reduce": "lastgood.checkpointers.gemini.ddp_hook",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
