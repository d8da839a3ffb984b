"""The machinery of Gemini: placement, traffic, partition, and peers that keep checkpoints in memory. Needs no torch."""
