"""From what a user named to a client: a bucket by its URL, or a folder."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import ConfigError
from lastgood.extras import why_missing
from lastgood.locations import Location
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.s3 import S3Client, S3Options, parse_s3

__all__ = ["ObjectPlace", "holds_objects", "open_objects"]

_KINDS = (objects.COMMITS, objects.MANIFESTS, objects.SEGMENTS)


def holds_objects(location: Location) -> bool:
    """Whether checkpoints are objects there: at s3://, or in a folder that looks like a bucket of them.

    Raises ConfigError for other URLs.
    """
    return location.scheme == "s3" or all((location.path / kind).is_dir() for kind in _KINDS)


@dataclass(frozen=True)
class ObjectPlace:
    """Where objects are and how they are reached. It may be written down: keys come from the environment or a profile.

    Args:
        place: s3://BUCKET/PREFIX, or a folder.
        region, endpoint_url, profile: as in `S3Options`.

    Raises ConfigError for what cannot be, which repeats nothing that may be a key.
    """

    place: str
    region: str | None = None
    endpoint_url: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        bucket = self.place.partition("://")[2].partition("/")[0]
        if "@" in bucket:
            raise ConfigError(
                "a place for checkpoints holds a user or a key, and places are written down; give keys in the "
                "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in a profile"
            )
        location = Location.parse(self.place)
        if location.scheme == "s3":
            parse_s3(location)
            self.options  # noqa: B018 - it refuses what cannot be
        else:
            location.path  # noqa: B018 - it refuses other URLs

    def __str__(self) -> str:
        """For messages."""
        return self.place

    @property
    def needs(self) -> str | None:
        """What must be installed to reach it, as one sentence that says how; None if nothing is missing."""
        if Location.parse(self.place).scheme != "s3" or importlib.util.find_spec("obstore") is not None:
            return None
        return why_missing(ModuleNotFoundError(name="obstore"), self.place)

    def open(self) -> ObjectClient:
        """A client for this process, and no fork of it; the caller closes it. Raises as `open_objects` does."""
        return open_objects(self.place, self.options)

    @property
    def options(self) -> S3Options:
        """How a bucket is reached."""
        return S3Options(region=self.region, endpoint_url=self.endpoint_url, profile=self.profile)


def open_objects(place: Path | str | Location, options: S3Options | None = None) -> ObjectClient:
    """The objects at s3://BUCKET/PREFIX, or in a folder of this machine; the caller closes it.

    Touches no storage but for making the folder. Raises ConfigError for other URLs and for options that cannot work,
    StorageError.
    """
    location = Location.parse(place)
    if location.scheme == "s3":
        return S3Client(location, options)
    return FolderClient(location.path)
