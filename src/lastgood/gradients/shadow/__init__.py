"""The shadow: a process that applies the training's updates and restores from them."""
