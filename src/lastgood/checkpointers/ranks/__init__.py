"""Checkpoints of several ranks: their directories, what they share, and restores into other numbers of ranks.

docs/resharding.md. `boxes` is pure arithmetic: which boxes of which stored parts make up a new part. `box_reader` reads
them, each chunk checked, and no others, some of them through `windows`. `parts` says whether the parts of several ranks
belong together, `replicated` leaves out what another rank writes, `job` is the side of one rank.
"""
