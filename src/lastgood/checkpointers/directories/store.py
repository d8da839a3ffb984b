"""The border between systems that write a checkpoint as several files, and what keeps those files.

A system opens a *draft*, lets a library write files into it, seals it, and commits it. A checkpoint exists when it is
committed, and not before. Implementation: `local` (a folder of a file system); the tests have one in memory. An object
store fits as well: nothing here renames, syncs or overwrites, a draft may be sealed by several
processes before one of them commits, and the commit can be one small object that is written last.

Needs no torch.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Protocol

from lastgood import _native
from lastgood.checkpointers.directories.manifest import MANIFEST, MOST_MANIFEST_BYTES, parse_manifest
from lastgood.errors import CorruptCheckpoint, StorageError

__all__ = ["CheckpointStore", "Draft", "StoredCheckpoint", "SummedStream", "check_name", "staged"]

_READ_BYTES = 8 << 20


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A committed checkpoint.

    The newest has the highest sequence: after a return to an earlier step, the steps of the incarnation that was given
    up are older, though their numbers are higher.
    """

    sequence: int
    step: int
    where: str
    """For people, and for the store that listed it: a path or a URL."""

    @property
    def name(self) -> str:
        """Its name among those of one store."""
        return f"checkpoint-{self.sequence:08d}-step-{self.step}"


