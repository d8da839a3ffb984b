"""One direction of a connection of Gloo: which message is which of its collective, and since when that is certain."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from lastgood.mirror.streams.messages import Flow

__all__ = ["UNKNOWN", "GlooFlow", "Said"]

UNKNOWN: Final = -1
"""Of an ordinal: messages before it may be missing."""
_WORKERS: Final = 2
"""Threads that run collectives in torch's ProcessGroupGloo: so many are in progress at a time."""
_MOST_MESSAGES: Final = 1 << 17
_MOST_TAGS: Final = 1 << 15


@dataclass(frozen=True)
class Said:
    """What a data message's head said: its collective, which of the collective's messages in this flow, its size."""

    tag: int
    ordinal: int
    nbytes: int


@dataclass
class GlooFlow:
    """Counts messages by tag. After bytes of unknown content the counts of collectives in progress are void."""

    flow: Flow
    phase: int = -2
    """The latest phase of the sequence of which something was seen: all before it is complete in this flow."""
    closed: bool = False
    resync_pending: bool = False
    """Messages are missing wherever message numbers have a gap; without that, only announcements are."""
    _newest: int = -1
    rings: bool = False
    """Whether it has carried an all-reduce."""
    _counts: dict[int, int] = field(default_factory=dict)
    _void: set[int] = field(default_factory=set)
    _fresh: set[int] | None = None
    """Tags since a resynchronisation, until enough of them are known to be new."""
    _new_from: int = 0
    """The first tag that certainly began after the last resynchronisation; so did all after it."""
    _messages: OrderedDict[int, Said] = field(default_factory=OrderedDict)

    def resync(self) -> None:
        """An unknown number of messages is missing here."""
        self._void |= self._counts.keys()
        self._fresh = set()

    def saw(self, tag: int, message: int) -> None:
        """Any head of a collective came. Threads take collectives in the order of tags: later ones are new."""
        if self.resync_pending and message != self._newest + 1:
            self.resync()
        self._newest = message
        if tag in self._counts:
            if self._fresh is not None:
                self._fresh.add(tag)
            return
        if self._fresh is not None:
            if len(self._fresh) >= _WORKERS and tag > max(self._fresh):
                self._fresh, self._new_from = None, tag
            else:
                self._fresh.add(tag)
                self._void.add(tag)
        elif tag < self._new_from:
            self._void.add(tag)
        self._counts[tag] = 0
        if len(self._counts) > _MOST_TAGS:
            self.forget(min(self._counts))

    def data(self, message: int, tag: int, nbytes: int) -> int:
        """A data message came, after `saw`: its ordinal in its collective, or UNKNOWN."""
        ordinal = UNKNOWN if tag in self._void else self._counts[tag]
        self._counts[tag] += 1
        self._messages[message] = Said(tag, ordinal, nbytes)
        if len(self._messages) > _MOST_MESSAGES:
            self._messages.popitem(last=False)
        return ordinal

    def said(self, message: int) -> Said | None:
        """What the head of a data message said; None for others, and for those long ago."""
        return self._messages.get(message)

    def count(self, tag: int) -> int | None:
        """Data messages of a collective so far; None if that is not certain."""
        return None if tag in self._void else self._counts.get(tag, 0)

    def forget(self, tag: int) -> None:
        """Nothing more is asked about a collective."""
        self._counts.pop(tag, None)
        self._void.discard(tag)
