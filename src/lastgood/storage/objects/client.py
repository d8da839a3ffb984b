"""The border to a store of objects: put, get, list and delete by key, with the semantics of S3.

Implementations: `folder` (the oracle of the tests, and stores on a file system) and `s3`. All of them are safe to use
from several threads. They raise StorageError, which names the object, the cause and what to do, and never a credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lastgood.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MOST_KEY_BYTES", "ObjectClient", "ObjectExists", "ObjectInfo", "ObjectMissing", "check_key"]

MOST_KEY_BYTES = 1024
"""Of a key with all prefixes, in UTF-8: S3's own limit."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class ObjectExists(StorageError):
    """`create` found an object under its key: another writer's, or this one's if the answer to a first try was lost."""


class ObjectMissing(StorageError):
    """There is no object under the key."""


class ObjectInfo(NamedTuple):
    """What a listing says of an object."""

    key: str
    nbytes: int
    modified_s: float
    """When it was put, in seconds since 1970 by the clock of the server, in steps of one second."""


class ObjectClient(Protocol):
    """Objects below one place, by keys relative to it.

    What was put is seen by every later get, head and list of anybody. An object appears complete or not at all.
    """

    @property
    def place(self) -> str:
        """Where the objects are, for messages: a URL or a folder."""

    def where(self, key: str) -> str:
        """One object, for messages."""

    def create(self, key: str, *content: Buffer) -> None:
        """Make an object that must not be there yet, of the bytes of `content` one after another.

        Raises ObjectExists, StorageError.

        After any other error the object may be there or not: `create` again, or read it back.
        """

    def put(self, key: str, content: Buffer) -> None:
        """Make or replace a small object. Raises StorageError."""

    def get(self, key: str, most_bytes: int) -> bytes:
        """A whole object. Raises ObjectMissing, and StorageError for one of more than `most_bytes`."""

    def get_range(self, key: str, begin: int, nbytes: int) -> memoryview:
        """`nbytes` (more than 0) of an object; never fewer. Raises ObjectMissing, StorageError."""

    def head(self, key: str) -> ObjectInfo | None:
        """What is known of an object; None if there is none. Raises StorageError."""

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose keys begin with ``folder/`` ("": all), in the order of their keys; or those after `after`.

        However many there are, a page of them is held at a time. Raises StorageError while it is iterated.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. What is not there is no error. Raises StorageError, with some of them removed."""

    def close(self) -> None:
        """Give back connections. Safe to call twice."""


def check_key(key: str, place: str) -> str:
    """A key that every store takes. Raises ConfigError for one that leads elsewhere, or that S3 does not take."""
    parts = key.split("/")
    if not all(parts) or {".", ".."} & set(parts) or _CONTROL.search(key):
        raise ConfigError(
            f"{place}: {key[:200]!r} is no name of an object: empty parts, '.', '..' and control "
            "characters have no place in it"
        )
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: {key[:200]!r} is no name of an object: {error.reason}") from None
    if size > MOST_KEY_BYTES:
        raise ConfigError(f"{place}: a key of {size} bytes; S3 takes {MOST_KEY_BYTES}, use a shorter prefix")
    return key
