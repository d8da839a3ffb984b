"""RoCEv2 frames to messages, natively: `roce_plain` says what is done, and gives the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lastgood import _native
from lastgood.errors import ConfigError
from lastgood.mirror.capture.memory import address_of
from lastgood.mirror.streams.messages import HEAD, LOST, PIECE, Parsed
from lastgood.mirror.streams.roce_plain import MOST_WAITING_BYTES, PATIENCE, PROTOCOLS, roce_flow

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameBatch

__all__ = ["RoceParser"]


class RoceParser:
    """RoCEv2 as a `Parser`. Arguments are those of `PlainRoceParser`."""

    def __init__(
        self, *, protocol: str = "auto", patience: int = PATIENCE, most_waiting_bytes: int = MOST_WAITING_BYTES
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError(f"a RoCE parser reads the protocols {', '.join(PROTOCOLS)}, not {protocol!r}")
        self._parser = _native.RoceParser(protocol, patience, most_waiting_bytes)
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
