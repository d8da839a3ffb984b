"""RoCEv2 frames to messages, natively.

A flow is what is sent to one queue pair of one host. Packets are put in the order of their PSN; a repetition lands at
the place of the first one, and is counted. A hole is final as soon as the receiver has acknowledged a later PSN (it has
what is missing here, so nobody sends it again), or, if no acknowledgements are seen, after a number of later packets.
docs/wire-format.md describes what is read; tests hold the parser to a twin in plain Python.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

import numpy as np

from lastgood import _native
from lastgood.errors import ConfigError
from lastgood.mirror.capture.memory import address_of
from lastgood.mirror.streams.messages import HEAD, LOST, PIECE, Flow, Parsed

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameBatch

__all__ = [
    "FIRST",
    "LAST",
    "LAST_IMMEDIATE",
    "MIDDLE",
    "MOST_WAITING_BYTES",
    "ONLY",
    "ONLY_IMMEDIATE",
    "PATIENCE",
    "PROTOCOLS",
    "ROCE_PORT",
    "RoceParser",
    "roce_flow",
]

ROCE_PORT: Final = 4791
PROTOCOLS: Final = ("auto", "simple", "ll", "ll128")
PATIENCE: Final = 1024
MOST_WAITING_BYTES: Final = 64 << 20

FIRST: Final = 6
"""The first packet of an RDMA write; further opcodes of reliable connections follow."""
MIDDLE: Final = 7
LAST: Final = 8
LAST_IMMEDIATE: Final = 9
ONLY: Final = 10
ONLY_IMMEDIATE: Final = 11


class RoceParser:
    """RoCEv2 as a `Parser`.

    `protocol` says what the messages carry: ``simple``, ``ll``, ``ll128``, or ``auto``, which tells LL by its flags.
    `patience` is after how many later packets a hole is final if no acknowledgements are seen.
    """

    def __init__(
        self,
        *,
        protocol: str = "auto",
        patience: int = PATIENCE,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        striped: bool = False,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError(f"a RoCE parser reads the protocols {', '.join(PROTOCOLS)}, not {protocol!r}")
        self._parser = _native.RoceParser(protocol, patience, most_waiting_bytes, striped)
        self._batch: FrameBatch | None = None

    def feed(self, batch: FrameBatch) -> Parsed:
        """Read frames. Addresses of pieces hold until the next call."""
        self._batch = batch  # pieces lie in it
        table = np.ascontiguousarray(batch.table)
        return _parsed(self._parser.feed(address_of(batch.data), batch.data.nbytes, table.ctypes.data, len(table)))

    def finish(self) -> Parsed:
        """The source has ended: what is still open is lost."""
        return _parsed(self._parser.finish())

    def counters(self) -> dict[str, int]:
        """What was seen, left aside and lost so far, by name."""
        return self._parser.counters()


def _parsed(
    found: tuple[list[tuple[int, bytes, bytes, int, int, bool]], list[int], bytes, bytes, bytes, list[tuple[int, str]]],
) -> Parsed:
    opened, closed, heads, pieces, lost, resynced = found
    return Parsed(
        [roce_flow(*one) for one in opened],
        closed,
        np.frombuffer(heads, HEAD),
        np.frombuffer(pieces, PIECE),
        np.frombuffer(lost, LOST),
        resynced,
    )


def roce_flow(index: int, source: bytes, destination: bytes, port: int, queue: int, from_start: bool) -> Flow:
    """A flow as others see it."""
    detail = {"queue_pair": queue, "from_the_beginning": from_start}
    return Flow(index, "roce", _text(source), port, _text(destination), ROCE_PORT, detail)


def _text(address: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)
