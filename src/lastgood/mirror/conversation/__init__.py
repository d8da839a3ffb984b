"""Which collective, step, bucket and byte range a message belongs to. Pure: no I/O, no clock, no threads."""
