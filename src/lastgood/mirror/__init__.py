"""Checkpoints from mirrored packets (FlowCheck): frames are captured and parsed, and a model is made of them."""
