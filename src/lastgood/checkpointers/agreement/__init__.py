"""One checkpoint for all ranks of a job: which one they go on from, and which saves count."""
