"""The steps of optimizers: seen as they begin and end, and kept apart from saves."""
