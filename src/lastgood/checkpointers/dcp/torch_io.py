"""Lastgood's writer for torch.distributed.checkpoint. Imports torch; the checkpointer imports it at work.

What DCP's FileSystemWriter leaves out, in torch 2.9 to 2.14, and this one adds: an error in any but the first of its
threads fails the save (DCP prints it and commits the rest); the file is flushed before it is synced (DCP up to 2.11
syncs first, and the last bytes reach the disk later); a manifest with lengths and checksums. What it writes is
read by dcp_reader.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lastgood import _native
from lastgood.checkpointers.directories.store import MANIFEST, manifest_text
from lastgood.errors import StorageError
from lastgood.files import storage_error

__all__ = ["KeptStager", "ManifestWriter", "first_cause"]

# Each process saves a state of its own here, and DCP's threads would say each time that this is so.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


# -- writing -----------------------------------------------------------------------------------------------------------


class _KeptCopies(StateDictStager):
    """The part of a stager that copies, and keeps the memory of the copies until `end`."""

    def close(self) -> None:
        """Called by DCP; does nothing."""

    def end(self) -> None:
        """Give the memory back."""
        super().close()  # type: ignore[no-untyped-call]


class KeptStager(DefaultStager):
    """DCP's stager, which keeps its memory from save to save, until `end`.

    torch 2.11 closes what copies behind each copy, and the stager behind each save, also one that it was given; the
    next save then fails with ``KeyError: type``.
    """

    def __init__(self, config: StagingOptions) -> None:
        super().__init__(config)
        self._kept = _KeptCopies(pin_memory=config.use_pinned_memory, share_memory=config.use_shared_memory)
        self._state_dict_stager = self._kept

    def close(self) -> None:
        """Called by DCP; does nothing."""

    def end(self) -> None:
        """Give the memory back."""
        super().close()
        self._kept.end()


class _SummedFile(io.BufferedWriter):
    """A new file that keeps count of its bytes and their CRC32C while they are written."""

    def __init__(self, path: Path, owner: _SummedFiles) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.nbytes = 0
        self.checksum = 0
        self.failure: OSError | None = None
        """What the operating system refused; torch.save makes a RuntimeError of it that says less."""
        self._owner = owner

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        self._owner.check()
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.checksum = _native.crc32c(data, self.checksum)
        self.nbytes += written
        return written

    def fileno(self) -> int:
        """The descriptor, with all bytes written handed to it: DCP asks for it only to sync."""
        self.flush()
        return super().fileno()


class _SummedFiles(FileSystem):
    """DCP's view of the file system, with files that are summed, and failures that are not lost."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}
        self.failures: list[Exception] = []
        self.given_up = False

    def check(self) -> None:
        """Raise StorageError if nobody waits for these files any more."""
        if self.given_up:
            raise StorageError("given up while it was being written")

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A file to write. An error inside is noted and goes no further: DCP's threads would only print it."""
        path = Path(path)
        if mode != "wb":
            raise ValueError(f"{path}: opened with mode {mode}, not for a new file")
        stream: _SummedFile | None = None
        try:
            self.check()
            stream = _SummedFile(path, self)
            yield stream
            stream.close()
            self.files[path.name] = (stream.nbytes, stream.checksum)
        except Exception as error:
            cause = (stream and stream.failure) or error
            self.failures.append(storage_error(cause, path, "writing") if isinstance(cause, OSError) else cause)
            if stream is None:
                raise
        finally:
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class ManifestWriter(FileSystemWriter):
    """FileSystemWriter that fails when a part of it fails, and writes a manifest last. One for each checkpoint."""

    def __init__(self, path: Path, step: int, threads: int) -> None:
        super().__init__(path, sync_files=True, thread_count=threads)
        self._directory = path
        self._step = step
        self._files = _SummedFiles()
        self.fs = self._files

    def give_up(self) -> None:
        """Make the next write fail. Works in the process that writes."""
        self._files.given_up = True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all files. Raises StorageError if one of DCP's threads could not."""
        results = super().write_data(plan, planner)
        self._raise_failure()
        written = len(results.value())
        if written != len(plan.items):
            raise StorageError(f"{self.path}: {written} of {len(plan.items)} tensors written; a writer thread died")
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write DCP's metadata and the manifest."""
        super().finish(metadata, results)
        self._raise_failure()
        files = dict(self._files.files)
        files[".metadata"] = files.pop(".metadata.tmp")
        with self._files.create_stream(self._directory / MANIFEST, "wb") as stream:
            stream.write(manifest_text(self._step, files))
            os.fsync(stream.fileno())
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._files.failures:
            raise self._files.failures[0]


# -- errors ------------------------------------------------------------------------------------------------------------


def first_cause(error: BaseException) -> BaseException:
    """What went wrong inside DCP, without the wrapper that it puts around failures of ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        return first_cause(next(iter(error.failures.values()))[0])
    return error
