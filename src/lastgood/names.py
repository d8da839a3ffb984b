"""What a mistyped name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]

_MOST_CHARACTERS = 100
"""Of what was typed: a comparison takes time with the square of it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)``, or nothing if no known name is close."""
    close = difflib.get_close_matches(name[:_MOST_CHARACTERS], list(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
