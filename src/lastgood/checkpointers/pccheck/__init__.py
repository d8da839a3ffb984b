"""PCcheck: several checkpoints in flight, in slots of one file each."""
