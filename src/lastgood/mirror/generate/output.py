"""Where generated frames go: into memory as batches, a pcapng file, or an interface at a rate."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from lastgood.errors import ConfigError, HostError
from lastgood.files import storage_errors
from lastgood.mirror.capture.frames import ETHERNET, FRAME, FrameBatch
from lastgood.mirror.capture.pcapng import interface_block, packet_block, section_block
from lastgood.mirror.generate.traffic import Frame

__all__ = ["batches", "send_frames", "timed", "write_pcapng"]

_START_NS: Final = 1_700_000_000 * 10**9
_WIRE_EXTRA_BYTES: Final = 24
"""Preamble, checksum and gap of each Ethernet frame."""
_PACE_BYTES: Final = 1 << 16
_RETRY_S: Final = 0.001
_PATIENCE_S: Final = 10.0


def timed(frames: Iterable[Frame], bits_per_s: float) -> Iterator[tuple[int, Frame]]:
    """Frames with the time (ns since 1970) at which each has passed a link of that rate, from a fixed date on."""
    if not bits_per_s > 0:
        raise ConfigError(f"a rate is more than 0 bits a second, not {bits_per_s}")
    bits = 0
    for frame in frames:
        bits += 8 * (len(frame.data) + _WIRE_EXTRA_BYTES)
        yield _START_NS + int(bits * 1e9 / bits_per_s), frame


def batches(frames: Iterable[Frame], *, limit: int = 4096, bits_per_s: float = 1e10) -> Iterator[FrameBatch]:
    """Frames as a source gives them."""
    stream = timed(frames, bits_per_s)
    while rows := list(islice(stream, limit)):
        table = np.zeros(len(rows), FRAME)
        lengths = np.array([len(frame.data) for _, frame in rows])
        table["captured"] = table["length"] = lengths
        table["offset"] = np.cumsum(lengths) - lengths
        table["time_ns"] = [time_ns for time_ns, _ in rows]
        table["link"] = ETHERNET
        yield FrameBatch(memoryview(bytearray().join(frame.data for _, frame in rows)), table)


def write_pcapng(path: Path, frames: Iterable[Frame], *, bits_per_s: float = 1e10) -> int:
    """Write a new file with one interface for each watched rank's port; returns the number of frames.

    Raises StorageError if it cannot be written.
    """
    interfaces: dict[int, int] = {}
    count = 0
    with storage_errors(path, "writing generated frames"), path.open("xb") as file:
        file.write(section_block())
        for time_ns, frame in timed(frames, bits_per_s):
            if frame.port not in interfaces:
                interfaces[frame.port] = len(interfaces)
                file.write(interface_block(ETHERNET, f"rank{frame.port}"))
            file.write(packet_block(frame.data, time_ns, interface=interfaces[frame.port]))
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def send_frames(interface: str, frames: Iterable[Frame], *, bits_per_s: float) -> int:
    """Send frames from an interface at a rate; returns their number. Needs the right to send raw frames.

    Raises HostError if the interface does not take them.
    """
    try:
        sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    except OSError as error:
        raise HostError(f"sending raw frames needs root (CAP_NET_RAW): {error.strerror}") from error
    count = since = 0
    with sender:
        try:
            sender.bind((interface, 0))
            sender.settimeout(_PATIENCE_S)
            begin = time.monotonic_ns()
            for time_ns, frame in timed(frames, bits_per_s):
                if since >= _PACE_BYTES:
                    since = 0
                    ahead_s = (time_ns - _START_NS - (time.monotonic_ns() - begin)) / 1e9
                    if ahead_s > 0:
                        time.sleep(ahead_s)
                _send(sender, frame.data)
                since += len(frame.data)
                count += 1
        except OSError as error:
            raise HostError(f"interface {interface} takes no frames: {error.strerror or error}") from error
    return count


def _send(sender: socket.socket, data: bytes) -> None:
    """Send one frame; a full queue is waited for."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            sender.send(data)
            return
        except OSError as error:
            if error.errno not in (errno.ENOBUFS, errno.EAGAIN) or time.monotonic() > until:
                raise
        time.sleep(_RETRY_S)
