"""The steps of optimizers: seen as they begin and end, and kept apart from saves.

In the middle of a step the state is one that training never has: a save from a signal handler or another thread waits
or fails. Hooks see steps also beneath wrappers of optimizers.
"""
