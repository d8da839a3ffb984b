"""What trainers and shadows say to each other.

The greeting of a connection carries the protocol's version, and messages refuse what they do not know. `Complete`
messages are cumulative: a process that reconnects needs only the latest one. docs/wire-format.md.
"""
