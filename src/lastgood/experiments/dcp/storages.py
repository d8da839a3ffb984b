"""The ways to write and read a DCP checkpoint, by name, and which options each of them uses."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lastgood.errors import ConfigError, NoCheckpoint
from lastgood.experiments.dcp.places import BucketPlace, FolderPlace
from lastgood.experiments.records.dcp import Medium
from lastgood.units import MIB

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["STORAGES", "Storage", "check_files", "storage_named"]

_Options = Mapping[str, Any]
_Place = FolderPlace | BucketPlace
_LARGEST: Final = 1024
_REGION: Final = "us-east-1"
"""Of a bucket whose region nobody says."""


@dataclass(frozen=True)
class Storage:
    """One way. Both functions are ``(place, options)``."""

    name: str
    label: str
    writer: Callable[[_Place, _Options], StorageWriter]
    reader: Callable[[_Place, _Options], StorageReader]
    disk: Mapping[str, str | int | float | bool] | None = None
    """Every option that it uses on a folder, and its value if nobody says another; None: it writes no folders."""
    s3: Mapping[str, str | int | float | bool] | None = None
    """The same for a bucket."""
    needs: tuple[str, ...] = ()
    """Packages that it is in, other than torch."""
    needs_s3: tuple[str, ...] = ()
    """Further ones, for a bucket."""
    tensors_only: bool = False
    """Whether it keeps nothing else, such as an optimizer's hyperparameters."""
    durable: Callable[[_Options], bool] = lambda options: bool(options.get("sync_files", True))
    """Whether what it has saved survives a power cut, so far as it can promise that."""

    def defaults(self, medium: Medium) -> Mapping[str, str | int | float | bool]:
        """The options that it uses there. Raises ConfigError if it cannot be used there."""
        found = self.disk if medium == "disk" else self.s3
        if found is None:
            others = ", ".join(one.name for one in STORAGES if (one.disk if medium == "disk" else one.s3) is not None)
            where = "folders" if medium == "disk" else "buckets"
            raise ConfigError(f"storage {self.name} does not write {where}; these do: {others}")
        return found

    def missing(self, medium: Medium = "disk") -> str | None:
        """Why it cannot be used here, and what to do; None if it can."""
        for name in (*self.needs, *(self.needs_s3 if medium == "s3" else ())):
            if importlib.util.find_spec(name) is None:
                package = {"obstore": "'lastgood[s3]'"}.get(name, name)
                return f"storage {self.name} needs {name}, which is not installed: pip install {package}"
        return None

    def resolved(self, given: _Options, medium: Medium = "disk") -> dict[str, str | int | float | bool]:
        """All options. Raises ConfigError for one that it does not use, or a value out of range."""
        defaults = self.defaults(medium)
        unused = [name for name in given if name not in defaults]
        if unused:
            used = ", ".join(map(_flag, defaults)) or "none"
            there = (
                "" if self.disk is None or self.s3 is None else " on a folder" if medium == "disk" else " in a bucket"
            )
            raise ConfigError(
                f"storage {self.name} does not use {', '.join(map(_flag, unused))}{there}; it uses: {used}"
            )
        found = {**defaults, **given}
        for name, (least, most) in _RANGES.items():
            if name in found and not least <= float(found[name]) <= most:
                raise ConfigError(f"{_flag(name)} {found[name]}: from {least} to {most}")
        for name, known in _CHOICES.items():
            if name in found and found[name] not in known:
                raise ConfigError(f"{_flag(name)} {found[name]}: one of {', '.join(known)}")
        return found


_RANGES: Final = {"thread_count": (1, _LARGEST), "part_size": (5, 5120), "target_gbps": (0.1, 10_000)}
_CHOICES: Final = {
    "prefix_strategy": ("default", "numeric", "binary", "hex"),
    "s3_reader": ("optimized", "sequential", "range"),
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _disk_writer(place: _Place, options: _Options) -> StorageWriter:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(str(place), sync_files=options["sync_files"], thread_count=options["thread_count"])


def _disk_reader(place: _Place, _options: _Options) -> StorageReader:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(str(place))


def _fsspec_writer(place: _Place, options: _Options) -> StorageWriter:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    # A stream into a bucket cannot be flushed.
    sync_files = options.get("sync_files", False)
    return FsspecWriter(str(place), sync_files=sync_files, thread_count=options["thread_count"], **_of_s3fs(place))


def _fsspec_reader(place: _Place, _options: _Options) -> StorageReader:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(str(place), **_of_s3fs(place))


def _of_s3fs(place: _Place) -> dict[str, Any]:
    if isinstance(place, FolderPlace):
        return {}
    found: dict[str, Any] = {"endpoint_url": place.access.options().endpoint}
    if place.access.region is not None:
        found["client_kwargs"] = {"region_name": place.access.region}
    return {name: value for name, value in found.items() if value is not None}


def _hf_writer(place: _Place, options: _Options) -> StorageWriter:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(str(place), thread_count=options["thread_count"], save_distributed=True)


def _hf_reader(place: _Place, options: _Options) -> StorageReader:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(place), thread_count=options["thread_count"])


