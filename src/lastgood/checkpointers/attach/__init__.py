"""The training that a checkpointer is attached to: its state, its data, its end."""
