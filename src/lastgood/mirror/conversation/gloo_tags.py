"""What was seen of one collective over Gloo, and whether it could be one that is expected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from lastgood.mirror.conversation.expected import Item, Op
from lastgood.mirror.conversation.gloo_flow import UNKNOWN
from lastgood.wire.gloo import GlooMessage, GlooRing

__all__ = ["OPERATIONS", "Lookalikes", "Tag", "reduction_fits", "sent_messages", "size_fits"]

OPERATIONS: Final[dict[int, Op]] = {2: "allgather", 4: "allreduce", 6: "broadcast"}
"""By the prefix of a slot; those of others (barriers, gathers) are never a part of a training's sequence."""
_MOST_SIZES: Final = 4096


@dataclass
class Tag:
    """One collective of a process group: a place in the sequence, a stranger, lost, or not resolved yet."""

    op: Op | None
    state: Literal["open", "item", "stranger", "lost"] = "open"
    item: Item | None = None
    collective: int = -1
    sizes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """(ordinal, bytes) of data messages by flow, while it is not resolved."""
    flows: set[int] = field(default_factory=set)
    stale: bool = False
    """Of a start that did not go on: placed, since its content says why."""

    def note(self, flow: int, ordinal: int, nbytes: int) -> None:
        """A data message, while it is open."""
        sizes = self.sizes.setdefault(flow, [])
        if len(sizes) < _MOST_SIZES:
            sizes.append((ordinal, nbytes))


@lru_cache(maxsize=256)
def sent_messages(nbytes: int, item_bytes: int, world: int, rank: int) -> list[GlooMessage]:
    """What a rank sends for an all-reduce, in order."""
    return GlooRing(nbytes, world, item_bytes).sent(rank)


def reduction_fits(item: Item, world: int, rank: int, sizes: list[tuple[int, int]]) -> bool:
    """Whether a rank's data messages could be those of an all-reduce."""
    assert item.nbytes is not None  # it is known of all-reduces
    messages = sent_messages(item.nbytes, item.item_bytes, world, rank)
    for ordinal, nbytes in sizes:
        if ordinal == UNKNOWN:
            if all(one.end - one.begin != nbytes for one in messages):
                return False
        elif ordinal >= len(messages) or messages[ordinal].end - messages[ordinal].begin != nbytes:
            return False
    return True


def size_fits(item: Item, nbytes: int) -> bool:
    """Whether a message of a broadcast or an all-gather of counts has the right size."""
    if item.op == "allgather":
        return nbytes == 4
    if item.nbytes is None:
        return nbytes > 0 and nbytes % (16 if item.kind == "sizes" else 4) == 0
    return nbytes == item.nbytes


class Lookalikes:
    """Strangers whose first messages are those of an all-reduce that was taken before them, by tag.

    Small all-reduces begin alike, whatever their sizes. Only one that has all messages of the other in a flow is of its
    size, and each of the two may then be the training's.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._items: dict[int, Item] = {}

    def add(self, tag: int, item: Item) -> None:
        """All that was seen of a stranger could be this all-reduce; `message` says each of its messages, also those."""
        self._items[tag] = item

    def message(self, tag: int, ranks: Iterable[int], ordinal: int, nbytes: int) -> Item | None:
        """A data message of a rank that is one of `ranks`: the all-reduce, once the tag is certainly of its size."""
        item = self._items.get(tag)
        if item is None:
            return None
        assert item.nbytes is not None  # it is known of all-reduces
        fitting = [rank for rank in ranks if reduction_fits(item, self._world, rank, [(ordinal, nbytes)])]
        ends = {len(sent_messages(item.nbytes, item.item_bytes, self._world, rank)) for rank in fitting}
        if ordinal != UNKNOWN and fitting and ordinal + 1 not in ends:
            return None
        del self._items[tag]
        return item if fitting else None

    def forget(self, tag: int) -> None:
        """Nothing more comes of a tag."""
        self._items.pop(tag, None)

    def ended(self, item: Item) -> None:
        """All ranks have finished this all-reduce, and what came beside it: what looks like it is smaller."""
        self._items = {tag: one for tag, one in self._items.items() if one is not item}

    def take(self) -> list[Item]:
        """The all-reduces of which it is still not certain; no longer asked about."""
        found, self._items = list(self._items.values()), {}
        return found
