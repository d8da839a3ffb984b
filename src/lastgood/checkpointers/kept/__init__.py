"""What a directory keeps, for its owner: the newest durable checkpoint and its age, and what may be removed."""
