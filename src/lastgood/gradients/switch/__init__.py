"""A relay between the ranks of a ring that copies their gradients to shadows.

The final sends of the ring carry a mark; the relay copies them to the shadows, so that a rank sends its shadows
messages and seeds only. docs/checkmate-switch.md.
"""
