"""A reader from docs/s3-format.md alone. `get(key)` gives the bytes of an object; keys come with their sizes."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable


def crc32c(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


TABLE = [_entry(number) for number in range(256)]


def newest(keys: Iterable[tuple[str, int]]) -> str:
    """The key of the newest commit that was not judged bad."""
    shape = re.compile(r"commits/[0-9a-f]{32}/[0-9]{20}-[0-9]{20}")
    found = dict(keys)
    return max(
        key for key, size in found.items() if size and shape.fullmatch(key) and f"verdicts{key[7:]}" not in found
    )


def streams(key: str, get: Callable[[str], bytes]) -> list[bytes]:
    """The streams of all ranks of one checkpoint, all of them checked."""
    line, digest, rest = get(key).split(b"\n")
    assert hashlib.sha256(line).hexdigest().encode() == digest and rest == b""
    commit = json.loads(line)
    assert (commit["format"], commit["version"], commit["kind"]) == ("lastgood-objects", 1, "commit")
    assert key == f"commits/{commit['job_id']}/{commit['incarnation']:020d}-{commit['step']:020d}"
    assert len(commit["manifests"]) == commit["world_size"]
    return [_stream(commit, rank, get) for rank in range(commit["world_size"])]


def _stream(commit: dict, rank: int, get: Callable[[str], bytes]) -> bytes:
    name, nbytes = commit["manifests"][rank]
    content = get(_key("manifests", name))
    assert len(content) == nbytes and hashlib.sha256(content).hexdigest() == name[17:]
    manifest = json.loads(content)
    assert (manifest["format"], manifest["version"], manifest["kind"]) == ("lastgood-objects", 1, "manifest")
    for field in ("job_id", "incarnation", "step", "world_size"):
        assert manifest[field] == commit[field]
    assert manifest["rank"] == rank
    table = bytes.fromhex(manifest["table"])
    assert hashlib.sha256(table).hexdigest() == manifest["table_digest"]
    found = b""
    for name, sha256 in manifest["segments"]:
        piece = get(_key("segments", name))
        assert sha256 in (None, hashlib.sha256(piece).hexdigest())
        found += piece
        assert len(found) % manifest["segment_bytes"] == 0 or len(found) == manifest["stream_bytes"]
    assert len(found) == manifest["stream_bytes"]
    size = manifest["chunk_bytes"]
    for number, begin in enumerate(range(0, len(found), size)):
        chunk = found[begin : begin + size]
        whole = struct.pack("<QQ", manifest["sequence"], number) + chunk + bytes(-len(chunk) % 4096)
        assert struct.unpack_from("<I", table, 4 * number) == (crc32c(whole),)
    return found


def _key(kind: str, name: str) -> str:
    assert re.fullmatch("[0-9a-f]{16}-[0-9a-f]{64}", name)
    return f"{kind}/{name[17:19]}/{name}"
