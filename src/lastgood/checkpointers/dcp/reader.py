"""Lastgood's reader of checkpoints that torch.distributed.checkpoint wrote for one process.

DCP's own reader unpickles ``.metadata``, with whatever code is in it, and its planner does so with the bytes of what is
no tensor. Here both are read as data: ``.metadata`` once, by `metadata`, and each tensor by
lastgood.checkpointers.torch_files.archive, after every number was compared with the files.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood._lazy import torch
from lastgood.bounds import Budget, Refused, require
from lastgood.checkpointers.dcp.metadata import decode_metadata
from lastgood.checkpointers.torch_files.archive import TorchFile, reading
from lastgood.errors import CorruptCheckpoint
from lastgood.files import open_regular, read_bounded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["StoredTensors"]

_METADATA = ".metadata"


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
            self._stored = _stored_tensors(decode_metadata(content, Budget(nbytes)))

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


def _stored_tensors(metadata: Metadata) -> dict[str, _Stored]:
    """The tensors that metadata describe, each in one piece, as DCP writes them for one process."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    infos: dict[str, Any] = {}
    for index, info in metadata.storage_data.items():
        require(index.fqn not in infos, "its metadata names a tensor twice")
        require(not any(index.offset or ()), f"its metadata has a part of {index.fqn!r:.60}")
        infos[index.fqn] = info
    stored = {}
    for name, about in metadata.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata):
            continue
        whole = len(about.chunks) == 1 and about.chunks[0].sizes == about.size
        require(whole, "its metadata has a tensor in several pieces; one process writes one")
        require(name in infos, f"its metadata says not where {name!r:.60} is")
        place, dtype, shape = infos[name], about.properties.dtype, tuple(about.size)
        require(not place.transform_descriptors, "its metadata has tensors that were changed when they were written")
        stored[name] = _Stored(dtype, shape, place.relative_path, place.offset, place.length)
    return stored
