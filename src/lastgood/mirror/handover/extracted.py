"""What was extracted, as bytes: events in JSON, then the buffers of collectives that are complete, in order."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from pydantic import TypeAdapter, ValidationError

from lastgood.errors import CorruptCheckpoint
from lastgood.mirror.conversation.places import (
    Buckets,
    Closed,
    Contradiction,
    Expect,
    Incarnation,
    Learned,
    LostStep,
    StepOpen,
)
from lastgood.mirror.extract.extractor import Extracted
from lastgood.mirror.extract.slots import Filled, Gone
from lastgood.mirror.handover.turn import Counters, Turn
from lastgood.text import parse_json

__all__ = ["pack_extracted", "unpack_extracted"]

_MOST_HEAD_BYTES: Final = 64 << 20
_HEAD_SIZE = struct.Struct("<I")
_EVENTS: Final[dict[str, TypeAdapter[Any]]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (Incarnation, Learned, Buckets, StepOpen, Expect, Closed, LostStep, Contradiction, Gone)
}
_COUNTERS: Final = TypeAdapter(dict[str, dict[str, float]])


def pack_extracted(events: Sequence[Extracted], counters: Counters, *, last: bool = False) -> list[bytes | memoryview]:
    """As parts of one message; `counters` are those of the stages so far."""
    told = [
        [type(one).__name__, asdict(one.expected) if isinstance(one, Filled) else asdict(one)]  # its buffer comes after
        for one in events
    ]
    text = json.dumps({"events": told, "last": last, "counters": counters}, separators=(",", ":")).encode()
    buffers = (one.memory.data for one in events if isinstance(one, Filled))
    return [_HEAD_SIZE.pack(len(text)), text, *buffers]


def unpack_extracted(message: bytes, where: str) -> tuple[Turn, Counters]:
    """What `pack_extracted` was given. Raises CorruptCheckpoint."""
    if len(message) < _HEAD_SIZE.size:
        raise CorruptCheckpoint(f"{where}: a message of {len(message)} bytes")
    (size,) = _HEAD_SIZE.unpack_from(message)
    at = _HEAD_SIZE.size + size
    told = parse_json(message[_HEAD_SIZE.size : at], where, most_bytes=_MOST_HEAD_BYTES)
    try:
        counters = _COUNTERS.validate_python(told["counters"])
        last = told["last"] is True
        events: list[Extracted] = []
        for kind, fields in told["events"]:
            if kind != "Filled":
                events.append(_event(kind, fields))
                continue
            expected = _event("Expect", fields)
            end = at + expected.nbytes
            if not at <= end <= len(message):
                raise CorruptCheckpoint(f"{where}: a buffer is not in its message")
            events.append(Filled(expected, np.frombuffer(message, np.uint8, expected.nbytes, at).copy()))
            at = end
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{where}: a message is none of what is extracted: {error}") from error
    if at != len(message):
        raise CorruptCheckpoint(f"{where}: a message has {len(message) - at} bytes more than its buffers")
    return Turn(events, last), counters


def _event(kind: str, fields: Any) -> Any:
    # As JSON: lists are tuples there.
    return _EVENTS[kind].validate_json(json.dumps(fields), strict=True)
