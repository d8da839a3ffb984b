"""How parameters lie in buckets, and buckets in the stream."""
