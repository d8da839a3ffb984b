"""Checkmate: gradients to shadows that hold the model one update behind."""
