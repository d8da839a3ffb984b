"""What the stages of a mirror node hand to each other: in one process, or through rings between processes.

`local` has all stages before the updates in one process; `apart` those that are processes of their own, with a `pipe`
between two of them. A pipe is the ring of frames of capture/ring.py, whose frames are parts of messages.
"""
