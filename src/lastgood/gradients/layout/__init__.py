"""How parameters lie in buckets, and buckets in the stream.

Made once for a training; every record says bucket and offset, so nothing is computed again on the other side.
"""
