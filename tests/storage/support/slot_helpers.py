"""Streams whose content tells which step they belong to, and short ways to write and read them."""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

from lastgood.storage import SlotInfo, SlotStore, SlotView, SlotWrite
from lastgood.storage import format as fmt

CHUNK = 16384
SMALL_POOL = 8 * CHUNK
TIMEOUT_S = 60.0


def content_of(step: int, nbytes: int) -> bytes:
    return hashlib.shake_128(step.to_bytes(8, "little")).digest(nbytes)


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def open_store(directory: Path, **knobs: object) -> SlotStore:
    settings: dict[str, object] = {"slots": 4, "keep": 2, "chunk_bytes": CHUNK, "pool_bytes": SMALL_POOL}
    return SlotStore(directory, **{**settings, **knobs})


def give(write: SlotWrite, content: bytes, threads: int = 1) -> None:
    memory = bytearray(content)
    write.copy_host([(address_of(memory), len(memory))] if memory else [], TIMEOUT_S, threads)
    memory[:] = os.urandom(1) * len(memory)  # the source may change as soon as copy_host has returned


def commit(write: SlotWrite, meta_bytes: int = 10) -> str:
    length = write.stream_bytes
    meta_bytes = min(meta_bytes, length)
    return write.commit(length - meta_bytes, meta_bytes, bytes(range(32)), TIMEOUT_S)


def save(store: SlotStore, step: int, nbytes: int) -> str:
    write = store.begin(step, nbytes, TIMEOUT_S)
    give(write, content_of(step, nbytes))
    return commit(write)


def load(store: SlotView, info: SlotInfo, threads: int = 2) -> bytes:
    memory = bytearray(info.stream_bytes)
    if memory:
        store.read_into(info, [(address_of(memory), len(memory))], threads, timeout_s=TIMEOUT_S)
    return bytes(memory)


def steps(store: SlotView) -> list[int]:
    return [info.step for info in store.committed()]


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ mask]))


def seal(record: bytearray) -> bytes:
    """Give a changed record the checksum that makes it sound again."""
    from lastgood._native import crc32c_portable

    record[508:512] = crc32c_portable(bytes(record[:508])).to_bytes(4, "little")
    return bytes(record)


def rewrite_record(path: Path, offset: int, position: int, value: bytes) -> None:
    """Replace some bytes of the record at `offset`, with a right checksum."""
    with path.open("r+b") as file:
        file.seek(offset)
        record = bytearray(file.read(fmt.RECORD_BYTES))
        record[position : position + len(value)] = value
        file.seek(offset)
        file.write(seal(record))
