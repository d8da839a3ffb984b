"""Checkpoints of slots, sent to a place that outlives the machine: a bucket of S3, or a folder of objects.

`sending` sends one, `tier` does so in the background of a training, `status` is what is known of it beside the slots,
`push` does it by hand. docs/s3.md has the promises.
"""
