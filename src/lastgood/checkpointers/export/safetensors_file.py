"""Checkpoints as safetensors files, written while they are read, from which the same tree can be built again.

The metadata hold the layout, so nothing is lost: plain values, shared memory, strides, and a checksum of each tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lastgood import _native
from lastgood._lazy import torch
from lastgood.bounds import Budget, json_cost, require
from lastgood.checkpointers.slots.contents import NamedTensor, named_tensors, typed_view
from lastgood.checkpointers.torch_files.archive import reading
from lastgood.checkpointers.torch_files.zip import read_at
from lastgood.errors import CorruptCheckpoint, MismatchError, StateError
from lastgood.files import closed_after, open_new, open_regular
from lastgood.state import Layout, unflatten
from lastgood.state.layout import check_cost
from lastgood.storage import SlotInfo
from lastgood.storage.files import flush
from lastgood.text import parse_json
from lastgood.units import MIB

__all__ = ["SafetensorsPlan", "load_safetensors", "read_facts", "write_safetensors"]

_PIECE_BYTES = 16 * MIB
"""Non-contiguous tensors are made contiguous in chunks of this size."""
_FLUSH_BYTES = 256 * MIB
"""After so much is written it is flushed, so that the page cache is not filled with it."""
_MAX_HEADER_BYTES = 100_000_000
"""Readers of safetensors refuse longer headers."""

_TAGS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""What safetensors calls the dtypes that it knows. It has no complex32 and no complex128."""
_ARRAY_TAGS = {np.dtype(name).str: tag for name, tag in _TAGS.items() if not name.startswith(("bfloat", "float8_"))}
"""The same for numpy's dtypes, which has these."""

_OWN = "lastgood."
_LAYOUT = "lastgood.layout"
_ALIASES = "lastgood.aliases"
_CHECKSUMS = "lastgood.crc32c"
_OF_FACTS = "__metadata__"
"""Stands for all other metadata among the checksums; no tensor has this name."""


class SafetensorsPlan:
    """Which tensors a file holds, and where.

    The file is written here and not by safetensors' own `save_file`, which wants all tensors in memory, contiguous, at
    once. The format: 8 bytes header length, the header in JSON, the tensors without gaps.
    """

    def __init__(self, layout: Layout, tensors: Sequence[NamedTensor], info: SlotInfo) -> None:
        unknown = [f"{tensor.name} ({tensor.dtype})" for tensor in tensors if _tag(tensor) is None]
        if unknown:
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise StateError(
                f"{info.path}: step {info.step}: safetensors has no dtype for {', '.join(unknown[:5])}{more}; "
                "export to pt, which holds everything"
            )
        self.aliases = _aliases(tensors)
        # The widest elements first: so each tensor lies at a multiple of its own width.
        self.tensors = sorted(
            (tensor for tensor in tensors if tensor.name not in self.aliases),
            key=lambda tensor: (-tensor.itemsize, tensor.name),
        )
        self.begins: dict[str, int] = {}
        position = 0
        for tensor in self.tensors:
            self.begins[tensor.name] = position
            position += tensor.nbytes
        text = layout.to_json()
        self._facts = {
            "format": "pt",  # what readers of safetensors expect to be told
            "lastgood.step": str(info.step),
            "lastgood.incarnation": str(info.incarnation),
            "lastgood.sequence": str(info.sequence),
            "lastgood.job_id": info.record.job_id.hex(),
            _LAYOUT: text.decode(),
            _ALIASES: json.dumps(self.aliases),
        }
        header = self.header({})
        self.data_begin = len(header)
        self.file_bytes = self.data_begin + position
        try:
            check_cost(text, self.file_bytes)
            Budget(self.file_bytes).take(_reading_cost(header, layout.payload_bytes))
        except ValueError as error:
            raise StateError(
                f"{info.path}: step {info.step}: a safetensors file of it could not be read again: {error} (long lists "
                "of plain values, or small parts of large memory); export to pt, or keep such lists as tensors"
            ) from error
        if self.data_begin > _MAX_HEADER_BYTES:
            raise StateError(
                f"{info.path}: step {info.step}: a safetensors header of {self.data_begin} bytes is over the limit of "
                f"{_MAX_HEADER_BYTES}; export to pt"
            )

    def header(self, checksums: Mapping[str, int]) -> bytes:
        """Header and its length in front; of one length, whatever the checksums."""
        named = {tensor.name: f"{checksums.get(tensor.name, 0):08x}" for tensor in self.tensors}
        named[_OF_FACTS] = f"{_facts_checksum(self._facts):08x}"
        document: dict[str, Any] = {"__metadata__": {**self._facts, _CHECKSUMS: json.dumps(named)}}
        for tensor in self.tensors:
            begin = self.begins[tensor.name]
            document[tensor.name] = {
                "dtype": _tag(tensor),
                "shape": list(tensor.shape),
                "data_offsets": [begin, begin + tensor.nbytes],
            }
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def _reading_cost(header: bytes, payload_bytes: int) -> int:
    """An upper bound of the memory that reading a file takes beside its tensors; the layout is a text in the header."""
    return payload_bytes + len(header) + json_cost(header)


