"""Decoders that are broken on purpose, to see that the harness notices: each of their faults is one that was found."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

from lastgood.errors import CorruptCheckpoint
from tests.fuzz.support.hostile import json_of
from tests.fuzz.support.registry import Prepared, decoder

BROKEN = ("broken: another error", "broken: memory", "broken: crash", "broken: time")


def _samples() -> list[Any]:
    return [{"size": 8}]


def _size(text: bytes) -> Any:
    try:
        return json.loads(text)["size"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpoint("no size") from error


@decoder(BROKEN[0], _samples, share=0)
def _other(thing: Any, folder: Path) -> Prepared:
    text = json_of(thing)
    return len(text), lambda: int(_size(text))


@decoder(BROKEN[1], _samples, share=0)
def _memory(thing: Any, folder: Path) -> Prepared:
    text = json_of(thing)

    def read() -> None:
        size = _size(text)
        if type(size) is int and 1 << 27 <= size < 1 << 34:
            assert len(b"x" * (1 << 27))

    return len(text), read


@decoder(BROKEN[2], _samples, share=0)
def _crash(thing: Any, folder: Path) -> Prepared:
    text = json_of(thing)

    def read() -> None:
        if type(_size(text)) is not int:
            ctypes.string_at(8)

    return len(text), read


@decoder(BROKEN[3], _samples, share=0, change=lambda rng, thing: {"size": None})
def _time(thing: Any, folder: Path) -> Prepared:
    text = json_of(thing)

    def read() -> None:
        while type(_size(text)) is not int and time.process_time() > 0:
            pass

    return len(text), read
