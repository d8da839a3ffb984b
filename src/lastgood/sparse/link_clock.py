"""How long a connection has had something on its way, as the kernel counts it: with the bytes, the rate of its link."""

from __future__ import annotations

import socket
import struct

__all__ = ["sending_s"]

_BUSY_TIME = struct.Struct("<Q")
_BUSY_TIME_AT = 168
"""Of tcpi_busy_time in struct tcp_info, in microseconds (Linux 4.10; linux/tcp.h)."""
_MOST_BYTES = 256


def sending_s(connection: socket.socket) -> float:
    """Seconds since it was made in which something that was sent had not been acknowledged; 0 if nobody counts them.

    In steps of the kernel's clock tick, a few milliseconds.
    """
    try:
        held = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOST_BYTES)
    except OSError:  # it is closed
        return 0.0
    if len(held) < _BUSY_TIME_AT + _BUSY_TIME.size:
        return 0.0
    return float(_BUSY_TIME.unpack_from(held, _BUSY_TIME_AT)[0]) / 1e6
