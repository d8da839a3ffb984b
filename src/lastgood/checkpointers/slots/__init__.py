"""What the slots of a directory hold: layouts, trees, and tensors by name."""
