"""Where gradients are taken from a training: buckets of DDP, optimizer steps, and the ring.

A tap maps what was reduced into records: `bucket` as a communication hook of DDP, `step` for everything else, `ring` in
switch mode, where it also compares samples of what was reduced.
"""
