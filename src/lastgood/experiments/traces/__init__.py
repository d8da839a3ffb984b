"""Times at which spot machines were lost: recorded and synthetic."""
