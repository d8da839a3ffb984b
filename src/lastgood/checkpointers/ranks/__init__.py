"""Checkpoints of several ranks: their directories, what they share, and restores into other numbers of ranks."""
