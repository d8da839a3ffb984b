"""Lastgood's reader of checkpoints that torch.distributed.checkpoint wrote for one process.

DCP's own reader unpickles ``.metadata``, with whatever code is in it, and its planner does so with the bytes of what is
no tensor. Here both are read as data: ``.metadata`` once, by lastgood.pickles, and each tensor by
lastgood.checkpointers.torch_files.archive, after every number was compared with the files.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.bounds import Budget, Refused, require
from lastgood.checkpointers.torch_files.archive import TorchFile, dtype_names, file_names, reading
from lastgood.errors import CorruptCheckpoint
from lastgood.files import open_regular, read_bounded
from lastgood.pickles import Maker, Record, load_pickle

__all__ = ["StoredTensors", "metadata_names"]

_METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


@dataclass(frozen=True)
class _Stored:
    """A tensor of a checkpoint, and the part of a file that holds it, as a file of torch.save."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    begin: int
    nbytes: int


class StoredTensors:
    """The tensors of one DCP checkpoint of `nbytes`. Raises CorruptCheckpoint for what cannot be read, StorageError."""

    def __init__(self, checkpoint: Path, nbytes: int) -> None:
        self._checkpoint = checkpoint
        with reading(checkpoint / _METADATA):
            content = read_bounded(checkpoint / _METADATA, nbytes)
            self._stored = _stored_tensors(load_pickle(content, metadata_names(), Budget(nbytes)))

    def elements(self, name: str) -> int:
        """The number of a tensor's elements, as the metadata has it."""
        return math.prod(self._entry(name).shape)

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read tensors by name into `targets`, which are on the CPU and have the dtypes and shapes of the metadata."""
        for name, target in targets.items():
            entry = self._entry(name)
            if entry.dtype != target.dtype or entry.shape != target.shape:
                raise CorruptCheckpoint(
                    f"{self._checkpoint}: {name} is {entry.dtype} {entry.shape} in DCP's metadata, and {target.dtype} "
                    f"{tuple(target.shape)} in the layout"
                )
        with contextlib.ExitStack() as opened:
            descriptors: dict[str, int] = {}
            for name, target in targets.items():
                entry = self._entry(name)
                with reading(self._checkpoint / f"{entry.file}: {name}"):
                    if entry.file not in descriptors:
                        descriptors[entry.file] = open_regular(self._checkpoint / entry.file)
                        opened.callback(os.close, descriptors[entry.file])
                    target.copy_(_read_tensor(descriptors[entry.file], entry))

    def _entry(self, name: str) -> _Stored:
        if name not in self._stored:
            raise CorruptCheckpoint(f"{self._checkpoint}: holds no tensor {name}")
        return self._stored[name]


def _read_tensor(descriptor: int, entry: _Stored) -> torch.Tensor:
    if entry.begin + entry.nbytes > os.fstat(descriptor).st_size:
        raise Refused(f"bytes {entry.begin} to {entry.begin + entry.nbytes} lie beyond the end of the file")
    found = TorchFile(descriptor, entry.begin, entry.nbytes, Budget(entry.nbytes)).read()
    if type(found) is not torch.Tensor or found.dtype != entry.dtype or found.shape != entry.shape:
        raise Refused(f"there is something else than a tensor of {entry.dtype} {entry.shape}")
    return found


# -- .metadata ---------------------------------------------------------------------------------------------------------


@functools.cache
def metadata_names() -> Mapping[tuple[str, str], Any]:
    """All that a ``.metadata`` may name: classes, which become records, and what dtypes and sizes are made of."""
    classes = [(_MODULE, name) for name in _CLASSES]
    classes.append(("torch.distributed.checkpoint.filesystem", "_StorageInfo"))
    classes += [(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")]
    return {
        **{(module, name): Record.maker(f"{module}.{name}") for module, name in classes},
        ("torch.serialization", "_get_layout"): Maker("torch.serialization._get_layout", _layout),
        **{name: file_names()[name] for name in (("collections", "OrderedDict"), ("torch", "Size"))},
        **dtype_names(),
    }


def _layout(name: Any) -> Any:
    if name != "torch.strided":
        raise Refused("it describes tensors that have no plain bytes")
    return name


def _stored_tensors(metadata: Any) -> dict[str, _Stored]:
    """The tensors that metadata describe, each in one piece, as DCP writes them for one process."""
    state = _state(metadata, f"{_MODULE}.Metadata")
    described: Any = state.get("state_dict_metadata")
    places: Any = state.get("storage_data")
    require(type(described) is dict and type(places) is dict, "its metadata lacks what it should describe")
    infos: dict[str, dict[str, Any]] = {}
    for index, info in places.items():
        found = _state(index, f"{_MODULE}.MetadataIndex")
        name: Any = found.get("fqn")
        offset: Any = found.get("offset")
        require(type(name) is str and name not in infos, "its metadata names a tensor twice, or by no text")
        require(
            offset is None or (type(offset) is torch.Size and not any(offset)),
            f"its metadata has a part of {name!r:.60}",
        )
        infos[name] = _state(info, _INFO)
    stored = {}
    for name, about in described.items():
        require(type(name) is str and type(about) is Record, "its metadata describes what is no tensor")
        if about.name == f"{_MODULE}.TensorStorageMetadata":
            dtype, shape = _dtype_and_shape(_state(about, about.name))
            require(name in infos, f"its metadata says not where {name!r:.60} is")
            stored[name] = _place(dtype, shape, infos[name])
    taken = sorted((one.file, one.begin, one.begin + one.nbytes) for one in stored.values())
    require(
        all(one[0] != two[0] or one[2] <= two[1] for one, two in pairwise(taken)),
        "its metadata has tensors one over another",
    )
    return stored


def _dtype_and_shape(about: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    properties: Any = about.get("properties")
    shape: Any = about.get("size")
    chunks: Any = about.get("chunks")
    require(
        type(properties) is Record and properties.name == f"{_MODULE}.TensorProperties",
        "its metadata has a damaged tensor",
    )
    values = properties.state
    require(
        type(values) is tuple and len(values) == 5 and type(values[0]) is torch.dtype,
        "its metadata has a damaged dtype",
    )
    require(type(shape) is torch.Size and min(shape, default=0) >= 0, "its metadata has a damaged size")
    require(
        type(chunks) is list and len(chunks) == 1, "its metadata has a tensor in several pieces; one process writes one"
    )
    chunk = _state(chunks[0], f"{_MODULE}.ChunkStorageMetadata")
    offsets: Any = chunk.get("offsets")
    sizes: Any = chunk.get("sizes")
    require(
        type(offsets) is torch.Size and len(offsets) == len(shape) and not any(offsets),
        "its metadata has a damaged piece",
    )
    require(type(sizes) is torch.Size and sizes == shape, "its metadata has a piece that is not the tensor")
    return values[0], tuple(shape)


def _place(dtype: torch.dtype, shape: tuple[int, ...], info: dict[str, Any]) -> _Stored:
    file: Any = info.get("relative_path")
    begin: Any = info.get("offset")
    nbytes: Any = info.get("length")
    require(
        type(file) is str and file not in ("", ".", "..") and not {"/", "\0"} & set(file),
        "its metadata names no file beside it",
    )
    require(
        type(begin) is int and type(nbytes) is int and begin >= 0 and nbytes >= 0, "its metadata has a damaged place"
    )
    require(not info.get("transform_descriptors"), "its metadata has tensors that were changed when they were written")
    require(math.prod(shape) * dtype.itemsize <= nbytes, "its metadata has a tensor that is larger than its place")
    return _Stored(dtype, shape, file, begin, nbytes)


def _state(record: Any, name: str) -> dict[str, Any]:
    require(
        type(record) is Record and record.name == name and type(record.state) is dict, f"its metadata lacks a {name}"
    )
    state: dict[str, Any] = record.state
    return state
