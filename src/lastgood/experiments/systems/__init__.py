"""What each system is called, where it stands in figures, and whether it runs over several ranks."""
