"""What trainers and shadows say to each other."""
