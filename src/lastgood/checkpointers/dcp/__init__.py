"""torch.distributed.checkpoint, one process at a time."""
