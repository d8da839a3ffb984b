"""Checkpoints that leave the machine: trainings that send them to S3, jobs that come back from there, bytes sent.

`execute` starts an S3 server and the ranks, and makes one record; `rank` is what a rank does; `models` are small models
of which all, a tenth, or only adapters are trained. evaluation/remote/README.md.
"""
