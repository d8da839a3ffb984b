"""A mirror node's side record: one part, which holds what gradients do not carry of a training that nobody asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastgood.errors import CorruptCheckpoint
from lastgood.gradients.trainer.rank_record import open_side, record_of
from lastgood.gradients.trainer.record_sections import Section

__all__ = ["make_side", "read_side_part", "side_part"]

_PART = "mirrored"


def make_side(part: Mapping[str, Any]) -> bytes:
    """A side record of this part."""
    return bytes(record_of([Section.of({_PART: dict(part)})])[0])


def side_part(side: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The part in an opened side record. Raises CorruptCheckpoint."""
    part = side.get(_PART)
    if not isinstance(part, Mapping):
        raise CorruptCheckpoint(f"{where}: its side record is none of a mirror node")
    return part


def read_side_part(record: bytes, where: str) -> Mapping[str, Any]:
    """The part in a side record. Raises CorruptCheckpoint."""
    return side_part(open_side(bytearray(record), where), where)
