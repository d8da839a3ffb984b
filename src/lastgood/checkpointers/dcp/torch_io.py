"""Lastgood's writer for torch.distributed.checkpoint. Imports torch; the checkpointer imports it at work.

What DCP's FileSystemWriter leaves out, in torch 2.9 to 2.14, and this one adds: an error in any but the first of its
threads fails the save (DCP prints it and commits the rest); the file is flushed before it is synced (DCP up to 2.11
syncs first, and the last bytes reach the disk later); a manifest with lengths and checksums. It writes through
streams of a draft, so to any store. What it writes is read by reader.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lastgood.checkpointers.directories.store import Draft, SummedStream
from lastgood.errors import StorageError
from lastgood.files import storage_error

__all__ = ["DraftWriter", "KeptStager", "first_cause"]

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
    """DCP's stager, which keeps its memory from save to save, until `end`, and copies all before save() goes on.

    torch 2.11 closes what copies after each copy, and the stager after each save, also one that it was given; the
    next save then fails with ``KeyError: type``.
    """

    def __init__(self, devices: Sequence[torch.device], *, pinned: bool, shared: bool) -> None:
        config = StagingOptions(
            use_pinned_memory=pinned and bool(devices),
            use_shared_memory=shared,
            use_async_staging=False,
            # After copies that do not block, DCP waits for the current device only.
            use_non_blocking_copy=pinned and len(devices) == 1,
        )
        super().__init__(config)
        self._kept = _KeptCopies(pin_memory=config.use_pinned_memory, share_memory=config.use_shared_memory)
        self._state_dict_stager = self._kept

    def close(self) -> None:
        """Called by DCP; does nothing."""

    def end(self) -> None:
        """Give the memory back."""
        super().close()
        self._kept.end()


class _DraftFiles(FileSystem):
    """DCP's view of a draft: its files are streams of the draft, and failures are not lost.

    DCP writes its metadata under a temporary name and renames it; the draft as a whole is temporary here.
    """

    def __init__(self, draft: Draft) -> None:
        self.failures: list[Exception] = []
        self._draft = draft

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A file to write. An error inside is noted and goes no further: DCP's threads would only print it."""
        path = Path(path)
        if mode != "wb":
            raise ValueError(f"{path}: opened with mode {mode}, not for a new file")
        stream: SummedStream | None = None
        try:
            stream = self._draft.create(path.name.removesuffix(".tmp"))
            yield stream
            stream.close()
        except Exception as error:
            cause = (stream and stream.failure) or error
            self.failures.append(storage_error(cause, path, "writing") if isinstance(cause, OSError) else cause)
            if stream is None:
                raise
        finally:
            if stream is not None:
                stream.discard()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The draft makes what it needs."""
        del path

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """A draft begins empty."""
        del path
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The file has its final name."""
        del path, new_path


class DraftWriter(FileSystemWriter):
    """FileSystemWriter that fails when a part of it fails, and seals the draft last. One for each checkpoint."""

    def __init__(self, draft: Draft, threads: int) -> None:
        super().__init__(draft.where, sync_files=False, thread_count=threads)  # streams of a draft do it
        self._draft = draft
        self._files = _DraftFiles(draft)
        self.fs = self._files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all files. Raises StorageError if one of DCP's threads could not."""
        results = super().write_data(plan, planner)
        self._raise_failure()
        written = len(results.value())
        if written != len(plan.items):
            raise StorageError(f"{self.path}: {written} of {len(plan.items)} tensors written; a writer thread died")
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write DCP's metadata, and seal."""
        super().finish(metadata, results)
        self._raise_failure()
        self._draft.seal()

    def _raise_failure(self) -> None:
        if self._files.failures:
            raise self._files.failures[0]


# -- errors ------------------------------------------------------------------------------------------------------------


def first_cause(error: BaseException) -> BaseException:
    """What went wrong inside DCP, without the wrapper that it puts around failures of ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        return first_cause(error.failures[min(error.failures)][0])
    return error
