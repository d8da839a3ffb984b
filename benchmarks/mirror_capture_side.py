"""The programs of mirror_capture.py that take frames: the dump stage, who reads its ring, and a bare counter.

Each prints a line of JSON when it is ready, and another one after its standard input has ended and nothing more came.
"""

from __future__ import annotations

import json
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lastgood.mirror.capture.dump import Dump
from lastgood.mirror.capture.frames import ETHERNET, FRAME
from lastgood.mirror.capture.interface import InterfaceSource
from lastgood.mirror.capture.ring import RingReader, RingWriter

SETTLE_S = 0.5
RING_S = 30.0


def say(content: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def dump(interface: str, kernel_ring: int, path: Path, ring_bytes: int) -> None:
    source = InterfaceSource(interface, ring_bytes=kernel_ring)
    ring = RingWriter(path, ring_bytes, ETHERNET)
    stop = threading.Event()
    stage = Dump(source, ring=ring)
    thread = threading.Thread(target=stage.run, args=(stop,))
    say({"ready": 1})
    began = time.process_time()
    thread.start()
    sys.stdin.read()
    time.sleep(SETTLE_S)
    stop.set()
    thread.join()
    cpu_s = time.process_time() - began
    found = stage.counters()
    say(
        {
            "kernel_dropped": found["source"]["kernel_dropped"],
            "ring_dropped": found["ring"]["dropped_frames"],
            "cpu_s": cpu_s,
        }
    )
    ring.close()
    source.close()


def drain(path: Path, frame_bytes: int) -> None:
    reader = RingReader(path, wait_s=RING_S)
    say({"ready": 1})
    frames = 0
    while (batch := reader.read(4096, 0.1)) is not None:
        frames += int((batch.table["length"] == frame_bytes).sum())
        reader.give_back()
    say({"frames": frames})
    reader.close()


def count(interface: str, kernel_ring: int, frame_bytes: int) -> None:
    """Nothing but reading the kernel's blocks, and giving them back."""
    source = InterfaceSource(interface, ring_bytes=kernel_ring)
    blocks, socket = source._blocks, source._socket.fileno()
    table = np.empty(1 << 15, FRAME)
    taken = 0

    def ended() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    say({"ready": 1})
    began = time.process_time()
    last: float | None = None
    while last is None or time.monotonic() - last < SETTLE_S:
        rows = blocks.read(socket, table.ctypes.data, len(table), 0.05)
        if rows > 0:
            taken += int((table["length"][:rows] == frame_bytes).sum())
            while blocks.release():
                pass
        if (last is None and ended()) or (rows > 0 and last is not None):
            last = time.monotonic()
    say({"taken": taken, "kernel_dropped": source.counters()["kernel_dropped"], "cpu_s": time.process_time() - began})
    source.close()


def main(role: str, *words: str) -> None:
    roles: dict[str, Callable[[], None]] = {
        "dump": lambda: dump(words[0], int(words[1]), Path(words[2]), int(words[3])),
        "drain": lambda: drain(Path(words[0]), int(words[1])),
        "count": lambda: count(words[0], int(words[1]), int(words[2])),
    }
    roles[role]()


if __name__ == "__main__":
    main(*sys.argv[1:])
