"""One page with all results."""
