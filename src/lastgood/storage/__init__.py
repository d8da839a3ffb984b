"""The slot store: durable, checksummed, recoverable checkpoints as streams of bytes. Knows nothing of torch."""

from lastgood._native import ChunkPool
from lastgood.storage.global_commit import GlobalCommit
from lastgood.storage.reader import SlotInfo, SlotState, SlotStatus, SlotView
from lastgood.storage.slots import SlotStore
from lastgood.storage.verdicts import Verdict, VerdictBook
from lastgood.storage.write import SlotWrite

__all__ = [
    "ChunkPool",
    "GlobalCommit",
    "SlotInfo",
    "SlotState",
    "SlotStatus",
    "SlotStore",
    "SlotView",
    "SlotWrite",
    "Verdict",
    "VerdictBook",
]
