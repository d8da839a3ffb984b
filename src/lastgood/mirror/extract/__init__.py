"""Bytes of messages into the buffers of collectives, with a map of what is there: complete, healed, or lost."""
