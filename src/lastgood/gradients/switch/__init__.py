"""A relay between the ranks of a ring that copies their gradients to shadows."""
