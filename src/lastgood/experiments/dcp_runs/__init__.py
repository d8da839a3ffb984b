"""Runs of the suite for torch's distributed checkpoint: `bench` is what each rank does, `execute` starts the ranks."""
