"""Captured frames: pcap and pcapng files, the kernel's blocks, and the ring between two processes."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.support.hostile import changed_bytes
from tests.fuzz.support.registry import Prepared, decoder
from tests.mirror.capture.support import blocks, captures

_MOST_READS = 10_000


def _pcaps() -> list[bytes]:
    frames = captures.shots(12, most=120)
    return [captures.pcap(frames), captures.pcap(frames, ">", nano=True, link=113)]


def _pcapngs() -> list[bytes]:
    found = []
    for order in "<>":
        every = [captures.section(order), captures.interface(order, options=captures.option(order, 9, b"\x09"))]
        every += [captures.enhanced(order, one, one.time_ns) for one in captures.shots(12, most=120)]
        found.append(b"".join([*every, captures.block(order, 5, bytes(12)), captures.block(order, 0xBAD, b"x")]))
    return found


def _changed(rng: random.Random, thing: Any) -> Any:
    # Nearly always with its magic number: without it there is nothing to read.
    changed = changed_bytes(rng, thing[4:])
    return changed if rng.random() < 0.02 else thing[:4] + changed


def _read_file(thing: bytes, folder: Path) -> Prepared:
    from lastgood.mirror.capture.files import CaptureFile

    path = folder / "capture"
    path.write_bytes(thing)

    def read() -> int:
        with closing(CaptureFile(path, chunk_bytes=4096)) as source:
            frames = 0
            while (batch := source.read(50, 0)) is not None:
                frames += len(captures.rows_of(batch))
            return frames

    return len(thing), read


decoder("pcap file", _pcaps, change=_changed)(_read_file)
decoder("pcapng file", _pcapngs, change=_changed)(_read_file)


def _blocks() -> list[bytes]:
    statuses = [0, blocks.VLAN_VALID, blocks.CSUM_NOT_READY]
    frames = [
        blocks.KernelFrame(one.data, one.time_ns, status=statuses[i % 3]) for i, one in enumerate(captures.shots(20))
    ]
    return [blocks.kernel_block(frames, 8192)[:8192]]


def _changed_block(rng: random.Random, thing: Any) -> Any:
    return (
        thing[:8] + blocks.USER.to_bytes(4, "little") + changed_bytes(rng, thing[12:])[: 8192 - 12].ljust(8180, b"\0")
    )


@decoder("kernel's block", _blocks, change=_changed_block, native=True)
def _block(thing: bytes, folder: Path) -> Prepared:
    from lastgood import _native
    from lastgood.mirror.capture.frames import FRAME, FrameBatch

    def read() -> int:
        memory = np.frombuffer(bytearray(thing), np.uint8)
        reader, table = _native.PacketBlocks(memory.ctypes.data, 8192, 1, 1), np.zeros(64, FRAME)
        frames = 0
        for _ in range(3):
            count = reader.read(-1, table.ctypes.data, 64, 0.0)
            frames += len(captures.rows_of(FrameBatch(memoryview(memory), table[:count])))
        return frames

    return len(thing), read


def _rings() -> list[bytes]:
    from lastgood import _native
    from lastgood.mirror.capture.memory import address_of

    size = _native.FRAME_RING_HEADER_BYTES + _native.FRAME_RING_LEAST_DATA_BYTES
    memory = np.zeros(size + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][:size]
    _native.FrameRing.format(memory.ctypes.data, size, 1)
    batch = captures.batch_of(captures.shots(30, most=100))
    writer = _native.FrameRing(memory.ctypes.data, size, True)
    writer.write(address_of(batch.data), len(batch.data), batch.table.ctypes.data, len(batch.table), True)
    return [memory[:8192].tobytes()]  # the rest is zero


def _changed_ring(rng: random.Random, thing: Any) -> Any:
    if rng.random() < 0.5:
        return changed_bytes(rng, thing[:320])[:320].ljust(320, b"\0") + thing[320:]
    return thing[:4096] + changed_bytes(rng, thing[4096:])[:4096].ljust(4096, b"\0")


@decoder("ring of frames", _rings, change=_changed_ring, share=0.5, native=True)
def _ring(thing: bytes, folder: Path) -> Prepared:
    from lastgood.mirror.capture.ring import LEAST_RING_BYTES, RingReader

    path = folder / "ring"
    with path.open("wb") as file:
        file.write(thing)
        file.truncate(LEAST_RING_BYTES)
    path.chmod(0o600)

    def read() -> int:
        frames = 0
        with closing(RingReader(path)) as reader:
            for _ in range(_MOST_READS):
                batch = reader.read(50, 0)
                if batch is None or not len(batch):
                    break
                frames += len(captures.rows_of(batch))
            reader.counters()
        return frames

    return LEAST_RING_BYTES, read
