"""What every system is compared with: no checkpoints, and a stop of the training for each."""
