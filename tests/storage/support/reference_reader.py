"""A second opinion on the slot file format, written from docs/file-format.md alone; shares no code with Lastgood."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import NamedTuple

import google_crc32c


class Checkpoint(NamedTuple):
    step: int
    incarnation: int
    sequence: int
    stream: bytes
    meta: bytes
    layout_digest: bytes


def crc32c(data: bytes, seed: int = 0) -> int:
    return int(google_crc32c.extend(seed, data))


def job_id(directory: Path) -> bytes:
    described = json.loads((directory / "job.json").read_text())
    checksum = described.pop("crc32c")
    canonical = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    assert checksum == f"{crc32c(canonical):08x}"
    assert (described["format"], described["version"]) == ("lastgood-slots", 1)
    return bytes.fromhex(described["job_id"])


def read_record(content: bytes, offset: int, magic: bytes) -> bytes | None:
    record = content[offset : offset + 512]
    if len(record) < 512 or record[:8] != magic or struct.unpack_from("<I", record, 12)[0] != 512:
        return None
    if crc32c(record[:508]) != struct.unpack_from("<I", record, 508)[0]:
        return None
    assert struct.unpack_from("<I", record, 8)[0] == 1, "another format version"
    return record


def read_slot(path: Path) -> Checkpoint | None:
    """The checkpoint in a slot file, or None if there is no whole one."""
    content = path.read_bytes()
    record = read_record(content, 65536, b"LGCOMMIT")
    if record is None or struct.unpack_from("<I", record, 32)[0] != 2:
        return None
    step, incarnation, sequence, length, meta_at, meta_bytes, chunk, data_at, table_at, table_bytes = (
        struct.unpack_from("<10Q", record, 40)
    )
    layout_digest, table_digest = record[120:152], record[152:184]
    chunks = -(-length // chunk)
    padded = -(-length // 4096) * 4096
    assert data_at == 1 << 20 and table_at == data_at + padded and table_bytes == 4 * chunks
    table = content[table_at : table_at + table_bytes]
    if hashlib.sha256(table).digest() != table_digest:
        return None
    data = content[data_at : data_at + padded]
    for number, expected in enumerate(struct.unpack(f"<{chunks}I", table)):
        seed = crc32c(struct.pack("<QQ", sequence, number))
        if crc32c(data[number * chunk : (number + 1) * chunk], seed) != expected:
            return None
    stream = data[:length]
    return Checkpoint(step, incarnation, sequence, stream, stream[meta_at : meta_at + meta_bytes], layout_digest)


def read_directory(directory: Path) -> list[Checkpoint]:
    """All complete checkpoints, newest first."""
    found = [read_slot(path) for path in sorted(directory.glob("slot-*.lgs"))]
    return sorted((one for one in found if one is not None), key=lambda one: one.sequence, reverse=True)
