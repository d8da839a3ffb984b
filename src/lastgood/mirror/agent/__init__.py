"""What a training may do for its mirror node: a full state when the node asks, and digests of its weights."""
