"""Checks of data that came from elsewhere: types, counts and numbers, bounded before anything is built of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from lastgood.errors import CorruptCheckpoint

__all__ = ["MAX_GROUPS", "MAX_PARAMETERS", "Reader"]

MAX_GROUPS: Final = 4096
MAX_PARAMETERS: Final = 1 << 20
_MAX_NUMBER_TEXT: Final = 40  # what float.hex() writes is shorter


class Reader:
    """One JSON object of `what`. Every method raises CorruptCheckpoint, which names `what` and the key."""

    def __init__(self, data: Any, what: str, keys: Sequence[str]) -> None:
        if not isinstance(data, Mapping):
            raise CorruptCheckpoint(f"{what}: not a JSON object")
        unknown = [key for key in data if key not in keys]
        if unknown:
            raise CorruptCheckpoint(f"{what}: unknown key {str(unknown[0])[:60]!r}; known: {', '.join(keys)}")
        self._data = data
        self._what = what

    def bad(self, key: str, expected: str) -> CorruptCheckpoint:
        """The error to raise if `key` is not what was `expected`."""
        return CorruptCheckpoint(f"{self._what}: {key} is not {expected}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._data.get(key) is not None

    def choice(self, key: str, known: Sequence[str]) -> str:
        """One of the words in `known`."""
        value = self._data.get(key)
        if not isinstance(value, str) or value not in known:
            raise self.bad(key, f"one of {', '.join(known)}")
        return value

    def text(self, key: str, most: int) -> str:
        """A string of at most `most` characters."""
        value = self._data.get(key)
        if not isinstance(value, str) or len(value) > most:
            raise self.bad(key, f"a text of at most {most} characters")
        return value

    def flag(self, key: str) -> bool:
        """A boolean."""
        value = self._data.get(key)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def count(self, key: str, least: int, most: int) -> int:
        """An integer from `least` to `most`."""
        return self._integer(key, self._data.get(key), least, most)

    def number(self, key: str, *, finite: bool = True) -> float:
        """A float written by float.hex()."""
        return self._float(key, self._data.get(key), finite)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Exactly `count` finite floats."""
        value = self.rows(key, count)
        if len(value) != count:
            raise self.bad(key, f"{count} numbers")
        return tuple(self._float(key, one, True) for one in value)

    def rows(self, key: str, most: int) -> Sequence[Any]:
        """A list of at most `most` entries."""
        value = self._data.get(key)
        if not isinstance(value, list) or len(value) > most:
            raise self.bad(key, f"a list of at most {most} entries")
        return value

    def integers(self, key: str, most: int, limit: int) -> tuple[int, ...]:
        """At most `most` integers from 0 to `limit`, rising."""
        found = tuple(self._integer(key, one, 0, limit) for one in self.rows(key, most))
        if any(a >= b for a, b in pairwise(found)):
            raise self.bad(key, "a rising list")
        return found

    def powers(self, key: str, most: int) -> tuple[tuple[int, float, float], ...]:
        """At most `most` rows of a step and two floats."""
        found = []
        for row in self.rows(key, most):
            if not isinstance(row, list) or len(row) != 3:
                raise self.bad(key, "rows of a step and two numbers")
            step = self._integer(key, row[0], 1, 1 << 24)
            found.append((step, self._float(key, row[1], True), self._float(key, row[2], True)))
        return tuple(found)

    def _integer(self, key: str, value: Any, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.bad(key, f"an integer from {least} to {most}")
        return value

    def _float(self, key: str, value: Any, finite: bool) -> float:
        if not isinstance(value, str) or len(value) > _MAX_NUMBER_TEXT:
            raise self.bad(key, "a number in hexadecimal")
        try:
            number = float.fromhex(value)
        except (ValueError, OverflowError):
            raise self.bad(key, "a number in hexadecimal") from None
        if finite and not math.isfinite(number):
            raise self.bad(key, "a finite number")
        return number
