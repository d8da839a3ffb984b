"""The training that a checkpointer is attached to: its state, its data, its end.

A system is attached in three lines of a user's loop (docs/pccheck.md has the promises). `attachment` holds the parts
under their names, `trained` compares names and order of what optimizers train, `data_facts` what a loader is made of,
and `data_cursor` finds the place in the data again. `counting` counts a loader that is made first, `last_step` ends a
training at its step's end. `process_end` is the Python side of the native watch that stands in
front of Python's handler of SIGTERM, so that a rank which sits in a collective ends as well.
"""
