"""From what a user named to a client: a bucket by its URL, or a folder."""

from __future__ import annotations

from pathlib import Path

from lastgood.locations import Location
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.s3 import S3Client, S3Options

__all__ = ["holds_objects", "open_objects"]

_KINDS = (objects.COMMITS, objects.MANIFESTS, objects.SEGMENTS)


def holds_objects(location: Location) -> bool:
    """Whether checkpoints are objects there: at s3://, or in a folder that looks like a bucket of them.

    Raises ConfigError for other URLs.
    """
    return location.scheme == "s3" or all((location.path / kind).is_dir() for kind in _KINDS)


def open_objects(place: Path | str | Location, options: S3Options | None = None) -> ObjectClient:
    """The objects at s3://BUCKET/PREFIX, or in a folder of this machine; the caller closes it.

    Touches no storage but for making the folder. Raises ConfigError for other URLs and for options that cannot work,
    StorageError.
    """
    location = Location.parse(place)
    if location.scheme == "s3":
        return S3Client(location, options)
    return FolderClient(location.path)
