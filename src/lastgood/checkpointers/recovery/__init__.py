"""Which checkpoint a training goes on from, and how it is read back.

`recovery` chooses a checkpoint and `in_place` reads it into the memory that the training has: names, dtypes and shapes
are compared before anything changes, checksums while it does. `found_here` knows what checkpoints of which system lie
in a folder and `beginnings` where other ranks began: a training must never begin at step 0 beside checkpoints without
being told to. What a refused start has made, `traces` takes back. `restorable` answers for `lastgood verify` what a
restore would do.
"""
