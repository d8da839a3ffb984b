"""What a user named as a checkpoint's place: a folder, or s3://BUCKET/PREFIX."""

from __future__ import annotations

import os
from pathlib import Path

from lastgood.errors import ConfigError
from lastgood.locations import Location
from lastgood.storage.objects.s3 import S3Options, parse_s3

__all__ = ["check_options", "folder_of", "is_place", "parse_place"]


def parse_place(place: str | os.PathLike[str]) -> Location:
    """The folder or URL. Raises ConfigError for a URL of another kind, and for one that names no bucket."""
    location = Location.parse(place if isinstance(place, Path) else os.fspath(place))
    if location.scheme == "s3":
        parse_s3(location)
    elif location.scheme != "file":
        raise ConfigError(
            f"{location}: Lastgood's DCP writer and reader know folders and s3://BUCKET/PREFIX; use a DCP storage that "
            "knows this URL"
        )
    return location


def is_place(place: str | os.PathLike[str]) -> bool:
    """Whether `parse_place` takes it."""
    try:
        parse_place(place)
    except ConfigError:
        return False
    return True


def check_options(who: str, place: Location, s3: S3Options | None) -> None:
    """Raise ConfigError for options of a bucket beside a folder."""
    if s3 is not None and place.scheme != "s3":
        raise ConfigError(f"{who}: s3= is for s3://BUCKET/PREFIX, and {place} is a folder")


def folder_of(place: Location) -> Path:
    """The folder itself, where a link leads to it. Raises ConfigError for a URL."""
    path = place.path
    return path.resolve() if path.is_symlink() else path
