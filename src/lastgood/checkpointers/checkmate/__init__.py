"""Checkmate: gradients to shadows that hold the model one update behind.

`incarnation` is the training's side of one incarnation of the job, `restore` fences the shadows, chooses a step that
all of them hold, and fetches it. In switch mode (`ring`) the ranks reduce through Lastgood's own ring.
docs/checkmate.md.
"""

from lastgood._lazy import lazy_names

_HOMES = {
    "Checkmate": "lastgood.checkpointers.checkmate.system",
    "CheckmateOptions": "lastgood.checkpointers.checkmate.options",
    "RingComm": "lastgood.wire.ring_comm",
    "RingReducer": "lastgood.gradients.tap.ring_hook",
    "checkmate_hook": "lastgood.gradients.tap.ddp_hook",
    "listen_ring": "lastgood.wire.ring_link",
    "ring_all_reduce": "lastgood.gradients.tap.ring_hook",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
