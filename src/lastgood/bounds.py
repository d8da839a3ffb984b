"""How much memory, depth and time what came from outside may take, whatever it says of itself."""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from lastgood.units import MIB, format_bytes

__all__ = [
    "DAMAGE",
    "MOST_DEPTH",
    "MOST_INT_BYTES",
    "Budget",
    "Refused",
    "check_hashes",
    "hashable",
    "json_cost",
    "key_cost",
    "memory_for",
    "require",
    "tree_cost",
]

MOST_DEPTH = 100
"""Containers inside containers."""
MOST_INT_BYTES = 1024
"""Of one integer: Python writes no more than 4,300 digits."""
_MOST_KEY_ITEMS = 1000
_TIMES = 4
_BESIDE_BYTES = 64 * MIB
"""So many times its size, and this."""
_BYTES_FOR_A_SIGN = 45
"""Of memory, for each comma and bracket of a JSON text."""
_BUFFERS = 8 * MIB
"""Of a reader."""
_MOST_ALIKE = 1000
_NOTED = 300
"""Bytes for a key of which `Budget.note` keeps the hash."""
_SMALL = 61


DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, struct.error)
"""What reading outside bytes may raise beside OSError; `Refused` is one of them, and torch raises RuntimeError."""


class Refused(ValueError):
    """What is not read. `unknown` is the name in it that stands on no list, if that is the reason."""

    def __init__(self, reason: str, unknown: str | None = None) -> None:
        super().__init__(reason)
        self.unknown = unknown


def require(holds: bool, reason: str) -> None:
    """Raise Refused unless something holds."""
    if not holds:
        raise Refused(reason)


def memory_for(held_bytes: int) -> int:
    """The most memory, in bytes, that is taken for what a file of so many bytes says: it follows what the file has."""
    return _TIMES * held_bytes + _BESIDE_BYTES


class Budget:
    """What reading a file may take beside the bytes of its tensors, so that `memory_for` it is enough for all."""

    def __init__(self, file_bytes: int) -> None:
        self.most = memory_for(file_bytes) - file_bytes - _BUFFERS
        self.taken = 0
        self._noted: set[tuple[int, int]] = set()
        self._alike = 0

    def take(self, nbytes: int) -> None:
        """Count memory that is about to be used. Raises Refused when there is too little."""
        self.taken += nbytes
        if self.taken > self.most:
            raise Refused(f"it would take more than {format_bytes(self.most)} of memory, out of proportion to its file")

    def note(self, container: object, key: Any) -> None:
        """Count the hash of a key that is set in a container which fills bit by bit; as `check_hashes`.

        Raises Refused.
        """
        if not _may_be_alike(key):
            return
        before = len(self._noted)
        self._noted.add((id(container), hash(key)))
        self._alike += before == len(self._noted)
        if self._alike > _MOST_ALIKE:
            raise Refused(f"more than {_MOST_ALIKE} keys of one hash")


def json_cost(text: bytes) -> int:
    """An upper bound of the memory that a JSON text and its value take."""
    return 2 * len(text) + _BYTES_FOR_A_SIGN * sum(map(text.count, (b",", b"[", b"{")))


# -- keys --------------------------------------------------------------------------------------------------------------


def hashable(items: Iterable[Any], budget: Budget, further: tuple[type, ...] = ()) -> list[Any]:
    """`items` for a set, looked at and charged before it is hashed. `further` as for `key_cost`. Raises Refused."""
    found = list(items)
    budget.take(sum(96 + key_cost(item, further) for item in found))
    check_hashes(found)
    return found


def check_hashes(keys: Collection[Any]) -> None:
    """Refuse keys that were made to have one hash: a dict of them compares each with all others. Raises Refused.

    Texts and bytes cannot be: Python's hash of them has a secret. Integers beyond 61 bits can, complex numbers, tuples.
    """
    try:
        different = len({hash(key) for key in keys})
    except TypeError as error:
        raise Refused(f"a key that Python cannot hash: {error}") from error
    if len(keys) - different > _MOST_ALIKE:
        raise Refused(f"more than {_MOST_ALIKE} keys of one hash")


def _may_be_alike(key: Any) -> bool:
    kind = type(key)
    # Of what `further` brings too: kinds of tuples.
    return kind in (complex, frozenset) or isinstance(key, tuple) or (kind is int and key.bit_length() > _SMALL)


