"""RoCEv2 frames in memory, parsed and put into buffers on one core, against a loop that checks the ICRC and copies."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from harness import Comparison, Report, cannot, command_line, interleaved, main, say

from lastgood import _native
from lastgood.mirror.capture.frames import ETHERNET, FRAME, FrameBatch
from lastgood.mirror.extract.scatter import scatter
from lastgood.mirror.generate.packets import Path, acknowledge, write_packets
from lastgood.mirror.streams.ll import encode
from lastgood.mirror.streams.roce import RoceParser
from lastgood.units import KIB, MIB

GOALS = {("simple", 4096): 0.5, ("simple", 1024): 0.35, ("ll", 4096): 0.35, ("ll", 1024): 0.25}
MESSAGE_BYTES = {"simple": MIB, "ll": 32 * KIB}
BATCH_FRAMES = 1024
ROUND_BYTES = 256 * MIB
ETHERNET_BYTES, IPV6_BYTES = 14, 40
GO = Path(b"\x02\0\0\0\0\1", b"\x02\0\0\0\0\2", "fd00::1", "fd00::2", 50000)


@dataclass(frozen=True)
class Traffic:
    """Messages of one queue pair, with their acknowledgements."""

    batches: list[FrameBatch]
    message_bytes: int
    messages: int
    data: bytes
    wire_bytes: int
    """All payload, flags too."""


def make_traffic(protocol: str, mtu: int, nbytes: int) -> Traffic:
    size = MESSAGE_BYTES[protocol]
    data = np.random.default_rng(1).bytes(nbytes // size * size)
    frames: list[bytes] = []
    psn = wire = 0
    for number, at in enumerate(range(0, len(data), size)):
        payload = data[at : at + size]
        if protocol == "ll":
            payload = encode(payload, number + 1)
        wire += len(payload)
        immediate = len(payload).to_bytes(4, "little")
        packets = write_packets(1, psn, payload, 1 << 32, 7, mtu, immediate=immediate)
        frames += [GO.frame(packet) for packet in packets]
        psn += len(packets)
        frames.append(GO.back().frame(acknowledge(2, psn - 1, number)))
    batches = []
    for begin in range(0, len(frames), BATCH_FRAMES):
        some = frames[begin : begin + BATCH_FRAMES]
        table = np.zeros(len(some), FRAME)
        table["captured"] = table["length"] = [len(frame) for frame in some]
        table["offset"] = np.cumsum(table["captured"].astype(np.uint64)) - table["captured"]
        table["link"] = ETHERNET
        batches.append(FrameBatch(memoryview(bytearray().join(some)), table))
    return Traffic(batches, size, len(data) // size, data, wire)


def parse_and_extract(traffic: Traffic, memory: np.ndarray) -> int:
    """Returns how many bytes came into place."""
    parser = RoceParser()
    size, placed = traffic.message_bytes, 0
    for batch in traffic.batches:
        pieces = parser.feed(batch).pieces
        if not len(pieces):
            continue
        numbers = pieces["message"]
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(pieces)]
        for begin, end in pairwise(cuts):
            at = int(numbers[begin]) * size
            placed += sum(high - low for low, high in scatter(memory, at, at + size, pieces[begin:end]))
    return placed


def check_and_copy(traffic: Traffic, memory: np.ndarray) -> int:
    """Returns how many checksums are right."""
    right = 0
    for batch in traffic.batches:
        data = np.frombuffer(batch.data, np.uint8)
        right += _native.icrc_copy_frames(
            data.ctypes.data, batch.table.ctypes.data, len(batch), memory.ctypes.data, ETHERNET_BYTES, IPV6_BYTES
        )
    return right


def measure(options: argparse.Namespace, _folder: object) -> Report:
    nbytes = 4 * MIB if options.quick else 32 * MIB
    report = Report(settings={"data_bytes": nbytes, "crc32": _native.crc32_variants()[0]})
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for (protocol, mtu), goal in GOALS.items():
        say(f"{protocol}, MTU {mtu}")
        traffic = make_traffic(protocol, mtu, nbytes)
        memory = np.zeros(len(traffic.data), np.uint8)
        copies = np.zeros(BATCH_FRAMES * (mtu + 64), np.uint8)
        if parse_and_extract(traffic, memory) != len(traffic.data) or memory.tobytes() != traffic.data:
            cannot("what was extracted is not what was sent")
        if check_and_copy(traffic, copies) != sum(len(batch) for batch in traffic.batches):
            cannot("some checksum is wrong")
        sides = {"parse": lambda: parse_and_extract(traffic, memory), "loop": lambda: check_and_copy(traffic, copies)}  # noqa: B023 - called in this round
        loops = 1 if options.quick else max(1, ROUND_BYTES // nbytes)
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _, name in interleaved(list(sides), options.rounds, options.seed):
            begin = time.perf_counter()
            for _ in range(loops):
                sides[name]()
            found[name].append(8 * traffic.wire_bytes * loops / (time.perf_counter() - begin) / 1e9)
        what = f"{protocol}, MTU {mtu}"
        report.comparisons.append(
            Comparison(what, "Gbit/s", "parse and extract", found["parse"], "check and copy", found["loop"], goal)
        )
        report.results[f"{protocol}_{mtu}"] = {"gigabits_per_s": found, "loops": loops}
    return report


if __name__ == "__main__":
    main(command_line(__doc__, rounds=15), measure, __file__)
