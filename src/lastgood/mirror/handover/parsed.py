"""Messages as parsers make them, as bytes: a head in JSON, three tables, and the payload that pieces point into."""

from __future__ import annotations

import struct
from dataclasses import asdict
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from lastgood.errors import CorruptCheckpoint
from lastgood.mirror.extract.scatter import scatter
from lastgood.mirror.handover.turn import Counters
from lastgood.mirror.streams.messages import HEAD, LOST, PIECE, Flow, Parsed, Transport
from lastgood.models import FrozenModel
from lastgood.text import parse_model

__all__ = ["MOST_HEAD_BYTES", "pack_parsed", "unpack_parsed"]

MOST_HEAD_BYTES: Final = 16 << 20
_HEAD_SIZE = struct.Struct("<I")
_Count = Annotated[int, Field(ge=0, le=1 << 40)]
_Index = Annotated[int, Field(ge=0, lt=1 << 32)]


class _Flow(FrozenModel):
    index: _Index
    transport: Transport
    source: str
    source_port: _Index
    destination: str
    destination_port: _Index
    detail: dict[str, bool | int | str | None]


class _Head(FrozenModel):
    opened: tuple[_Flow, ...]
    closed: tuple[_Index, ...]
    resynced: tuple[tuple[_Index, str], ...]
    refused: tuple[str, ...]
    heads: _Count
    pieces: _Count
    lost: _Count
    payload: _Count
    counters: dict[str, dict[str, float]]


def pack_parsed(parsed: Parsed, counters: Counters) -> list[bytes | memoryview]:
    """As parts of one message; `counters` are those of the stages so far. Bytes of pieces are copied."""
    sizes = parsed.pieces["nbytes"].astype(np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    payload = np.empty(total, np.uint8)
    places = parsed.pieces.copy()
    places["offset"] = ends - sizes
    scatter(payload, 0, total, places)
    pieces = parsed.pieces.copy()
    pieces["address"] = ends - sizes  # from the begin of the payload
    head = _Head(
        opened=tuple(_Flow(**asdict(flow)) for flow in parsed.opened),
        closed=tuple(parsed.closed),
        resynced=tuple(parsed.resynced),
        refused=tuple(parsed.refused),
        heads=len(parsed.heads),
        pieces=len(pieces),
        lost=len(parsed.lost),
        payload=total,
        counters={stage: dict(values) for stage, values in counters.items()},
    )
    text = head.model_dump_json().encode()
    tables = (table.tobytes() for table in (parsed.heads, pieces, parsed.lost))
    return [_HEAD_SIZE.pack(len(text)), text, *tables, payload.data]


def unpack_parsed(message: bytes, where: str) -> tuple[Parsed, Counters]:
    """What `pack_parsed` was given. Addresses of pieces lie in `message`, which must stay as long as they are used.

    Raises CorruptCheckpoint.
    """
    if len(message) < _HEAD_SIZE.size:
        raise CorruptCheckpoint(f"{where}: a message of {len(message)} bytes")
    (size,) = _HEAD_SIZE.unpack_from(message)
    at = _HEAD_SIZE.size + size
    text = message[_HEAD_SIZE.size : at]
    head = parse_model(_Head, text, where, most_bytes=MOST_HEAD_BYTES, error=CorruptCheckpoint)
    counts = {HEAD: head.heads, PIECE: head.pieces, LOST: head.lost}
    if at + sum(kind.itemsize * count for kind, count in counts.items()) + head.payload != len(message):
        raise CorruptCheckpoint(f"{where}: a message is not as long as its head says")
    tables = []
    for kind, count in counts.items():
        tables.append(np.frombuffer(message, kind, count, at).copy())
        at += kind.itemsize * count
    heads, pieces, lost = tables
    _place(pieces, message, at, head.payload, where)
    opened = [Flow(**dict(flow)) for flow in head.opened]
    parsed = Parsed(opened, list(head.closed), heads, pieces, lost, list(head.resynced), list(head.refused))
    return parsed, head.counters


def _place(pieces: np.ndarray[Any, np.dtype[Any]], message: bytes, at: int, payload: int, where: str) -> None:
    """Make addresses of places in the payload, all of which must lie in it."""
    places, sizes = pieces["address"], pieces["nbytes"]
    if len(pieces) and (np.any(sizes > payload) or np.any(places > payload) or np.any(places + sizes > payload)):
        raise CorruptCheckpoint(f"{where}: pieces lie outside of their message")
    base = np.frombuffer(message, np.uint8).ctypes.data + at
    pieces["address"] = places + np.uint64(base)
