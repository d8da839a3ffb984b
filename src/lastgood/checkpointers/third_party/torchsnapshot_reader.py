"""Lastgood's reader of what torchsnapshot wrote: its manifest, and tensors as raw bytes or as files of torch.save.

The library's own reader unpickles whatever its manifest calls an object, and tensors of some dtypes too, with the code
that is in them. Here an entry is a tensor, in one piece or in several, or it is not read.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.bounds import DAMAGE, Budget, json_cost, require
from lastgood.checkpointers.torch_files.archive import TorchFile, dtype_names
from lastgood.checkpointers.torch_files.zip import read_at
from lastgood.errors import CorruptCheckpoint
from lastgood.files import open_regular, read_bounded, storage_errors
from lastgood.text import parse_json

__all__ = ["StoredSnapshot"]

_METADATA = ".snapshot_metadata"
_MOST_AXES = 64


class StoredSnapshot:
    """The tensors of one snapshot of `nbytes`, below the key `part`. Raises CorruptCheckpoint, StorageError."""

    def __init__(self, checkpoint: Path, nbytes: int, part: str) -> None:
        self._checkpoint = checkpoint
        self._nbytes = nbytes
        self._prefix = f"0/{part}/"
        with self._reading(_METADATA):
            text = read_bounded(checkpoint / _METADATA, nbytes)
            Budget(nbytes).take(json_cost(text))
            document = parse_json(text, str(checkpoint / _METADATA), most_bytes=nbytes)
            manifest: Any = document.get("manifest") if type(document) is dict else None
            require(type(manifest) is dict, "it has no manifest")
            self._manifest: dict[str, Any] = manifest

    def elements(self, name: str) -> int:
        """The number of a tensor's elements, as the manifest has it."""
        with self._reading(_METADATA):
            return math.prod(_shape(self._entry(name)))

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read tensors by name into `targets`, on the CPU."""
        for name, target in targets.items():
            with self._reading(name):
                entry = self._entry(name)
                _check_kind(entry, target)
                for piece, place in _pieces(entry, target):
                    place.copy_(self._read(piece, place))

    def _entry(self, name: str) -> dict[str, Any]:
        # As torchsnapshot writes names into paths.
        entry = self._manifest.get(self._prefix + name.replace("%", "%25").replace("/", "%2F"))
        require(type(entry) is dict and entry.get("type") in ("Tensor", "ChunkedTensor"), f"it holds no tensor {name}")
        assert isinstance(entry, dict)
        return entry

    def _read(self, entry: Any, like: torch.Tensor) -> torch.Tensor:
        """A tensor that is stored in one piece, of the dtype and shape of `like`."""
        require(type(entry) is dict and entry.get("type") == "Tensor", "a part of it is no tensor")
        _check_kind(entry, like)
        with os.fdopen(open_regular(self._file(entry.get("location"))), "rb") as file:
            descriptor = file.fileno()
            begin, end = _range(entry.get("byte_range"), os.fstat(descriptor).st_size)
            if entry.get("serializer") == "torch_save":
                found = TorchFile(descriptor, begin, end - begin, Budget(end - begin)).read()
                require(type(found) is torch.Tensor and found.dtype == like.dtype, "its file holds something else")
                require(found.shape == like.shape, "its file holds a tensor of another shape")
                assert isinstance(found, torch.Tensor)
                return found
            require(entry.get("serializer") == "buffer_protocol", "nobody knows how it was written")
            require(end - begin == like.numel() * like.element_size(), f"{end - begin} bytes are not what it needs")
            return read_at(descriptor, begin, end - begin, "its file").view(like.dtype).view(like.shape)

    def _file(self, location: Any) -> Path:
        require(type(location) is str and bool(location) and "\0" not in location, "its file has no name")
        path = self._checkpoint / str(location)
        inside = path.resolve().is_relative_to(self._checkpoint.resolve())
        require(inside and ".." not in path.parts, f"{str(location)[:100]!r} is no file of this checkpoint")
        return path

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        with storage_errors(self._checkpoint, f"reading {what}"):
            try:
                yield
            except DAMAGE as error:
                raise CorruptCheckpoint(f"{self._checkpoint}: {what} cannot be read: {error}") from error


def _pieces(entry: dict[str, Any], target: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """The entry of each piece of a tensor, and the part of `target` that it fills: all of it, and nothing twice."""
    if entry["type"] == "Tensor":
        yield entry, target
        return
    pieces = entry.get("chunks")
    require(type(pieces) is list and len(pieces) > 0, "it has no pieces")
    target = target.view(1) if target.dim() == 0 else target
    begin = 0
    for piece in pieces or ():
        require(type(piece) is dict, "a piece of it is damaged")
        offsets, sizes = piece.get("offsets"), _sizes(piece.get("sizes"))
        # torchsnapshot cuts along the first axis, in order.
        require(offsets == [begin] + [0] * (target.dim() - 1), "a piece of it lies where none belongs")
        require(len(sizes) == target.dim() and sizes[1:] == tuple(target.shape[1:]), "a piece of it has another size")
        require(begin + sizes[0] <= target.shape[0], "a piece of it is too large")
        yield piece.get("tensor"), target[begin : begin + sizes[0]]
        begin += sizes[0]
    require(begin == target.shape[0], "it lacks a piece")


def _check_kind(entry: dict[str, Any], like: torch.Tensor) -> None:
    dtype, shape = entry.get("dtype"), _shape(entry)
    module, _, name = str(dtype).partition(".")
    known = dtype_names().get((module, name))
    require(
        known == like.dtype and shape == like.shape,
        f"it is {str(dtype)[:40]} {shape[:8]}, not {like.dtype} {like.shape}",
    )


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    return _sizes(entry.get("shape"))


def _sizes(sizes: Any) -> tuple[int, ...]:
    sound = type(sizes) is list and len(sizes) <= _MOST_AXES and all(type(size) is int for size in sizes)
    require(sound and all(0 <= size < 1 << 62 for size in sizes), "its size is damaged")
    return tuple(sizes)


def _range(found: Any, nbytes: int) -> tuple[int, int]:
    if found is None:
        return 0, nbytes
    require(type(found) is list and len(found) == 2 and all(type(end) is int for end in found), "its place is damaged")
    begin, end = found
    require(0 <= begin <= end <= nbytes, f"bytes {begin} to {end} lie outside its file of {nbytes}")
    return begin, end
