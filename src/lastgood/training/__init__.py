"""The training loop and its clocks."""
