"""The ways to write and read a DCP checkpoint, by name, and which options each of them uses."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lastgood.errors import ConfigError, NoCheckpoint
from lastgood.files import storage_errors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["STORAGES", "Storage", "check_files", "forget", "storage_named"]

_Options = Mapping[str, Any]
_LARGEST: Final = 1024


@dataclass(frozen=True)
class Storage:
    """One way. Both functions are ``(folder, options)``."""

    name: str
    label: str
    writer: Callable[[str, _Options], StorageWriter]
    reader: Callable[[str, _Options], StorageReader]
    defaults: Mapping[str, str | int | float | bool]
    """Every option that it uses, and its value if nobody says another."""
    needs: str | None = None
    """The package that it is in, other than torch."""
    tensors_only: bool = False
    """Whether it keeps nothing else, such as an optimizer's hyperparameters."""
    durable: Callable[[_Options], bool] = lambda options: bool(options.get("sync_files", True))
    """Whether what it has saved survives a power cut, so far as it can promise that."""

    def missing(self) -> str | None:
        """Why it cannot be used here, and what to do; None if it can."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"storage {self.name} needs {self.needs}, which is not installed: pip install {self.needs}"

    def resolved(self, given: _Options) -> dict[str, str | int | float | bool]:
        """All options. Raises ConfigError for one that it does not use, or a value out of range."""
        unused = [name for name in given if name not in self.defaults]
        if unused:
            used = ", ".join(map(_flag, self.defaults)) or "none"
            raise ConfigError(f"storage {self.name} does not use {', '.join(map(_flag, unused))}; it uses: {used}")
        found = {**self.defaults, **given}
        threads = found.get("thread_count", 1)
        if not 1 <= int(threads) <= _LARGEST:
            raise ConfigError(f"--thread-count {threads}: from 1 to {_LARGEST}")
        return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _disk_writer(folder: str, options: _Options) -> StorageWriter:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(folder, sync_files=options["sync_files"], thread_count=options["thread_count"])


def _disk_reader(folder: str, _options: _Options) -> StorageReader:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(folder)


def _fsspec_writer(folder: str, options: _Options) -> StorageWriter:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(folder, sync_files=options["sync_files"], thread_count=options["thread_count"])


def _fsspec_reader(folder: str, _options: _Options) -> StorageReader:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(folder)


def _hf_writer(folder: str, options: _Options) -> StorageWriter:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(folder, thread_count=options["thread_count"], save_distributed=True)


def _hf_reader(folder: str, options: _Options) -> StorageReader:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(folder, thread_count=options["thread_count"])


def _lastgood_writer(folder: str, options: _Options) -> StorageWriter:
    from lastgood.integrations.dcp import LastgoodWriter

    return LastgoodWriter(folder, writer_threads=options["thread_count"])


def _lastgood_reader(folder: str, options: _Options) -> StorageReader:
    from lastgood.integrations.dcp import LastgoodReader

    return LastgoodReader(folder, threads=options["thread_count"])


STORAGES: Final = (
    Storage("disk", "torch, files", _disk_writer, _disk_reader, {"thread_count": 1, "sync_files": True}),
    Storage(
        "fsspec", "torch, fsspec", _fsspec_writer, _fsspec_reader, {"thread_count": 1, "sync_files": True}, "fsspec"
    ),
    # It never flushes a file.
    Storage(
        "hf",
        "torch, safetensors",
        _hf_writer,
        _hf_reader,
        {"thread_count": 1},
        tensors_only=True,
        durable=lambda _: False,
    ),
    Storage("lastgood", "Lastgood", _lastgood_writer, _lastgood_reader, {"thread_count": 2}),
)


@functools.cache
def storage_named(name: str) -> Storage:
    """The storage of that name. Raises ConfigError if there is none, or if its package is missing."""
    for storage in STORAGES:
        if storage.name == name:
            if (reason := storage.missing()) is not None:
                raise ConfigError(reason)
            return storage
    raise ConfigError(f"--storage {name}: unknown; known: {', '.join(one.name for one in STORAGES)}")


def check_files(folder: Path, storage: str) -> tuple[int, int]:
    """Bytes and number of files of a checkpoint, after all that can be checked without reading tensors.

    Metadata are read as data, and each file that they name must be there and as long as they say. Raises NoCheckpoint,
    CorruptCheckpoint, StorageError.
    """
    if storage != "hf":
        from lastgood.integrations.dcp import LastgoodReader

        LastgoodReader(folder).read_metadata()
    with storage_errors(folder, "looking at the files"):
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    if not sizes:
        raise NoCheckpoint(f"{folder}: holds no file")
    return sum(sizes), len(sizes)


def forget(folder: Path) -> None:
    """Remove a checkpoint that is not needed any more, its metadata first, so that no half is taken for one."""
    for metadata in (folder / ".metadata", folder / "model.safetensors.index.json"):
        if metadata.exists():
            metadata.unlink()
    shutil.rmtree(folder, ignore_errors=True)