def _facts_checksum(metadata: Mapping[str, str]) -> int:
    """CRC32C over all metadata but the checksums, each key and value as JSON, sorted by key."""
    facts = {key: value for key, value in metadata.items() if key != _CHECKSUMS}
    return _native.crc32c(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode(), 0)


def _tag(tensor: NamedTensor) -> str | None:
    return _ARRAY_TAGS.get(tensor.dtype) if tensor.is_array else _TAGS.get(tensor.dtype)


def _aliases(tensors: Sequence[NamedTensor]) -> dict[str, str]:
    """Names of tensors that are the same as one before, and that one's name."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for tensor in tensors:
        if tensor.nbytes and first.setdefault(tensor.place, tensor.name) != tensor.name:
            aliases[tensor.name] = first[tensor.place]
    return aliases


def write_safetensors(
    path: Path, plan: SafetensorsPlan, blocks: Iterator[tuple[int, torch.Tensor]], mode: int | None = None
) -> None:
    """Write a planned file, which is new, from (number, bytes) of all blocks; it is not durable yet. Raises OSError."""
    of_block = defaultdict(list)
    for tensor in plan.tensors:
        of_block[tensor.block].append(tensor)
    checksums: dict[str, int] = {}
    with closed_after(open_new(path, mode=mode)) as descriptor:
        # Fails at once if there is no room.
        os.posix_fallocate(descriptor, 0, plan.file_bytes)
        unflushed = 0
        for number, block in blocks:
            for tensor in of_block[number]:
                position = plan.data_begin + plan.begins[tensor.name]
                checksum = 0
                for piece in _dense_pieces(typed_view(block, tensor)):
                    checksum = _native.crc32c(piece, checksum)
                    _write_at(descriptor, piece, position)
                    position += len(piece)
                checksums[tensor.name] = checksum
                unflushed += tensor.nbytes
            if unflushed > _FLUSH_BYTES:
                flush(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                unflushed = 0
        _write_at(descriptor, memoryview(plan.header(checksums)), 0)


def _dense_pieces(view: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor's elements, one after another."""
    if view.is_contiguous() or view.numel() * view.itemsize <= _PIECE_BYTES:
        yield _bytes_of(view.contiguous()).numpy().data
    elif len(view) == 1:
        yield from _dense_pieces(view[0])
    else:
        rows = max(1, _PIECE_BYTES * len(view) // (view.numel() * view.itemsize))
        for first in range(0, len(view), rows):
            yield from _dense_pieces(view[first : first + rows])


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    # A zero-dimensional tensor, or one element with a stride of its own, cannot be viewed as bytes as it is.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _write_at(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, position)
        content, position = content[written:], position + written


# -- reading -----------------------------------------------------------------------------------------------------------


def load_safetensors(path: Path) -> dict[str, Any]:
    """The tree of a checkpoint that was exported. Raises CorruptCheckpoint, MismatchError, StorageError."""
    with _opened(path) as file:
        facts = file.facts()
        layout = Layout.from_json(facts["layout"].encode(), str(path), path.stat().st_size)
        file.budget.take(layout.payload_bytes)
        tensors = named_tensors(layout)
        aliases = _aliases(tensors)
        checksums = parse_json(facts["crc32c"], f"{path}: its checksums", most_bytes=_MAX_HEADER_BYTES)
        require(
            parse_json(facts["aliases"], str(path), most_bytes=_MAX_HEADER_BYTES) == aliases, "its aliases are damaged"
        )
        require(type(checksums) is dict, "its checksums are damaged")
        written = checksums.get(_OF_FACTS)  # older files have none
        require(
            written in (None, f"{_facts_checksum(file.metadata):08x}"), "the checksum of its metadata does not hold"
        )
        stored = [tensor for tensor in tensors if tensor.name not in aliases]
        places = file.places(stored)
        # Bytes that no tensor covers are zero.
        blocks = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in layout.block_bytes]
        for tensor in stored:
            content = file.read(*places[tensor.name])
            found = f"{_native.crc32c(content.numpy().data):08x}"
            if found != checksums.get(tensor.name):
                raise CorruptCheckpoint(
                    f"{path}: {tensor.name}: checksum {found} instead of {checksums.get(tensor.name)!r:.20}"
                )
            if tensor.nbytes:
                _scatter(typed_view(blocks[tensor.block], tensor), content)
        return unflatten(layout, blocks, str(path))


