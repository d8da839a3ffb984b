"""Where a load reads from: a folder, or objects below a URL. Both hold checkpoints of Lastgood's or of torch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from lastgood import _native
from lastgood.bounds import require
from lastgood.checkpointers.directories.manifest import MOST_MANIFEST_BYTES, parse_manifest
from lastgood.checkpointers.torch_files.archive import reading
from lastgood.errors import CorruptCheckpoint, NoCheckpoint, StorageError
from lastgood.files import read_bounded, storage_errors
from lastgood.integrations.dcp.bucket import job_id_of, save_time_ns
from lastgood.integrations.dcp.folder import file_name, manifest_name, metadata_name
from lastgood.integrations.dcp.item_files import ObjectItems, SlotItems, TorchItems, TorchObjects
from lastgood.locations import Location
from lastgood.state import Layout
from lastgood.storage.objects.client import ObjectMissing
from lastgood.storage.objects.commits import find_commits, read_commit
from lastgood.storage.objects.format import Commit
from lastgood.storage.objects.opening import open_objects
from lastgood.storage.objects.s3 import S3Options
from lastgood.storage.objects.view import RemoteInfo, RemotePath, RemoteView

__all__ = ["FolderSource", "ObjectSource", "Source"]

_LOOKERS = 8
_MOST_METADATA_BYTES = 1 << 32


class Source(Protocol):
    """A checkpoint, as one rank's load sees it. All calls raise StorageError."""

    def where(self, name: str) -> Path:
        """A file of it, for messages."""

    def metadata(self, rank: int | None) -> bytes:
        """DCP's metadata, of all ranks or of one that saved by itself. Raises NoCheckpoint, CorruptCheckpoint."""

    def check(self, rank: int | None, content: bytes, save_id: bytes) -> None:
        """Hold these metadata to what else is known of their save. Raises CorruptCheckpoint."""

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Bytes of the files of these names that are there."""

    def slot_items(self, save_id: bytes | None, threads: int) -> SlotItems:
        """Reads what Lastgood wrote."""

    def torch_items(self) -> TorchItems:
        """Reads what torch wrote."""

    def close(self) -> None:
        """Give back connections."""


class FolderSource:
    """A `Source` of files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def where(self, name: str) -> Path:
        """The path."""
        return self._path / name

    def metadata(self, rank: int | None) -> bytes:
        """As `Source.metadata`."""
        name = metadata_name(rank)
        path = self._path / name
        with storage_errors(path, "reading"):
            try:
                return read_bounded(path, path.lstat().st_size)
            except (FileNotFoundError, NotADirectoryError):
                what = "holds no complete checkpoint" if self._path.exists() else "is not there"
                raise NoCheckpoint(f"{self._path}: {what}: it has no {name}") from None

    def check(self, rank: int | None, content: bytes, save_id: bytes) -> None:
        """By the manifest of the save."""
        name, path = metadata_name(rank), self._path / manifest_name(save_id)
        try:
            with storage_errors(path, "reading"):
                manifest = read_bounded(path, min(path.lstat().st_size, MOST_MANIFEST_BYTES))
        except StorageError as error:
            raise CorruptCheckpoint(f"{error}; the checkpoint is not complete without its manifest") from error
        expected = parse_manifest(manifest, str(path), 0).get(name)
        found = (len(content), _native.crc32c(content))
        if expected != found:
            raise CorruptCheckpoint(
                f"{self._path / name}: has (bytes, CRC32C) {found}, and the manifest of its save says {expected}"
            )

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """As `Source.sizes`."""
        found = {}
        for name in names:
            with contextlib.suppress(OSError):
                found[name] = (self._path / name).stat().st_size
        return found

    def slot_items(self, save_id: bytes | None, threads: int) -> SlotItems:
        """Slot files."""
        return SlotItems(self._path, save_id, threads)

    def torch_items(self) -> TorchItems:
        """Files of torch.save."""
        return TorchItems(self._path)

    def close(self) -> None:
        """Nothing is held."""


