"""The decoders of bytes from outside, each with sound samples, a way to change them, and how they are read."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.support.hostile import changed_tree

__all__ = ["Decoder", "Prepared", "decoder"]

Prepared = tuple[int, Callable[[], object]]
"""How many bytes there are to read, and what reads them: it gives a right state, or raises LastgoodError."""
Change = Callable[[random.Random, Any], Any]


@dataclass(frozen=True)
class Decoder:
    """One decoder. `write` puts a sample (or a changed one) down as its writer would, every checksum sound."""

    name: str
    samples: Callable[[], list[Any]]
    write: Callable[[Any, Path], Prepared]
    change: Change
    share: float
    """Of all inputs: those that take longer get fewer."""
    native: bool
    """Whether bytes from outside reach native code: such are run under the sanitizers too."""


DECODERS: dict[str, Decoder] = {}


def decoder(
    name: str,
    samples: Callable[[], list[Any]],
    *,
    change: Change = changed_tree,
    share: float = 1.0,
    native: bool = False,
) -> Callable[[Callable[[Any, Path], Prepared]], Callable[[Any, Path], Prepared]]:
    """Register what stands below as the decoder's `write`."""

    def register(write: Callable[[Any, Path], Prepared]) -> Callable[[Any, Path], Prepared]:
        assert name not in DECODERS, name
        DECODERS[name] = Decoder(name, samples, write, change, share, native)
        return write

    return register
