"""Which iterations and seeds each shadow needs, from what all of them report.

Runs in rank 0's process; `state` is pure. It decides which iterations are complete, which shadows are not waited for,
who gets a fresh copy of the state (a seed), and which step all shadows spill to their disks. A step that shadows cannot
reproduce is void: they wait for a seed after it.
"""
