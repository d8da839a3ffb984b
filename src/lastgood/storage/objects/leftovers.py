"""What saves that nobody goes on with have left at a place, of Lastgood and of other tools; and removing it.

- Uploads in several parts that were neither completed nor aborted (of other tools: Lastgood makes none).
- Below each prefix with checkpoints as objects: segments and manifests that no checkpoint and no living upload needs.
- Folders of torch's distributed checkpoint (DCP) with files of ranks and without metadata: nothing can load them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from lastgood.errors import CheckpointError, ConfigError
from lastgood.locations import Location
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.control import OpenUpload, S3Control
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.storage.objects.sweep import server_time, sweep
from lastgood.storage.objects.upload import BEAT_S

__all__ = ["LEAST_GUARD_S", "Leftover", "Leftovers", "clean"]

LEAST_GUARD_S = 2 * BEAT_S
"""Lastgood's own uploads give a sign of life each hour; none is taken for dead before."""
_OURS = re.compile(
    r"(?:(.*)/)?(?:(?:commits|retired|verdicts)/[0-9a-f]{32}/[0-9]{20}-[0-9]{20}"
    r"|uploads/[0-9a-f]{32}/[0-9]{20}-[0-9]{20}/[0-9]{7}-[0-9a-f]{16}"
    r"|(?:segments|manifests)/[0-9a-f]{2}/[0-9a-f]{16}-[0-9a-f]{64})",
    re.DOTALL,
)
_OF_DCP = re.compile(r"__[0-9]+_[0-9]+[^/]*\.(?:distcp|lgs)|lastgood-manifest-[0-9a-f]{16}\.json")
_METADATA = re.compile(r"(?:__[0-9]+)?\.metadata")
"""One for all ranks, or one of each."""

Kind = Literal["multipart upload", "objects without a checkpoint", "half DCP checkpoint"]


@dataclass(frozen=True)
class Leftover:
    """One thing that was left."""

    kind: Kind
    where: str
    objects: int
    nbytes: int
    age_s: float
    """Of the newest byte of it; of objects without a checkpoint, of the oldest one."""
    spared: str = ""
    """Why it stays; "" if it goes."""


@dataclass
class Leftovers:
    """What was found, and removed if that was asked for."""

    found: list[Leftover] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """What could not be looked at, or not be removed."""


@dataclass
class _Folder:
    objects: int = 0
    nbytes: int = 0
    newest_s: float = 0.0
    complete: bool = False


def clean(place: ObjectPlace, *, older_s: float, remove: bool) -> Leftovers:
    """Look for what was left below `place`, and `remove` what is older than `older_s` and has no living writer.

    Ages are by the server's clock, for which one object is put and taken away. Raises ConfigError for a folder that is
    not there, StorageError if the place cannot be listed.
    """
    location = Location.parse(place.place)
    if location.scheme != "s3" and not location.path.is_dir():
        raise ConfigError(f"{place}: there is no such folder")
    with contextlib.ExitStack() as opened:
        client = place.open()
        opened.callback(client.close)
        control = opened.enter_context(S3Control(location, place.options)) if location.scheme == "s3" else None
        work = _Work(place, client, control, server_time(client), older_s, remove)
        work.uploads()
        roots, folders = work.walk()
        for root in sorted(roots):
            work.sweep_below(root)
        for name, folder in sorted(folders.items()):
            if folder.objects and not folder.complete:
                work.half_dcp(name, folder)
        return work.report


class _Work:
    def __init__(
        self,
        place: ObjectPlace,
        client: ObjectClient,
        control: S3Control | None,
        now_s: float,
        older_s: float,
        remove: bool,
    ) -> None:
        self.report = Leftovers()
        self._place, self._client, self._control = place, client, control
        self._now_s, self._older_s, self._remove = now_s, older_s, remove
        self._open: list[OpenUpload] = []

    def _young(self, modified_s: float) -> str:
        return "" if self._now_s - modified_s > self._older_s else "it is young"

    @contextlib.contextmanager
    def _troubles(self, what: str) -> Iterator[None]:
        """What one thing refuses is told, and the others are looked at all the same."""
        try:
            yield
        except CheckpointError as error:
            self.report.troubles.append(f"{what}: {error}")

    def uploads(self) -> None:
        """Multipart uploads below the place."""
        if self._control is None:
            return
        with self._troubles("multipart uploads"):
            self._open = list(self._control.open_uploads())
            for one in self._open:
                spared = self._young(one.begun_s)
                where = f"s3://{self._control.bucket}/{one.key}"
                age_s = self._now_s - one.begun_s
                self.report.found.append(Leftover("multipart upload", where, 1, one.nbytes, age_s, spared))
            if self._remove:
                self._control.abort([one for one in self._open if not self._young(one.begun_s)])

    def walk(self) -> tuple[set[str], dict[str, _Folder]]:
        """Prefixes with checkpoints as objects, and folders with files of DCP; "" is the place itself."""
        roots: set[str] = set()
        folders: dict[str, _Folder] = {}
        for info in self._client.list(""):
            ours = _OURS.fullmatch(info.key)
            if ours is not None:
                roots.add(ours[1] or "")
                continue
            parent, _, name = info.key.rpartition("/")
            if _METADATA.fullmatch(name):
                folders.setdefault(parent, _Folder()).complete = True
            elif _OF_DCP.fullmatch(name):
                folder = folders.setdefault(parent, _Folder())
                folder.objects += 1
                folder.nbytes += info.nbytes
                folder.newest_s = max(folder.newest_s, info.modified_s)
        return roots, folders

    def sweep_below(self, root: str) -> None:
        """Objects that no checkpoint needs."""
        where = f"{self._place.place.rstrip('/')}/{root}".rstrip("/")
        with self._troubles(where):
            client = replace(self._place, place=where).open()
            try:
                # What was taken away stays readable for its time, whatever is asked for.
                swept = sweep(client, guard_s=max(self._older_s, LEAST_GUARD_S), dry_run=not self._remove)
            finally:
                client.close()
            kind: Kind = "objects without a checkpoint"
            objects = swept.segments + swept.manifests
            if objects:
                self.report.found.append(Leftover(kind, where, objects, swept.freed_bytes, swept.oldest_s))
            if swept.spared_bytes:
                why = "young, or of an upload in progress"
                self.report.found.append(Leftover(kind, where, 0, swept.spared_bytes, 0.0, why))

    def half_dcp(self, name: str, folder: _Folder) -> None:
        """A folder with files of ranks, and no metadata."""
        where = self._client.where(name) if name else self._client.place
        spared = self._young(folder.newest_s)
        if any(self._is_below(one.key, name) and self._young(one.begun_s) for one in self._open):
            spared = "a file of it is being uploaded"
        age_s = self._now_s - folder.newest_s
        self.report.found.append(Leftover("half DCP checkpoint", where, folder.objects, folder.nbytes, age_s, spared))
        if self._remove and not spared:
            with self._troubles(where):
                self._remove_dcp(name)

    def _remove_dcp(self, name: str) -> None:
        below = [info for info in self._client.list(name) if info.key.rpartition("/")[0] == name]
        names = {info.key: info.key.rpartition("/")[2] for info in below}
        if any(_METADATA.fullmatch(one) for one in names.values()):
            return  # it is complete by now
        self._client.delete(
            [info.key for info in below if _OF_DCP.fullmatch(names[info.key]) and not self._young(info.modified_s)]
        )

    def _is_below(self, key: str, name: str) -> bool:
        prefix = "" if self._control is None else self._control.prefix
        return key.startswith("/".join(part for part in (prefix, name) if part) + "/")