def read_facts(path: Path) -> dict[str, str]:
    """What an exported safetensors file says of itself: step, incarnation, sequence, job_id, and the layout's JSON.

    Raises CorruptCheckpoint, StorageError, and MismatchError for a file that Lastgood did not export.
    """
    with _opened(path) as file:
        return file.facts()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_File]:
    with reading(path), os.fdopen(open_regular(path), "rb") as file:
        yield _File(file.fileno(), path)


class _File:
    """An open file of which the header was read and checked. Raises Refused and what is named below."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        nbytes = os.fstat(descriptor).st_size
        self.budget = Budget(nbytes)
        """For the header, and what the layout in it describes."""
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0).ljust(8, b"\0"))
        require(2 <= length <= min(nbytes - 8, _MAX_HEADER_BYTES), f"its header is said to be of {length} bytes")
        text = os.pread(descriptor, length, 8)
        require(len(text) == length, "it became shorter while it was read")
        self.budget.take(_reading_cost(text, 0))
        header = parse_json(text, f"{path}: its header", most_bytes=_MAX_HEADER_BYTES)
        require(type(header) is dict, "its header is no mapping")
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        require(type(self.metadata) is dict, "its metadata are no mapping")
        require(all(type(value) is str for value in self.metadata.values()), "its metadata are no texts")
        self._tensors: dict[str, Any] = header
        self._data_begin = 8 + length
        self._data_bytes = nbytes - self._data_begin

    def facts(self) -> dict[str, str]:
        """What Lastgood wrote into the metadata. Raises MismatchError if it wrote nothing."""
        if not {_LAYOUT, _ALIASES, _CHECKSUMS} <= self.metadata.keys():
            raise MismatchError(
                f"{self._path}: not exported by Lastgood; its tensors can be read with safetensors alone"
            )
        own = (key for key in self.metadata if key.startswith(_OWN))
        return {key.removeprefix(_OWN): self.metadata[key] for key in own}

    def places(self, tensors: Sequence[NamedTensor]) -> dict[str, tuple[int, int]]:
        """Begin and end of the bytes of each of `tensors`: these and no others, as the header has them."""
        found = {}
        require(len(tensors) == len(self._tensors), f"it holds {len(self._tensors)} tensors instead of {len(tensors)}")
        for tensor in tensors:
            entry = self._tensors.get(tensor.name)
            require(type(entry) is dict, f"it lacks {tensor.name[:100]}")
            assert entry is not None
            kind, shape, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
            alike = kind is not None and kind == _tag(tensor) and shape == list(tensor.shape)
            require(alike, f"{tensor.name[:100]} is {kind!r:.20} {shape!r:.60} in it, and another tensor in the layout")
            require(
                type(place) is list and len(place) == 2 and all(type(at) is int for at in place), "a place is damaged"
            )
            begin, end = place
            require(0 <= begin <= end <= self._data_bytes, f"{tensor.name[:100]} lies outside it")
            require(end - begin == tensor.nbytes, f"{tensor.name[:100]} has {end - begin} bytes, not {tensor.nbytes}")
            found[tensor.name] = (begin, end)
        ordered = sorted(found.values())
        require(all(one[1] <= two[0] for one, two in itertools.pairwise(ordered)), "its tensors lie one over another")
        return found

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Bytes of the data, in memory of their own."""
        return read_at(self._descriptor, self._data_begin + begin, end - begin)


def _scatter(target: torch.Tensor, content: torch.Tensor) -> None:
    """Put dense elements back where they lay in their block."""
    source = content.view(target.dtype).view(target.shape)
    for axis, step in enumerate(target.stride()):
        if step == 0:  # an expanded tensor: all of them are one
            target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    target.copy_(source)
