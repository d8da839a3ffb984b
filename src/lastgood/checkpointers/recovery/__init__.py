"""Which checkpoint a training goes on from, and how it is read back."""
