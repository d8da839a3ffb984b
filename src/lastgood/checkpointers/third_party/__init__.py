"""Checkpoint libraries of others behind the same protocol."""
