"""Copies of a state on the host, taken while training goes on, and the check that nothing changed them."""