class CheckpointStore(Protocol):
    """Keeps the newest committed checkpoints of one job (or of one rank that has a place of its own).

    One process writes at a time (the caller holds the job's lock); any process may list and read meanwhile. A name that
    a store has given is never given again, so that whatever a dead process still sends cannot reach a later checkpoint.
    All methods raise StorageError, which says what failed, where and what to do.
    """

    def prepare(self) -> None:
        """Called once, under the job's lock, before the first `begin`: remove drafts that a killed process left.

        Removes nothing that was committed, and nothing that this store has not written.
        """

    def begin(self, step: int) -> Draft:
        """Open a temporary checkpoint of `step`. Touches no storage; the draft does, when it is first written to.

        A crash from here to `commit` leaves a draft, which no `found` lists and the next `prepare` removes.
        """

    def commit(self, draft: Draft) -> int:
        """Called once, when the draft is sealed: make it the newest checkpoint; returns its bytes.

        When this returns, the checkpoint survives a power cut, if the store is durable. It appears to all readers in
        one moment and with all its files: a crash anywhere in here leaves either a draft or the checkpoint. If it
        raises, the checkpoint is not there, and the older ones are. After that, all but the newest that the store is
        to keep are removed; what cannot be removed is logged and removed later. Refuses a draft that is not sealed.
        """

    def give_up(self, draft: Draft) -> None:
        """Called when a save failed, perhaps while a library still writes: remove the draft. Never raises.

        What is written to the draft later fails, or goes nowhere. May be called twice.
        """

    def found(self) -> list[StoredCheckpoint]:
        """All committed checkpoints, newest first; none if the place is not there. Says nothing of their content."""

    def read(self, checkpoint: StoredCheckpoint, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of one file of a checkpoint that `found` listed, from `begin` on: `nbytes` of them, or all.

        Fewer if the file ends before that. The content is whatever lies there: only `parse_manifest` and the checksums
        say whether it is what was written. A checkpoint that was removed meanwhile raises StorageError.
        """

    def local_folder(self, checkpoint: StoredCheckpoint) -> contextlib.AbstractContextManager[Path]:
        """A folder of this machine with a checkpoint's files, to read until the context ends; nobody may write there.

        The files are not checked: that is `check_files`, which a caller runs before any library reads them.
        """


class Draft(ABC):
    """A checkpoint that is being written. Files come by `create`, or lie in `folder`, or both.

    Several threads may write different files at once. It goes to another process by pickle if its store can be reached
    from there; whoever writes there must seal there as well, since the sums of streams are not sent back.
    """

    def __init__(self, step: int, where: str) -> None:
        self.step = step
        self.where = where
        """Where it is written, for messages."""
        self.given_up = False
        self._sums: dict[str, tuple[int, int]] = {}
        """Bytes and CRC32C of files that came by `create` and are complete."""

    def create(self, name: str) -> SummedStream:
        """A new file of the checkpoint, by its relative path with "/". Its bytes are summed while they are written.

        It belongs to the checkpoint once it is closed without an error, and is as durable then as the store makes it.
        In a ``with`` that an exception leaves, it is dropped. Raises OSError (FileExistsError for a name that is
        there), StorageError for a draft that was given up, ValueError for a name that leads elsewhere.
        """
        check_name(name)
        self.refuse_given_up()
        return SummedStream(self._open(name), self, lambda stream: self._complete(name, stream))

    @abstractmethod
    def folder(self) -> Path:
        """A folder of this machine, for libraries that write files by themselves. Made at the first call.

        What lies there when `seal` is called belongs to the checkpoint, with all subfolders. The library need not
        flush. Raises StorageError, OSError.
        """

    @abstractmethod
    def seal(self) -> None:
        """Called once, when all files are complete: make them durable, and write the manifest.

        Files from `folder` are read back for their checksums. What is written to the draft later makes the checkpoint
        one that cannot be read. Raises StorageError, CorruptCheckpoint for a file that cannot be read back.
        """

    @abstractmethod
    def _open(self, name: str) -> io.RawIOBase:
        """Make a file. Raises OSError."""

    def _complete(self, name: str, stream: SummedStream) -> None:
        """Called by a stream that is being closed, with its bytes handed over: make them durable. Raises OSError."""
        self._sums[name] = (stream.nbytes, stream.checksum)

    def refuse_given_up(self) -> None:
        """Raise StorageError if nobody waits for these files any more."""
        if self.given_up:
            raise StorageError("given up while it was being written")


class SummedStream(io.BufferedWriter):
    """A new file of a draft that keeps count of its bytes and their CRC32C while they are written."""

    def __init__(self, raw: io.RawIOBase, draft: Draft, complete: Callable[[SummedStream], None]) -> None:
        super().__init__(raw)
        self.nbytes = 0
        self.checksum = 0
        self.failure: OSError | None = None
        """What the operating system refused; torch.save makes a RuntimeError of it that says less."""
        self._draft = draft
        self._on_close = complete

    def write(self, data: Any) -> int:
        """Write all of `data`. Raises OSError; StorageError once the draft was given up."""
        self._draft.refuse_given_up()
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.checksum = _native.crc32c(data, self.checksum)
        self.nbytes += written
        return written

    def close(self) -> None:
        """Hand over the bytes and make them durable; then the file belongs to the draft. Raises OSError."""
        if self.closed:
            return
        try:
            self.flush()
            self._on_close(self)
        except OSError as error:
            self.failure = self.failure or error
            raise
        finally:
            self.raw.close()

    def discard(self) -> None:
        """Close it; it does not belong to the draft."""
        self.raw.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # The base class would close a stream that was forgotten, and half a file would count as one.
        self.discard()


def check_name(name: str) -> None:
    """Raise ValueError for what is no relative path of a file inside a checkpoint, or is the manifest's."""
    parts = name.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\0" in name or name == MANIFEST:
        raise ValueError(f"{name!r} is no name for a file of a checkpoint")


@contextlib.contextmanager
def staged(store: CheckpointStore, checkpoint: StoredCheckpoint) -> Iterator[Path]:
    """`CheckpointStore.local_folder` for a store elsewhere: a copy of the files that the manifest names.

    It needs their bytes on the disk of temporary files. Raises CorruptCheckpoint, StorageError.
    """
    content = store.read(checkpoint, MANIFEST, 0, MOST_MANIFEST_BYTES)
    files = parse_manifest(content, f"{checkpoint.where}/{MANIFEST}", checkpoint.step)
    with tempfile.TemporaryDirectory(prefix="lastgood-") as name:
        folder = Path(name)
        (folder / MANIFEST).write_bytes(content)
        for file, (nbytes, _) in files.items():
            path = folder / PurePosixPath(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as copy:
                for begin in range(0, nbytes, _READ_BYTES):
                    piece = store.read(checkpoint, file, begin, min(_READ_BYTES, nbytes - begin))
                    if not piece:
                        raise CorruptCheckpoint(
                            f"{checkpoint.where}/{file}: {begin} bytes, and the manifest says {nbytes}"
                        )
                    copy.write(piece)
        yield folder
