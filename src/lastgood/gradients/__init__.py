"""Checkmate's machinery: gradients to shadows that hold the model one update behind, and back from them."""
