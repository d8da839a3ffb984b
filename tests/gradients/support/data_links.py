"""Data links whose other end is the test."""

from __future__ import annotations

import ctypes
import socket

from lastgood.gradients.link.data_link import DataLink, DataSettings

WAIT_S = 60.0
SETTINGS = DataSettings(pool_bytes=1 << 20, copied_bytes=1 << 18, patience_s=WAIT_S, stall_s=WAIT_S)
LARGE = ctypes.create_string_buffer(64 << 20)
"""More than the kernel takes for a connection that nobody reads."""


def address_of(memory: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(memory)


def pair() -> tuple[socket.socket, socket.socket]:
    """A connection: a rank's end, and the shadow's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), WAIT_S)
        far, _ = server.accept()
    near.setblocking(False)
    far.settimeout(WAIT_S)
    return near, far


def connected(settings: DataSettings) -> tuple[DataLink, socket.socket]:
    """A link whose first iteration has begun, and the shadow's end of its connection."""
    near, far = pair()
    link = DataLink("10.9.8.7:6", 1, 1, 0, settings)
    link.connect(near.detach())
    link.begin_iteration(1)
    return link, far


class Unending:
    """A real sender whose thread has something to do for ever."""

    def __init__(self, sender: object) -> None:
        self._sender = sender

    def wait_returned(self, ticket: int, timeout_s: float) -> bool:
        return False

    def returned(self, ticket: int) -> bool:
        return False

    def join(self, timeout_s: float) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self._sender, name)
