from lastgood.checkpointers.baselines.none import NoCheckpointing as NoCheckpointing
from lastgood.checkpointers.baselines.sync import SyncCheckpointer as SyncCheckpointer
