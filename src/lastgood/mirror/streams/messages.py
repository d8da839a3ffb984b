"""What parsers make of frames: messages of flows, as heads, pieces and losses.

A *flow* is one direction of a TCP connection or of a RoCE queue pair. It carries messages, numbered from 0 in the order
of the stream. A *head* says that a message begins and how long it is; *pieces* say where bytes of its payload lie;
*losses* say which bytes will never come. A head always comes before, or together with, the first piece of its message.
Bytes of a piece stay where they are until the next `Parser.feed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameBatch

__all__ = [
    "DATA",
    "HEAD",
    "LOST",
    "PIECE",
    "READY_TO_RECEIVE",
    "READY_TO_SEND",
    "SEND_BUFFER",
    "Flow",
    "Parsed",
    "Parser",
    "Table",
    "Transport",
]

Table = NDArray[np.void]
Transport = Literal["gloo", "nccl-socket", "roce", "ring"]

SEND_BUFFER: Final = 0
"""Opcodes are Gloo's: data of an old collective, data, and two announcements without payload."""
DATA: Final = 1
"""All messages of NCCL, RoCE and Lastgood's own ring have it."""
READY_TO_SEND: Final = 2
READY_TO_RECEIVE: Final = 3

HEAD: Final = np.dtype(
    [("flow", "<u4"), ("opcode", "<u4"), ("message", "<u8"), ("slot", "<u8"), ("nbytes", "<u8"), ("time_ns", "<u8")]
)
"""`slot` is Gloo's, 0 for others; `nbytes` the payload as the head knows it (announced, if the opcode carries none)."""
PIECE: Final = np.dtype(
    [("flow", "<u4"), ("pad", "<u4"), ("message", "<u8"), ("offset", "<u8"), ("address", "<u8"), ("nbytes", "<u8")]
)
"""`nbytes` bytes at `address` are those from byte `offset` of the message's payload on."""
LOST: Final = np.dtype([("flow", "<u4"), ("pad", "<u4"), ("message", "<u8"), ("offset", "<u8"), ("nbytes", "<u8")])
"""Bytes that will never come; the whole message if `nbytes` is 0 (of RoCE, one that never had a head)."""


@dataclass(frozen=True)
class Flow:
    """One direction of one connection or queue pair. `index` is its number in heads, pieces and losses."""

    index: int
    transport: Transport
    source: str
    """The sender's address, as text."""
    source_port: int
    destination: str
    destination_port: int
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What else is known: `connector` (whether the source opened the connection), QP and such."""


def _none(kind: np.dtype[Any]) -> Table:
    return np.empty(0, kind)


@dataclass
class Parsed:
    """What one batch of frames gave, in the order of the stream for each flow."""

    opened: list[Flow] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    """Flows of which nothing more comes."""
    heads: Table = field(default_factory=lambda: _none(HEAD))
    pieces: Table = field(default_factory=lambda: _none(PIECE))
    lost: Table = field(default_factory=lambda: _none(LOST))
    resynced: list[tuple[int, str]] = field(default_factory=list)
    """Flows that went on after bytes of unknown content, and why: messages between are missing, without numbers."""
    refused: list[str] = field(default_factory=list)
    """Traffic that is recognised and not read (TLS, framing that is not known), said once for each connection."""


class Parser(Protocol):
    """Makes messages of frames. Memory is bounded: what cannot be kept is lost and counted."""

    def feed(self, batch: FrameBatch) -> Parsed:
        """Read frames. Addresses of pieces hold until the next call."""

    def finish(self) -> Parsed:
        """The source has ended: what is still open is lost."""

    def counters(self) -> dict[str, int]:
        """What was seen, left aside and lost so far, by name."""
