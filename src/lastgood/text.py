"""Text that came from outside (a file, a connection, a command line), read strictly: bounded, finite, or refused.

Python's own reader of JSON takes Infinity and 1e999, numbers of any length, lone surrogates that no file can be written
with, and nesting that ends in a RecursionError.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from lastgood.errors import CorruptCheckpoint, LastgoodError

__all__ = ["parse_json"]

_MAX_DEPTH = 64
_MAX_DIGITS = 40
"""Enough for 128 bits; what takes a number must still check its range."""
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: bytes | str,
    what: str,
    *,
    most_bytes: int,
    most_depth: int = _MAX_DEPTH,
    most_digits: int = _MAX_DIGITS,
    error: type[LastgoodError] = CorruptCheckpoint,
) -> Any:
    """The value of one JSON document in UTF-8.

    Raises `error`, whose message begins with `what`, if it is no JSON, longer than `most_bytes`, nested deeper than
    `most_depth`, or holds a number that is not finite or has more than `most_digits` digits.
    """

    def integer(digits: str) -> int:
        if len(digits) > most_digits:
            raise ValueError(f"a number of {len(digits)} digits, over the limit of {most_digits}")
        return int(digits)

    try:
        if len(text) > most_bytes:
            raise ValueError(f"{len(text)} bytes, over the limit of {most_bytes}")
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        _check_depth(text, most_depth)
        value = json.loads(text, parse_int=integer, parse_float=_finite, parse_constant=_refuse)
        if _SURROGATE.search(text):
            # Half of a pair can be in no file and no terminal: encoding it raises a ValueError.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as refused:
        raise error(f"{what}: cannot be read as JSON: {refused}") from refused


def _check_depth(text: str, most: int) -> None:
    if text.count("[") + text.count("{") <= most:
        return
    depth = 0
    for match in _BRACKETS.finditer(text):
        sign = match[0]
        if sign in "[{":
            depth += 1
            if depth > most:
                raise ValueError(f"nested deeper than {most} levels")
        elif sign in "]}":
            depth -= 1


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:40]} is not finite")
    return number


def _refuse(name: str) -> float:
    raise ValueError(f"the number {name} is not finite")
