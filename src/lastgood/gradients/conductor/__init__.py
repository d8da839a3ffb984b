"""Which iterations and seeds each shadow needs, from what all of them report."""
