"""What a trainer knows of its parameters, its updates, and the rest of a rank's state."""
