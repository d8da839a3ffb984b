"""PCcheck: several checkpoints in flight, in slots of one file each.

A directory holds N + K slots for N checkpoints in flight and K kept ones. `flight` is one checkpoint on its way,
`judging` takes verdicts of the user and of the losses (`loss_watch`), `tuning_file` what `lastgood tune` found.
docs/pccheck.md has the promises.
"""
