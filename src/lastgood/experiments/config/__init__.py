"""What a configuration file may hold, and how it is read."""
