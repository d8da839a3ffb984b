"""Frames to messages: heads, pieces and losses of each flow."""
