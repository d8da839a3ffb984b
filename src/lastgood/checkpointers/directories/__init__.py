"""Checkpoints that are directories: each appears complete and durable, or not at all."""
