"""One run on one host: training with checkpoints, its proof of restore, its record and its logs.

`execute` takes the machine's lock, imports torch once, and forks a trainer and a restorer (`measure`). The parent
computes nothing, starts no threads and never touches CUDA, so each child starts fresh; they share no memory of a model.
In a workflow the parent itself is a fork of `fork_server`, so that torch is imported once for all runs.
Logs of a run that fails are kept beside the place of its record.
"""
