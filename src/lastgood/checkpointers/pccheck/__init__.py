"""PCcheck: several checkpoints in flight, in slots of one file each.

A directory holds N + K slots for N checkpoints in flight and K kept ones. `flight` is one checkpoint on its way, `room`
makes slots and buffers as large as the state needs, `judging` takes verdicts of the user and of the losses
(`loss_watch`), `tuning_file` what `lastgood tune` found.
docs/pccheck.md has the promises.
"""

from lastgood._lazy import lazy_names

_HOMES = {
    "PCcheck": "lastgood.checkpointers.pccheck.system",
    "PCcheckOptions": "lastgood.checkpointers.pccheck.options",
    "read_tuning": "lastgood.checkpointers.pccheck.tuning_file",
    "write_tuning": "lastgood.checkpointers.pccheck.tuning_file",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
