"""Jobs of a directory as objects, as the tier sends them; and clients that count, or fail by rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.commits import find_commits, read_commit, read_manifest
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import CommitName, Manifest, object_key
from lastgood.storage.objects.upload import PartUpload, commit_parts, upload_slot


def push_job(client: ObjectClient, job: Path, *steps: int, segment_chunks: int = 2) -> list[CommitName]:
    """Send the checkpoints of a job (those of `steps`, or all) that all its ranks hold, oldest first."""
    names = []
    for checkpoint in reversed(whole_checkpoints(job)):
        if steps and checkpoint.step not in steps:
            continue
        uploads, parts = [], []
        for view, info in zip(checkpoint.views, checkpoint.infos, strict=True):
            upload = PartUpload(client, info.record, segment_bytes=segment_chunks * info.record.chunk_bytes)
            parts.append(upload_slot(upload, view, info, threads=1))
            uploads.append(upload)
        names.append(commit_parts(uploads[0], parts).name)
        for upload in uploads:
            upload.done()
    return names


def manifest_of(client: ObjectClient, step: int, rank: int = 0) -> tuple[str, Manifest]:
    """Its key, and what it says."""
    name = next(name for name in find_commits(client) if name.step == step)
    parts = read_commit(client, name).parts
    key = object_key(objects.MANIFESTS, parts[rank].name)
    return key, read_manifest(client, name, parts[rank], rank, len(parts))


def segment_key(client: ObjectClient, step: int, index: int = 0, rank: int = 0) -> str:
    return object_key(objects.SEGMENTS, manifest_of(client, step, rank)[1].segments[index].name)


def commit_key(client: ObjectClient, step: int) -> str:
    return next(name.key for name in find_commits(client) if name.step == step)


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file, by default of its last byte but one: a document's last is a line feed."""
    content = bytearray(path.read_bytes())
    content[at if at >= 0 else -2] ^= 1
    path.write_bytes(content)


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Key and bytes of every read from a folder of objects."""
    seen: list[tuple[str, int]] = []
    real_range, real_get = FolderClient.get_range, FolderClient.get
    with monkeypatch.context() as patch:

        def counted_range(self: FolderClient, key: str, begin: int, nbytes: int) -> memoryview:
            seen.append((key, nbytes))
            return real_range(self, key, begin, nbytes)

        def counted(self: FolderClient, key: str, most_bytes: int) -> bytes:
            content = real_get(self, key, most_bytes)
            seen.append((key, len(content)))
            return content

        patch.setattr(FolderClient, "get_range", counted_range)
        patch.setattr(FolderClient, "get", counted)
        yield seen


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, of: Callable[[str], bool] = bool) -> Iterator[None]:
    """Every request for such a key (of a listing: its folder) raises."""
    with monkeypatch.context() as patch:
        for name in ("get", "get_range", "head", "list", "put", "create", "delete"):
            real = getattr(FolderClient, name)

            def fails(self, key, *arguments, real=real, **options):
                if of(key if isinstance(key, str) else key[0]):
                    raise error
                return real(self, key, *arguments, **options)

            patch.setattr(FolderClient, name, fails)
        yield


def changed_document(path: Path, **fields: object) -> bytes:
    """The JSON document of a file with other fields, on one line."""
    described = json.loads(path.read_bytes().splitlines()[0])
    return json.dumps({**described, **fields}, separators=(",", ":")).encode() + b"\n"