class ObjectSource:
    """A `Source` below a URL: the newest checkpoint of that name, or what torch's own writers left there.

    What was found first is read to the end, also if a newer one is committed meanwhile.
    """

    def __init__(self, place: Location, s3: S3Options | None) -> None:
        self._client = open_objects(place, s3)
        self._commit: Commit | None = None
        self._ranks: dict[str, int] = {}
        """Whose part is known by the name of a file."""
        self._infos: dict[int, RemoteInfo] = {}

    def where(self, name: str) -> Path:
        """The URL of the object, or of the commit that holds a part of that name."""
        commit = self._commit
        key = name if commit is None else f"{commit.name.key}: {name}"
        return RemotePath(self._client.where(key))

    def metadata(self, rank: int | None) -> bytes:
        """The last part of the newest commit; else the object of torch's own."""
        client = self._client
        self._commit, self._infos = None, {}
        names = find_commits(client, job_id_of(rank))
        if not names:
            try:
                return client.get(metadata_name(rank), _MOST_METADATA_BYTES)
            except ObjectMissing:
                raise NoCheckpoint(
                    f"{client.place}: holds no complete checkpoint: no commit, and no {metadata_name(rank)}"
                ) from None
        with self._taken_away():
            self._commit = read_commit(client, names[0])
            last = len(self._commit.parts) - 1
            info = self._info(last)
            content = RemoteView(client, last).read_bytes(info, 0, info.stream_bytes)
        with reading(self.where(metadata_name(rank))):
            layout = Layout.from_json(content[info.record.meta_offset :], str(info.path), info.stream_bytes)
            require(layout.digest() == info.record.layout_digest, "the layout does not have its digest")
            require(len(layout.block_bytes) == 1, "its last part holds something else than metadata")
            return content[: layout.block_bytes[0]]

    def check(self, rank: int | None, content: bytes, save_id: bytes) -> None:
        """By the commit, which names them."""
        del rank, content
        commit = self._commit
        if commit is None or commit.name.incarnation != save_time_ns(save_id):
            named = "no commit" if commit is None else commit.name.told
            raise CorruptCheckpoint(f"{self._client.place}: metadata of save {save_id.hex()} in {named}")
        self._ranks = {file_name(one, 0, save_id, "lgs"): one for one in range(len(commit.parts) - 1)}

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """As `Source.sizes`; of Lastgood's parts by their manifests."""

        def size(name: str) -> int | None:
            if self._commit is None:
                found = self._client.head(name)
                return None if found is None else found.nbytes
            return self.info_named(name).stream_bytes if name in self._ranks else None

        with ThreadPoolExecutor(_LOOKERS, thread_name_prefix="lastgood-dcp-look") as pool:
            sizes = dict(zip(names, pool.map(size, names), strict=True))
        return {name: size for name, size in sizes.items() if size is not None}

    def info_named(self, name: str) -> RemoteInfo:
        """The part of a rank, by the name that the metadata gives it. Raises CorruptCheckpoint."""
        if name not in self._ranks:
            raise CorruptCheckpoint(f"{self.where(name)}: the metadata names a part that no rank has sent")
        with self._taken_away():
            return self._info(self._ranks[name])

    def slot_items(self, save_id: bytes | None, threads: int) -> SlotItems:
        """Parts of the commit."""
        del save_id
        return ObjectItems(self._client, self.info_named, threads)

    def torch_items(self) -> TorchItems:
        """Objects of torch.save."""
        return TorchObjects(self._client)

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def _info(self, rank: int) -> RemoteInfo:
        commit = self._commit
        assert commit is not None
        if rank not in self._infos:
            self._infos[rank] = RemoteView(self._client, rank).look(commit.name, commit=commit)
        return self._infos[rank]

    @contextlib.contextmanager
    def _taken_away(self) -> Iterator[None]:
        try:
            yield
        except ObjectMissing as error:
            raise CorruptCheckpoint(f"{error}; if it was saved again meanwhile, load again") from error
