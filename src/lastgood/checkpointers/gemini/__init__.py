"""Gemini: checkpoints in the memory of other machines."""
