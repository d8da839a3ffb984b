"""Frames from interfaces and files, through one ring in shared memory; each lost frame is counted.

docs/flowcheck-capture.md.
"""
