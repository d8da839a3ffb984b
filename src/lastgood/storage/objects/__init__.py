"""Checkpoints as objects: in a bucket of S3, or in a folder with the same semantics. docs/s3-format.md has the format.

A checkpoint exists when its commit object does. Nothing that holds data is ever overwritten or renamed, so an upload
may be killed, repeated or run twice at any moment; what is left over is found by `sweep`.
"""
