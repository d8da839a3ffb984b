"""One run on one host: training with checkpoints, its proof of restore, its record and its logs."""
