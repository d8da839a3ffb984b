"""Checkpoints in the memory of this process: the second store that the conformance tests hold to the promises.

What it does not promise: nothing survives the process, or can be reached from another one (a draft that is pickled
raises CheckpointError), and there is no lock. All else is as `CheckpointStore` says.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import threading
from pathlib import Path
from typing import NoReturn, cast

from lastgood import _native
from lastgood.checkpointers.directories.manifest import MANIFEST, files_in, manifest_text
from lastgood.checkpointers.directories.store import Draft, StoredCheckpoint, SummedStream, staged
from lastgood.errors import CheckpointError, StorageError
from lastgood.files import open_regular

__all__ = ["MemoryDraft", "MemoryStore"]


class MemoryStore:
    """The newest `keep` checkpoints, as bytes. `name` is for messages."""

    def __init__(self, keep: int, name: str = "memory") -> None:
        self.keep = keep
        self._name = name
        self._lock = threading.Lock()
        self._checkpoints: dict[StoredCheckpoint, dict[str, bytes]] = {}
        self._drafts: list[MemoryDraft] = []

    def prepare(self) -> None:
        """Give up the drafts that nobody has committed."""
        for draft in list(self._drafts):
            self.give_up(draft)

    def begin(self, step: int) -> MemoryDraft:
        """An empty draft."""
        draft = MemoryDraft(step, f"{self._name}/step-{step}")
        self._drafts.append(draft)
        return draft

    def commit(self, draft: Draft) -> int:
        """Keep the files of the draft under a new sequence."""
        assert isinstance(draft, MemoryDraft)
        draft.refuse_given_up()
        if MANIFEST not in draft.files:
            raise StorageError(f"{draft.where}: has no manifest, so it is not complete; seal() comes before commit()")
        with self._lock:
            sequence = max((known.sequence for known in self._checkpoints), default=0) + 1
            unnamed = StoredCheckpoint(sequence, draft.step, "")
            stored = StoredCheckpoint(sequence, draft.step, f"{self._name}/{unnamed.name}")
            files = dict(draft.files)
            kept = sorted([*self._checkpoints, stored])[-self.keep :]
            self._checkpoints = {one: files if one is stored else self._checkpoints[one] for one in kept}
        self.give_up(draft)
        return sum(map(len, files.values()))

    def give_up(self, draft: Draft) -> None:
        """Forget the draft's files."""
        assert isinstance(draft, MemoryDraft)
        draft.given_up = True
        if draft in self._drafts:
            self._drafts.remove(draft)
        draft.end()

    def found(self) -> list[StoredCheckpoint]:
        """Those that are kept."""
        return sorted(self._checkpoints, reverse=True)

    def read(self, checkpoint: StoredCheckpoint, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        """A copy of bytes that are kept."""
        try:
            content = self._checkpoints[checkpoint][name]
        except KeyError:
            raise StorageError(f"{checkpoint.where}/{name}: is not there; was the checkpoint removed?") from None
        return content[begin:] if nbytes is None else content[begin : begin + nbytes]

    def local_folder(self, checkpoint: StoredCheckpoint) -> contextlib.AbstractContextManager[Path]:
        """Copies of the files in a temporary folder."""
        return staged(self, checkpoint)


class MemoryDraft(Draft):
    """Files as bytes, and a temporary folder for libraries that need one."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__(step, where)
        self.files: dict[str, bytes] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def folder(self) -> Path:
        """A temporary folder, which `seal` reads."""
        self.refuse_given_up()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lastgood-", ignore_cleanup_errors=True)
        return Path(self._folder.name)

    def seal(self) -> None:
        """Take the files of the folder, and make the manifest."""
        self.refuse_given_up()
        found = {} if self._folder is None else files_in(Path(self._folder.name))
        for name, path in found.items():
            if name in self.files:
                raise StorageError(f"{self.where}: {name} was written twice, as a stream and as a file")
            with os.fdopen(open_regular(path), "rb") as file:
                self.files[name] = content = file.read()
            self._sums[name] = (len(content), _native.crc32c(content))
        self.files[MANIFEST] = manifest_text(self.step, self._sums)

    def end(self) -> None:
        """Give the memory and the folder back."""
        self.files = {}
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _open(self, name: str) -> io.RawIOBase:
        if name in self.files:
            raise FileExistsError(f"{self.where}/{name}")
        return cast(io.RawIOBase, io.BytesIO())

    def _complete(self, name: str, stream: SummedStream) -> None:
        self.files[name] = cast(io.BytesIO, stream.raw).getvalue()
        super()._complete(name, stream)

    def __reduce__(self) -> NoReturn:
        raise CheckpointError(f"{self.where}: is in the memory of this process; write in a thread of it instead")
