"""Decoders of the documents among objects: manifests, commits, notes of uploads."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from tests.fuzz.support.hostile import changed_bytes, changed_tree, json_of
from tests.fuzz.support.registry import Prepared, decoder

JOB = "ab" * 16
CHUNK = 4096


def or_bits(rng: random.Random, thing: Any) -> Any:
    if rng.random() < 0.15:
        return changed_bytes(rng, json_of(thing), fields=False)
    return changed_tree(rng, thing)


def text_of(thing: Any) -> bytes:
    return thing if isinstance(thing, bytes) else json_of(thing)


def name_of(number: int) -> str:
    return f"{number:016x}-{number:064x}"


def manifest() -> dict[str, Any]:
    table = bytes(range(20))
    return {
        "format": "lastgood-objects",
        "version": 1,
        "kind": "manifest",
        "job_id": JOB,
        "rank": 1,
        "world_size": 2,
        "step": 7,
        "incarnation": 2,
        "sequence": 9,
        "stream_bytes": 5 * CHUNK - 3,
        "meta_offset": 100,
        "meta_bytes": 50,
        "chunk_bytes": CHUNK,
        "layout_digest": "cd" * 32,
        "table_digest": hashlib.sha256(table).hexdigest(),
        "table": table.hex(),
        "segment_bytes": 2 * CHUNK,
        "segments": [[name_of(1), None], [name_of(2), "ef" * 32], [name_of(3), None]],
    }


@decoder("manifest of a rank's objects", lambda: [manifest()], change=or_bits)
def _manifest(thing: Any, folder: Path) -> Prepared:
    from lastgood.storage.objects.format import Manifest

    del folder
    content = text_of(thing)

    def read() -> None:
        found = Manifest.decode(content, "here")
        assert sum(found.size_of(number) for number in range(len(found.segments))) == found.record.stream_bytes
        assert Manifest.decode(found.encode(), "here") == found

    return len(content), read


@decoder(
    "commit of objects",
    lambda: [
        {
            "format": "lastgood-objects",
            "version": 1,
            "kind": "commit",
            "job_id": JOB,
            "incarnation": 2,
            "step": 7,
            "world_size": 2,
            "manifests": [[name_of(1), 500], [name_of(2), 600]],
        }
    ],
    change=or_bits,
)
def _commit(thing: Any, folder: Path) -> Prepared:
    from lastgood.storage.objects.format import Commit, CommitName

    del folder
    line = text_of(thing)
    content = line + b"\n" + hashlib.sha256(line.partition(b"\n")[0]).hexdigest().encode() + b"\n"
    name = CommitName(bytes.fromhex(JOB), 2, 7)

    def read() -> None:
        found = Commit.decode(content, "here", name)
        assert found.name == name and Commit.decode(found.encode(), "here", name) == found

    return len(content), read


@decoder(
    "note of an upload",
    lambda: [
        {
            "format": "lastgood-objects",
            "version": 1,
            "kind": "upload",
            "upload": f"{JOB}/{1:020d}-{2:020d}",
            "rank": 3,
            "bases": [f"{JOB}/{1:020d}-{1:020d}"],
            "part": [name_of(1), 500],
        }
    ],
    change=or_bits,
)
def _note(thing: Any, folder: Path) -> Prepared:
    from lastgood.storage.objects.format import UploadNote

    del folder
    content = text_of(thing)

    def read() -> None:
        found = UploadNote.decode(content, "here")
        assert UploadNote.decode(found.encode(), "here") == found
        json.dumps([str(found.name), *map(str, found.bases)])

    return len(content), read


@decoder(
    "verdict on a checkpoint",
    lambda: [
        {
            "format": "lastgood-objects",
            "version": 1,
            "kind": "verdict",
            "checkpoint": f"{JOB}/{2:020d}-{7:020d}",
            "ok": False,
            "reason": "loss is nan",
        }
    ],
    change=or_bits,
)
def _verdict(thing: Any, folder: Path) -> Prepared:
    from lastgood.storage.objects.format import BadVerdict, CommitName

    del folder
    content = text_of(thing)
    name = CommitName(bytes.fromhex(JOB), 2, 7)

    def read() -> None:
        found = BadVerdict.decode(content, "here", name)
        assert BadVerdict.decode(found.encode(), "here", name) == found

    return len(content), read
