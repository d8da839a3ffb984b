"""Starts the ranks of a job, and ends them when one of them fails."""