def key_cost(key: Any, further: tuple[type, ...] = ()) -> int:
    """What hashing a key costs, counted without hashing it: a tuple that holds one tuple many times has no end.

    `further` are types that may be in a key beside those of plain values. One that is a kind of tuple costs what a
    tuple costs. Raises Refused.
    """
    cost, seen, waiting = _NOTED if _may_be_alike(key) else 0, 0, [key]
    while waiting:
        item = waiting.pop()
        seen += 1
        kind = type(item)
        if kind in (tuple, frozenset) or (kind in further and isinstance(item, tuple)):
            if seen + len(waiting) + len(item) > _MOST_KEY_ITEMS:
                raise Refused(f"a key is made of more than {_MOST_KEY_ITEMS} values")
            waiting += item
        elif kind not in _KEYS and kind not in further:
            raise Refused(f"a {kind.__name__} is a key")
    return cost


_KEYS = (str, bytes, bool, int, float, complex, type(None))


# -- trees -------------------------------------------------------------------------------------------------------------


_SCALARS = frozenset((str, bytes, bytearray, int, float, complex, bool, type(None)))
_CONTAINERS = (list, tuple, dict, OrderedDict, Counter, set, frozenset)
_ITEM, _SET_ITEM, _PAIR, _CONTAINER = 40, 260, 200, 900
"""Bytes beside those of a value itself: more than `load_pickle` charges, whatever way the value was written."""


def tree_cost(value: Any, leaf_cost: Callable[[Any], int | None], path: str, leaf_keys: tuple[type, ...] = ()) -> int:
    """An upper bound of the memory that reading and walking a tree takes: what is in it twice is counted twice.

    A tree is made of None, numbers, texts, bytes, list, tuple, dict, OrderedDict, Counter, set, frozenset (exact types)
    and leaves, of which `leaf_cost` says what they cost beside; it gives None for anything else. Leaves of the types
    `leaf_keys` may be in a set, or the key of a mapping. So what passes here when it is written is read again, and what
    passes when it is read can be walked without a thought for its depth and its size. Raises Refused, naming the place
    below `path`, for what is no tree.
    """
    try:
        return _Costs(leaf_cost, leaf_keys).of(value, 0)[0]
    except _Misplaced as error:
        place = "".join(reversed(error.steps))
        raise Refused(f"{path}{place[:200]}: {error}") from None


class _Misplaced(ValueError):
    """What is no tree; the steps that lead there, the last one first, are added on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.steps: list[str] = []


class _Costs:
    def __init__(self, leaf_cost: Callable[[Any], int | None], leaf_keys: tuple[type, ...]) -> None:
        self._leaf_cost = leaf_cost
        self._leaf_keys = leaf_keys
        self._known: dict[int, tuple[int, int]] = {}

    def of(self, value: Any, depth: int) -> tuple[int, int]:
        """The cost of a value, and how many containers deep it is."""
        kind = type(value)
        if kind in _SCALARS:
            return _ITEM + _size_of(value), 0
        if kind not in _CONTAINERS:
            cost = self._leaf_cost(value)
            if cost is None:
                raise _Misplaced(f"a {kind.__module__}.{kind.__qualname__} has no place there")
            return _ITEM + cost, 0
        # Each container is looked at once, however often it is there.
        known = self._known.get(id(value))
        if depth + (1 if known is None else known[1]) > MOST_DEPTH:
            raise _Misplaced(f"is deeper than {MOST_DEPTH} levels, or a container that holds itself")
        if known is None:
            known = self._known[id(value)] = self._container(value, kind, depth + 1)
        return known

    def _container(self, value: Any, kind: type, depth: int) -> tuple[int, int]:
        cost, height = _CONTAINER, 0
        of_keys = kind not in (list, tuple)
        if of_keys:
            each = _SET_ITEM if kind in (set, frozenset) else _PAIR
            cost += sum(each + self._key(key, depth) for key in value)
            try:
                check_hashes(value)
            except Refused as error:
                raise _Misplaced(str(error)) from None
        if kind in (set, frozenset):
            return cost, 1
        for step, item in value.items() if of_keys else enumerate(value):
            if type(item) in _SCALARS:
                cost += _ITEM + _size_of(item)
                continue
            try:
                part, below = self.of(item, depth)
            except _Misplaced as error:
                error.steps.append(f".{str(step)[:40]}" if of_keys else f"[{step}]")
                raise
            cost, height = cost + part, max(height, below)
        return cost, height + 1

    def _key(self, key: Any, depth: int) -> int:
        try:
            return key_cost(key, self._leaf_keys) + self.of(key, depth)[0]
        except (Refused, _Misplaced) as error:
            raise _Misplaced(f"{error}, as a key") from None


def _size_of(value: Any) -> int:
    size = sys.getsizeof(value)
    if size > MOST_INT_BYTES and type(value) is int and value.bit_length() >= 8 * MOST_INT_BYTES:
        raise _Misplaced(f"an integer of more than {MOST_INT_BYTES} bytes")
    return size
