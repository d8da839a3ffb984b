"""Gradient slots that fill piece by piece: complete, healed by another copy, or declared lost."""
