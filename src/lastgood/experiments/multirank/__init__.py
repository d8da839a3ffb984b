"""Runs over several ranks and hosts: what is started where, and the record that comes of it.

A spec with several ranks is launched on the hosts of a hostfile, once to measure and once to restore. Each rank is a
`process` that goes through the same functions as a run on one host, with a `part` for its model, checkpointer and
waiting; its result is a file, and `results` makes one record of all of them. Before any rank starts, `capacity` asks
each host for memory and disk and refuses what is certain not to fit. `order` (pure, seeded) also says when all ranks
are killed; `after_kill` is the side of the rank that is killed and comes back.
"""
