"""Starts the ranks of a job, and ends them when one of them fails.

`launchers` are ssh, torchrun, DeepSpeed, Open MPI and srun behind one `wrapper`, which each rank runs in; `lifelines`
tells all of them when one ends. The order for a rank goes over standard input, since command lines can be read by
everyone.
"""
