"""Models and data that are trained while checkpointers are measured."""
