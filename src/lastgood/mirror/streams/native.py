"""The parser of Gloo's traffic: C++, without the GIL. docs/wire-format.md describes what is read."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

import numpy as np

from lastgood import _native
from lastgood.mirror.streams.messages import HEAD, LOST, PIECE, Flow, Parsed
from lastgood.mirror.streams.sockets import refusal
from lastgood.mirror.streams.tcp import TcpSettings

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameBatch

__all__ = ["NativeGlooParser"]

_SEEN = {1: True, 0: False, -1: None}


class NativeGlooParser:
    """A `Parser` of Gloo's traffic."""

    def __init__(self, settings: TcpSettings | None = None) -> None:
        one = settings or TcpSettings()
        self._streams = _native.GlooStreams(one.keep_bytes, one.keep_all_bytes, one.blind_bytes, one.max_connections)
        self._batch: FrameBatch | None = None

    def feed(self, batch: FrameBatch) -> Parsed:
        """Read frames. Addresses of pieces hold until the next call."""
        self._batch = batch
        data = np.frombuffer(batch.data, np.uint8)
        frames = np.ascontiguousarray(batch.table)
        return _parsed(self._streams.feed(data.ctypes.data, data.nbytes, frames.ctypes.data, len(frames)))

    def finish(self) -> Parsed:
        """The source has ended: what is still open is lost."""
        return _parsed(self._streams.finish())

    def counters(self) -> dict[str, int]:
        """Frames left aside by reason, connections, repeated and lost bytes, flows, payload."""
        return self._streams.counters()


def _parsed(found: tuple[Any, ...]) -> Parsed:
    opened, closed, heads, pieces, lost, resynced, refused = found
    flows = []
    for index, (source, source_port, destination, destination_port), connector, first in opened:
        detail = {"connector": _SEEN[connector], "from_the_beginning": first}
        addresses = (_text(source), source_port, _text(destination), destination_port)
        flows.append(Flow(index, "gloo", *addresses, detail))
    return Parsed(
        flows,
        closed,
        np.frombuffer(heads, HEAD),
        np.frombuffer(pieces, PIECE),
        np.frombuffer(lost, LOST),
        resynced,
        [refusal(*ends, tls=tls) for ends, tls in refused],
    )


def _text(address: bytes) -> str:
    return str(ipaddress.ip_address(address))
