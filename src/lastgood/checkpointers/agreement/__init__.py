"""One checkpoint for all ranks of a job: which one they go on from, and which saves count.

Each rank commits to a directory of its own. Rank 0's process runs a coordinator, every rank a member that talks to it
over TCP (`channel`). `decide` is everything that is decided, without I/O, clocks or threads: what a new incarnation
begins with, and the fate of each step, which never changes. `job` applies fates and verdicts to the store, with one
thread for all of them. docs/pccheck.md.
"""
