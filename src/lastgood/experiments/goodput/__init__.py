"""Runs that are killed again and again by a trace."""
