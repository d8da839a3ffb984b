"""Checkpoints as files that other programs read, without the model's code."""
