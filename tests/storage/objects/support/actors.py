"""Threads of which one runs at a time, from one call of the store to the next: every interleaving can be played."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from lastgood.storage.objects import sweep, upload
from lastgood.storage.objects.client import ObjectClient, ObjectInfo
from lastgood.storage.objects.folder import FolderClient

WAIT_S = 60.0


class Clock:
    """The server's."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class ListableFolder(FolderClient):
    """Lists as a bucket does, in one call."""

    def _listed(self, folder: str, after: str) -> list[ObjectInfo]:
        return list(super().list(folder, after))


@contextmanager
def names_of(seed: int) -> Iterator[None]:
    """Names of notes that follow from a seed. Their order decides which of two notes is read or removed first."""
    chance = random.Random(seed)
    drawn = SimpleNamespace(token_hex=lambda nbytes: chance.randbytes(nbytes).hex())
    with mock.patch.object(upload, "secrets", drawn), mock.patch.object(sweep, "secrets", drawn):
        yield


class Killed(BaseException):
    """What ends an actor, wherever it is."""


class Actor:
    """Runs `work(client)` until its next call of the store, each time it is let go on."""

    def __init__(self, label: str, client: ObjectClient, work: Callable[[ObjectClient], None]) -> None:
        self.label = label
        self.over = False
        self.failure: Exception | None = None
        self.pending = ""
        """The call that it is about to make: its method and what its key begins with."""
        self._kill = False
        self._turn = threading.Semaphore(0)
        self._rest = threading.Semaphore(0)
        self._work = work
        self._client = SteppedClient(client, self)
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)
        self._thread.start()
        self._await()

    def go(self) -> None:
        """One more call of the store."""
        if not self.over:
            self._turn.release()
            self._await()

    def go_to(self, *stops: str) -> None:
        """Go on until it is about to make such a call; to its end if that never comes."""
        while not self.over and self.pending not in stops:
            self.go()

    def kill(self, *, after: bool) -> None:
        """End it, before its next call, or when that has had its effect and before it knows."""
        if self.over:
            return
        if after:
            self._client.die_after = True
        else:
            self._kill = True
        self.go()
        assert self.over

    def step(self, pending: str) -> None:
        """Called by its thread before each call."""
        self.pending = pending
        self._rest.release()
        if not self._turn.acquire(timeout=10 * WAIT_S) or self._kill:
            raise Killed

    def _await(self) -> None:
        assert self._rest.acquire(timeout=WAIT_S), f"{self.label} does not come back"

    def _run(self) -> None:
        try:
            self._work(self._client)
        except Killed:
            pass
        except Exception as error:
            self.failure = error
        finally:
            self.over = True
            self._rest.release()


class SteppedClient:
    """A client that asks its actor before each call."""

    def __init__(self, client: ObjectClient, actor: Actor) -> None:
        self._client = client
        self._actor = actor
        self.die_after = False

    @property
    def place(self) -> str:
        return self._client.place

    def where(self, key: str) -> str:
        return self._client.where(key)

    def _call(self, method: str, *arguments):
        first = arguments[0][0] if method == "delete" else arguments[0]
        self._actor.step(f"{method.strip('_')} {first.partition('/')[0]}")
        try:
            return getattr(self._client, method)(*arguments)
        finally:
            if self.die_after:
                raise Killed

    def create(self, key: str, content) -> None:
        self._call("create", key, content)

    def put(self, key: str, content) -> None:
        self._call("put", key, content)

    def get(self, key: str, most_bytes: int) -> bytes:
        return self._call("get", key, most_bytes)

    def get_range(self, key: str, begin: int, nbytes: int) -> memoryview:
        return self._call("get_range", key, begin, nbytes)

    def head(self, key: str) -> ObjectInfo | None:
        return self._call("head", key)

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        return iter(self._call("_listed", folder, after))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # a bulk delete may be cut short anywhere
            self._call("delete", [key])

    def close(self) -> None:
        pass
