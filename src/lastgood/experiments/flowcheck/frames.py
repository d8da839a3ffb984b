"""The two programs of `capture`: one sends raw frames at a rate, the other takes them as the dump stage does.

``python -m lastgood.experiments.flowcheck.frames send INTERFACE FRAME_BYTES BITS_PER_S SECONDS`` prints one line of
JSON when it is done; ``take INTERFACE FRAME_BYTES RING_BYTES`` prints one when it captures, and another one after its
standard input has ended and nothing more came.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Final

import numpy as np

from lastgood.mirror.capture.interface import InterfaceSource

__all__ = ["main", "send", "take"]

_KIND: Final = b"\x88\xb5"
"""An EtherType for experiments (IEEE 802)."""
_BURST: Final = 64
_BATCH: Final = 4096
_PAUSE_S: Final = 2e-4
_SETTLE_S: Final = 0.5
_SOL_PACKET, _QDISC_BYPASS = 263, 20


def send(interface: str, frame_bytes: int, bits_per_s: float, seconds: float) -> dict[str, float]:
    """Send frames evenly; what could not be sent in time is not made up for. Frames sent, and the seconds it took."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
        out.bind((interface, 0))
        out.setsockopt(_SOL_PACKET, _QDISC_BYPASS, 1)
        frame = (b"\xff" * 6 + b"\x02" + bytes(5) + _KIND).ljust(frame_bytes, b"\x5a")
        frames_per_s = bits_per_s / 8 / frame_bytes
        sent = skipped = 0
        began = time.perf_counter()
        end = began + seconds
        while (now := time.perf_counter()) < end:
            due = int((now - began) * frames_per_s) - sent - skipped
            if due <= 0:
                time.sleep(_PAUSE_S)
                continue
            if due > _BURST:  # it cannot keep up: offer what it can
                skipped += due - _BURST
                due = _BURST
            for _ in range(due):
                out.send(frame)
            sent += due
        return {"frames": sent, "seconds": time.perf_counter() - began}


def take(interface: str, frame_bytes: int, ring_bytes: int) -> dict[str, float]:
    """Capture until standard input ends and nothing more comes; each batch is copied once."""
    source = InterfaceSource(interface, ring_bytes=ring_bytes)
    room = np.empty(1 << 24, np.uint8)
    frames = 0
    _say({"ready": True})
    began = time.process_time()
    ended: float | None = None
    while ended is None or time.monotonic() - ended < _SETTLE_S:
        batch = source.read(_BATCH, 0.05)
        if batch is None:
            break
        table = batch.table
        if len(table):
            _copy(np.frombuffer(batch.data, np.uint8), table["offset"], table["captured"], room)
            frames += int((table["length"] == frame_bytes).sum())
        if ended is None:
            if select.select([sys.stdin], [], [], 0)[0]:
                ended = time.monotonic()
        elif len(table):
            ended = time.monotonic()
    found = source.counters()
    cpu_s = time.process_time() - began
    source.close()
    return {"frames": frames, "dropped": found["kernel_dropped"], "cpu_s": cpu_s}


def _copy(data: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, room: np.ndarray) -> None:
    """Copy all frames, run by run: frames of a block follow each other, and blocks too until the ring begins anew."""
    ends = offsets + lengths
    cuts = np.flatnonzero((offsets[1:] < ends[:-1]) | (offsets[1:] - offsets[:1] > len(room))) + 1
    for run in np.split(np.arange(len(offsets)), cuts):
        start, end = int(offsets[run[0]]), int(ends[run[-1]])
        for at in range(start, end, len(room)):
            part = data[at : min(end, at + len(room))]
            room[: len(part)] = part


def _say(content: dict[str, float] | dict[str, bool]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """See the module."""
    role, interface, frame_bytes, *rest = arguments
    if role == "send":
        found = send(interface, int(frame_bytes), float(rest[0]), float(rest[1]))
    else:
        found = take(interface, int(frame_bytes), int(rest[0]))
    _say(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