def _lastgood_writer(place: _Place, options: _Options) -> StorageWriter:
    from lastgood.integrations.dcp import LastgoodWriter

    s3 = place.access.options() if isinstance(place, BucketPlace) else None
    return LastgoodWriter(str(place), writer_threads=options["thread_count"], s3=s3)


def _lastgood_reader(place: _Place, options: _Options) -> StorageReader:
    from lastgood.integrations.dcp import LastgoodReader

    s3 = place.access.options() if isinstance(place, BucketPlace) else None
    return LastgoodReader(str(place), threads=options["thread_count"], s3=s3)


def _connector_writer(place: _Place, options: _Options) -> StorageWriter:
    from s3torchconnector.dcp import S3StorageWriter, s3_prefix_strategy

    strategy = {
        "default": s3_prefix_strategy.DefaultPrefixStrategy,
        "numeric": functools.partial(s3_prefix_strategy.NumericPrefixStrategy, 10),
        "binary": s3_prefix_strategy.BinaryPrefixStrategy,
        "hex": s3_prefix_strategy.HexPrefixStrategy,
    }[options["prefix_strategy"]]()
    region, config = _of_connector(place, options)
    writer: StorageWriter = S3StorageWriter(
        region, str(place), s3client_config=config, prefix_strategy=strategy, thread_count=options["thread_count"]
    )
    _reach(writer, place, options)
    return writer


def _connector_reader(place: _Place, options: _Options) -> StorageReader:
    from s3torchconnector import S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader

    constructor = {
        "optimized": S3ReaderConstructor.dcp_optimized,
        "sequential": S3ReaderConstructor.sequential,
        "range": S3ReaderConstructor.range_based,
    }[options["s3_reader"]]()
    region, config = _of_connector(place, options)
    reader: StorageReader = S3StorageReader(region, str(place), s3client_config=config, reader_constructor=constructor)
    _reach(reader, place, options)
    return reader


def _of_connector(place: _Place, options: _Options) -> tuple[str, Any]:
    """Region and configuration of its client."""
    from s3torchconnector import S3ClientConfig

    assert isinstance(place, BucketPlace)
    s3 = place.access.options()
    region = s3.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _REGION
    config = S3ClientConfig(
        throughput_target_gbps=float(options["target_gbps"]),
        part_size=int(options["part_size"]) * MIB,
        force_path_style=s3.uses_path,
    )
    return region, config


def _reach(storage: Any, place: _Place, options: _Options) -> None:
    """Its writer and reader take no endpoint, and their client does."""
    from s3torchconnector._s3client import S3Client

    assert isinstance(place, BucketPlace)
    endpoint = place.access.options().endpoint
    if endpoint is not None:
        region, config = _of_connector(place, options)
        storage.fs._client = S3Client(region, endpoint=endpoint, s3client_config=config)


_FILES: Final = {"thread_count": 1, "sync_files": True}
STORAGES: Final = (
    Storage("disk", "torch, files", _disk_writer, _disk_reader, _FILES),
    Storage(
        "fsspec",
        "torch, fsspec",
        _fsspec_writer,
        _fsspec_reader,
        _FILES,
        {"thread_count": 1},
        needs=("fsspec",),
        needs_s3=("s3fs",),
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
    Storage(
        "lastgood",
        "Lastgood",
        _lastgood_writer,
        _lastgood_reader,
        {"thread_count": 4},
        {"thread_count": 4},
        needs_s3=("obstore",),
    ),
    Storage(
        "s3torchconnector",
        "s3torchconnector",
        _connector_writer,
        _connector_reader,
        s3={
            "thread_count": 1,
            "part_size": 8,
            "target_gbps": 10.0,
            "prefix_strategy": "default",
            "s3_reader": "optimized",
        },
        needs=("s3torchconnector",),
    ),
)


def storage_named(name: str, medium: Medium = "disk") -> Storage:
    """The storage of that name. Raises ConfigError if there is none, if it is not for `medium`, or lacks a package."""
    for storage in STORAGES:
        if storage.name == name:
            storage.defaults(medium)
            if (reason := storage.missing(medium)) is not None:
                raise ConfigError(reason)
            return storage
    raise ConfigError(f"--storage {name}: unknown; known: {', '.join(one.name for one in STORAGES)}")


def check_files(place: _Place, storage: str, options: _Options) -> tuple[int, int]:
    """Bytes and number of files of a checkpoint, after all that can be checked without reading tensors.

    Metadata are read as data, and each file that they name must be there and as long as they say. Raises NoCheckpoint,
    CorruptCheckpoint, StorageError.
    """
    # Metadata that name files elsewhere, as prefix strategies do, are for their own reader alone.
    if storage != "hf" and options.get("prefix_strategy", "default") == "default":
        from lastgood.integrations.dcp import LastgoodReader

        s3 = place.access.options() if isinstance(place, BucketPlace) else None
        LastgoodReader(str(place), s3=s3).read_metadata()
    sizes = place.sizes()
    if not sizes:
        raise NoCheckpoint(f"{place}: holds no file")
    return sum(sizes), len(sizes)
