"""Reading mirrored Gloo traffic from memory on one core, against copying as much payload.

`parse and place` reads frames (Ethernet, IPv4, TCP, Gloo) by the native parser and copies each piece of payload to its
place in a buffer; `parse` leaves the copying out. `copy` is one memcpy of the same payload between two buffers. Frames
carry 65,160 bytes, as a veth with segmentation offload has them, and 1,448 bytes, as a network of MTU 1500 has them.
"""

from __future__ import annotations

import argparse
import struct
import time
from pathlib import Path

import numpy as np
from harness import Comparison, Report, cannot, command_line, interleaved, main, say

from lastgood import _native
from lastgood.mirror.capture.frames import FRAME, FrameBatch
from lastgood.mirror.streams.native import NativeGlooParser
from lastgood.units import MIB

GOALS = {65_160: 0.6, 1_448: 0.25}
SEGMENT_BYTES = 1_008_248
"""As Gloo cuts a bucket of 25 MiB for two ranks."""
BATCH_BYTES = 8 * MIB
HEADER_BYTES = 54
SLOT = 4 << 56


class Traffic:
    """Frames of one connection, one after another in memory: each segment is announced, then sent."""

    def __init__(self, frame_bytes: int, segments: int) -> None:
        payload = np.random.default_rng(0).integers(0, 256, SEGMENT_BYTES, np.uint8).tobytes()
        stream = bytearray(struct.pack("<Q", 1))
        for number in range(segments):
            slot = SLOT | number << 24
            stream += struct.pack("<6Q", 48, 2, slot, 0, SEGMENT_BYTES, 0)
            stream += struct.pack("<6Q", 48 + SEGMENT_BYTES, 1, slot, 0, SEGMENT_BYTES, 0) + payload
        self.payload_bytes = segments * SEGMENT_BYTES
        frames = [self._frame(0, b"", 2)]
        frames += [self._frame(at + 1, stream[at : at + frame_bytes]) for at in range(0, len(stream), frame_bytes)]
        rows = []
        at = 0
        for number, frame in enumerate(frames):
            rows.append((at, len(frame), len(frame), number, 0, 1))
            at += len(frame)
        self.data = np.frombuffer(b"".join(frames), np.uint8)
        table = np.array(rows, FRAME)
        each = max(1, BATCH_BYTES // (frame_bytes + HEADER_BYTES))
        view = memoryview(self.data)
        self.batches = [FrameBatch(view, table[begin : begin + each]) for begin in range(0, len(table), each)]

    @staticmethod
    def _frame(sequence: int, content: bytes | bytearray, flags: int = 16) -> bytes:
        tcp = struct.pack(">HHIIBBHHH", 1, 2, sequence & 0xFFFFFFFF, 0, 5 << 4, flags, 65535, 0, 0)
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 40 + len(content), 1, 0, 64, 6, 0, bytes(4), b"\1\1\1\1")
        return b"\2" * 12 + b"\x08\0" + ip + tcp + content


def read(traffic: Traffic, target: np.ndarray | None) -> float:
    """Seconds for all frames; pieces are copied to `target` if there is one."""
    parser = NativeGlooParser()
    begin = time.perf_counter()
    for batch in traffic.batches:
        pieces = parser.feed(batch).pieces
        if target is None or not len(pieces):
            continue
        starts = np.flatnonzero(np.diff(pieces["message"], prepend=np.uint64(1 << 63)))
        for low, high in zip(starts, [*starts[1:], len(pieces)], strict=True):
            at = int(pieces["message"][low]) // 2 % (len(target) // SEGMENT_BYTES) * SEGMENT_BYTES
            where = pieces.ctypes.data + int(low) * pieces.itemsize
            _native.scatter_pieces(target.ctypes.data, target.nbytes, at, at + SEGMENT_BYTES, where, int(high - low))
    seconds = time.perf_counter() - begin
    payload = parser.counters()["payload_bytes"]
    if payload != traffic.payload_bytes:
        cannot(f"the parser found {payload} of {traffic.payload_bytes} bytes of payload")
    return seconds


def copy(source: np.ndarray, target: np.ndarray, nbytes: int) -> float:
    """Seconds to copy `nbytes` of payload, a buffer at a time."""
    begin = time.perf_counter()
    done = 0
    while done < nbytes:
        step = min(nbytes - done, target.nbytes, source.nbytes)
        at = done % (source.nbytes - step) if source.nbytes > step else 0
        target[:step] = source[at : at + step]
        done += step
    return time.perf_counter() - begin


def measure(options: argparse.Namespace, _folder: Path) -> Report:
    segments = 26 if options.quick else 260
    report = Report(settings={"segments": segments, "segment_bytes": SEGMENT_BYTES, "batch_bytes": BATCH_BYTES})
    target = np.zeros(26 * SEGMENT_BYTES, np.uint8)
    for frame_bytes, goal in GOALS.items():
        say(f"frames of {frame_bytes} bytes")
        traffic = Traffic(frame_bytes, segments)
        sides = {
            "parse and place": lambda traffic=traffic: read(traffic, target),
            "parse": lambda traffic=traffic: read(traffic, None),
            "copy": lambda traffic=traffic: copy(traffic.data, target, traffic.payload_bytes),
        }
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _, name in interleaved(list(sides), options.rounds, options.seed):
            found[name].append(traffic.payload_bytes / sides[name]() / 1e6)
        for name, wanted in (("parse and place", goal), ("parse", None)):
            what = f"{name}, {frame_bytes} B"
            report.comparisons.append(Comparison(what, "MB/s", name, found[name], "copy", found["copy"], wanted))
        report.results[f"frames_{frame_bytes}"] = {"megabytes_per_s": found}
    return report


if __name__ == "__main__":
    main(command_line(__doc__, rounds=15), measure, __file__)
