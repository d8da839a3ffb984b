"""Tries in a store all that checkpoints need of it, with a few small objects of its own that it removes again."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from lastgood.errors import LastgoodError, StorageError
from lastgood.storage.objects.client import ObjectClient, ObjectExists

__all__ = ["Tried", "try_store"]

_FOLDER = "trial"
_BYTES = 4096


class Tried(NamedTuple):
    """One thing that was tried."""

    what: str
    error: str | None
    """None if it works."""


def try_store(client: ObjectClient) -> list[Tried]:
    """List, put, get, read a range, create without overwriting, and delete below the client's place.

    What depends on something that failed is not tried. Raises nothing of what is wrong with the store.
    """
    key, content = f"{_FOLDER}/{secrets.token_hex(8)}", secrets.token_bytes(_BYTES)
    found: list[Tried] = []

    def attempt(what: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except LastgoodError as error:
            found.append(Tried(what, str(error)))
            return False
        found.append(Tried(what, None))
        return True

    def compare(got: bytes, wanted: bytes) -> None:
        if got != wanted:
            raise StorageError(f"{client.where(key)}: what was read is not what was put")

    def create_again() -> None:
        try:
            client.create(key, b"another")
        except ObjectExists:
            compare(client.get(key, _BYTES), content)
            return
        raise StorageError(
            f"{client.where(key)}: the server overwrote an object that must not be overwritten (If-None-Match is not "
            "honoured); two jobs could take each other's checkpoints: use another server, or a newer version of it"
        )

    def absent() -> None:
        client.delete([key])
        if client.head(key) is not None:
            raise StorageError(f"{client.where(key)}: is still there after it was deleted")

    if not attempt("list", lambda: next(client.list(_FOLDER), None)):
        return found
    if attempt("put", lambda: client.create(key, content)):
        attempt("get", lambda: compare(client.get(key, _BYTES), content))
        attempt("get a range", lambda: compare(bytes(client.get_range(key, 100, 50)), content[100:150]))
        attempt("create only what is not there", create_again)
        attempt("delete", absent)
    return found
