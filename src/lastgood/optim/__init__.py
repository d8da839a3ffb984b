"""Dense optimizers of CPU shadows: the trainer's own update, repeated on host memory to the bit."""
