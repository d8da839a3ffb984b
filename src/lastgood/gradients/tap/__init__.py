"""Where gradients are taken from a training: buckets of DDP, optimizer steps, and the ring."""
