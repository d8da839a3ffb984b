"""Where a step begins, for a capture that began in the middle of a training over Gloo. Pure.

Tags say the order of collectives, and not which step they are of. In the steady state a step is the same row of
operations and sizes again and again; where such a row begins is certain once one of its turns alone fits what is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lastgood.mirror.conversation.expected import Item
from lastgood.mirror.conversation.gloo_flow import UNKNOWN
from lastgood.mirror.conversation.gloo_tags import Tag

__all__ = ["LateStart"]

_AHEAD: Final = 4
"""A tag of which one so far ahead was seen is complete: threads begin them in order, a few at once."""
_TURNS: Final = 8
_MORE: Final = 32
"""So many turns of the row, and tags, are tried: strangers may lie between, and the rebuilding of buckets."""


class LateStart:
    """Made with the collectives of a step as they are expected, and what tells whether a tag could be one of them."""

    def __init__(self, cycle: Sequence[Item], fits: Callable[[Tag, Item], bool]) -> None:
        self._cycle = cycle
        self._fits = fits
        self._at = -1
        self._left = _TURNS * len(cycle) + _MORE
        self.why = ""
        """Why it will not be found."""

    def look(self, tags: Mapping[int, Tag], highest: int) -> int | None:
        """The tag of the first collective of a step. None: not seen yet, or `why` it never will be."""
        count = len(self._cycle)
        while tags and not self.why:
            if self._at not in tags:
                later = [tag for tag in tags if tag > self._at]
                if not later:
                    return None
                self._at = min(later)
            if highest < self._at + count - 1 + _AHEAD:
                return None
            row = [tags.get(self._at + place) for place in range(count)]
            turns = [turn for turn in range(count) if self._is_turn(row, turn)]
            if len(turns) == 1:
                return self._at + (count - turns[0]) % count
            if turns:
                self.why = "the collectives of a step are alike, so where one begins cannot be told"
            self._at += 1
            self._left -= 1
            if not self._left:
                self.why = "the gradients do not come in the buckets that DDP's rule makes of the model"
        return None

    def _is_turn(self, row: Sequence[Tag | None], turn: int) -> bool:
        count = len(self._cycle)
        return all(
            tag is not None
            and bool(tag.sizes)
            and all(ordinal != UNKNOWN for sizes in tag.sizes.values() for ordinal, _ in sizes)
            and self._fits(tag, self._cycle[(place + turn) % count])
            for place, tag in enumerate(row)
        )
