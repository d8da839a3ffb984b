"""Mirrors on a testbed's bridge, tried with marked frames, and the commands for switches.

docs/flowcheck-capture.md.
"""
