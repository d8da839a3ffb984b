"""Where the suite keeps checkpoints: a folder, or what lies below a URL of a bucket. Needs no torch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lastgood.errors import ConfigError
from lastgood.files import entries_of, storage_errors, write_result
from lastgood.locations import Location
from lastgood.models import FrozenModel
from lastgood.storage.objects.client import ObjectClient, ObjectInfo, ObjectMissing
from lastgood.storage.objects.opening import open_objects
from lastgood.storage.objects.s3 import S3Options, parse_s3
from lastgood.text import read_bytes

__all__ = ["BucketPlace", "FolderPlace", "S3Access", "SuitePlace", "open_place"]

_FIRST = (".metadata", "model.safetensors.index.json", "commits")
"""What a checkpoint is known by, and what goes first, so that no half is taken for one."""


class S3Access(FrozenModel):
    """How a bucket is reached. Keys come from the environment, or the files of the AWS command line, of each rank."""

    region: str | None = None
    endpoint_url: str | None = None

    def options(self) -> S3Options:
        """For Lastgood's own client. Raises ConfigError."""
        return S3Options(region=self.region, endpoint_url=self.endpoint_url)


class SuitePlace(Protocol):
    """Files or objects by name. `str` of it is its path or URL. All calls raise StorageError."""

    def below(self, *names: str) -> SuitePlace:
        """A place in this one."""

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """A file's content; None if there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file, at once."""

    def holding(self, name: str) -> list[str]:
        """The places directly below this one that have a file of that name, by its age, the oldest first."""

    def sizes(self) -> list[int]:
        """Bytes of all files in it."""

    def remove(self) -> None:
        """Remove all that is in it, first what says that it is a checkpoint."""


@dataclass(frozen=True)
class FolderPlace:
    """A `SuitePlace` on a file system."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def below(self, *names: str) -> FolderPlace:
        """As `SuitePlace.below`, as all that follow."""
        return FolderPlace(self.path.joinpath(*names))

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """A link is followed."""
        path = self.path / name
        return read_bytes(path, most_bytes) if path.is_file() else None

    def write(self, name: str, content: bytes) -> None:
        """It is flushed."""
        write_result(self.path / name, content)

    def holding(self, name: str) -> list[str]:
        """In a folder that is not there, none."""
        if not self.path.is_dir():
            return []
        found = [entry / name for entry in entries_of(self.path) if (entry / name).is_file()]
        return [path.parent.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]

    def sizes(self) -> list[int]:
        """Of folders in it as well."""
        with storage_errors(self.path, "looking at the files"):
            return [path.stat().st_size for path in self.path.rglob("*") if path.is_file()]

    def remove(self) -> None:
        """The folder as well."""
        for name in _FIRST:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class BucketPlace:
    """A `SuitePlace` below a URL; a client is made for each call."""

    url: str
    access: S3Access

    def __str__(self) -> str:
        return self.url

    def below(self, *names: str) -> BucketPlace:
        """As `SuitePlace.below`, as all that follow."""
        return BucketPlace("/".join((self.url.rstrip("/"), *names)), self.access)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """One object."""
        with self._client() as client:
            try:
                return client.get(name, most_bytes)
            except ObjectMissing:
                return None

    def write(self, name: str, content: bytes) -> None:
        """One object."""
        with self._client() as client:
            client.put(name, content)

    def holding(self, name: str) -> list[str]:
        """All keys are listed, a thousand with each request."""
        found = [info for info in self._listed() if info.key.count("/") == 1 and info.key.rpartition("/")[2] == name]
        return [info.key.partition("/")[0] for info in sorted(found, key=lambda info: (info.modified_s, info.key))]

    def sizes(self) -> list[int]:
        """Of objects."""
        return [info.nbytes for info in self._listed()]

    def remove(self) -> None:
        """Objects whose names come first go first."""
        with self._client() as client:
            keys = [info.key for info in self._listed()]
            first = [key for key in keys if key.partition("/")[0] in _FIRST]
            client.delete(first)
            client.delete([key for key in keys if key not in set(first)])

    def _listed(self) -> Sequence[ObjectInfo]:
        bucket, prefix = parse_s3(self.url)
        folder, _, last = prefix.rpartition("/")
        top = f"s3://{bucket}/{folder}".rstrip("/")
        with contextlib.closing(open_objects(top, self.access.options())) as client:
            return [info._replace(key=info.key.removeprefix(f"{last}/")) for info in client.list(last)]

    @contextlib.contextmanager
    def _client(self) -> Iterator[ObjectClient]:
        client = open_objects(self.url, self.access.options())
        try:
            yield client
        finally:
            client.close()


def open_place(text: str, access: S3Access | None = None) -> FolderPlace | BucketPlace:
    """What ``--uri`` names: a folder, file://FOLDER, or s3://BUCKET/PREFIX. Raises ConfigError."""
    access = access or S3Access()
    try:
        location = Location.parse(text.removeprefix("file://"))
        if location.scheme == "s3":
            if not parse_s3(location)[1]:
                raise ConfigError(f"{text}: has a bucket and no prefix: s3://BUCKET/PREFIX")
            access.options()
            return BucketPlace(str(location).rstrip("/"), access)
        place = FolderPlace(location.path)
    except ConfigError as error:
        raise ConfigError(f"--uri {error}") from error
    for flag, value in (("--region", access.region), ("--endpoint-url", access.endpoint_url)):
        if value is not None:
            raise ConfigError(f"{flag} beside the folder {text}: a folder has none")
    return place
