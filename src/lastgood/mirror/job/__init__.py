"""The description of a training, as data: what a mirror node must know that is not on the wire."""
