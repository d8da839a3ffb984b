"""Runs over several ranks and hosts: what is started where, and the record that comes of it."""
