"""Connections from a rank to its shadows."""
