"""Where checkpoints are: a folder of this machine, or a URL, which stays as it was written."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import ConfigError

__all__ = ["Location"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_FOLDER = "file"


@dataclass(frozen=True)
class Location:
    """Made by `parse`, once, where a user's text comes in. `str()` of it is that text, or the folder's full path."""

    scheme: str
    """``file`` for a folder; else a URL's, in small letters."""
    text: str

    @classmethod
    def parse(cls, place: Path | str | Location) -> Location:
        """What a user named. A relative path is taken from where the process is now, and stays there (`os.chdir`).

        Raises ConfigError for a URL in a Path, which has lost a slash of it (``Path("s3://b/j")`` is ``s3:/b/j``), and
        for one of a file: folders are named by their path.
        """
        if isinstance(place, Location):
            return place
        text = os.fspath(place)
        url = _URL.match(text)
        if url is None:
            return cls(_FOLDER, str(Path(text).absolute()))
        location = cls(url[1].lower(), text)
        if isinstance(place, Path) or location.scheme == _FOLDER:
            raise location.refusal()
        return location

    def __str__(self) -> str:
        return self.text

    @property
    def path(self) -> Path:
        """The folder. Raises ConfigError for a URL."""
        if self.scheme != _FOLDER:
            raise self.refusal()
        return Path(self.text)

    def refusal(self) -> ConfigError:
        """For whoever cannot use this location."""
        return ConfigError(
            f"{self}: is a URL, and a directory of this machine is needed here; of URLs only s3:// is known, and only "
            "by what reads checkpoints in a bucket or sends them there"
        )
