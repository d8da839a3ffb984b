"""Where read items come from: slot files of Lastgood's and files of torch's own format, or objects with the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.planner import ReadItem

from lastgood.bounds import Budget, Refused, require
from lastgood.checkpointers.ranks.box_reader import BoxReader
from lastgood.checkpointers.ranks.boxes import Overlap
from lastgood.checkpointers.slots.contents import NamedTensor, read_timeout_s
from lastgood.checkpointers.torch_files.archive import TorchFile, reading
from lastgood.errors import CorruptCheckpoint
from lastgood.files import open_regular
from lastgood.state import Layout
from lastgood.storage import SlotInfo, SlotView
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.view import RemoteInfo, RemotePath, RemoteView
from lastgood.storage.standalone_slot import look_at_standalone_slot
from lastgood.units import MIB

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["ObjectItems", "SlotItems", "TorchItems", "TorchObjects", "Wanted"]

_REQUEST_BYTES = 32 * MIB


@dataclass(frozen=True)
class Wanted:
    """A tensor's read item, with what is stored and where it goes."""

    item: ReadItem
    file: str
    begin: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the part that is stored there."""
    target: torch.Tensor


class SlotItems:
    """Items in the slot files of one save, each chunk checked before it is used.

    Raises CorruptCheckpoint, also for a file of another save, StorageError, WaitTimeout.
    """

    def __init__(self, folder: Path, save_id: bytes | None, threads: int) -> None:
        self._view = SlotView(folder)
        self._save_id = save_id
        self._threads = threads
        self._infos: dict[str, SlotInfo] = {}
        self._window: tuple[str, int, bytes] = ("", 0, b"")
        """File, offset in its stream, and bytes that were read last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()

    def read_bytes(self, file: str, begin: int, nbytes: int) -> bytes:
        """A byte item. They lie one after another, many in a chunk, so what was read for one is kept for the next."""
        name, first, content = self._window
        if name != file or not first <= begin <= begin + nbytes <= first + len(content):
            info = self._info(file)
            chunk = info.record.chunk_bytes
            first = begin - begin % chunk
            last = min(-(-(begin + nbytes) // chunk) * chunk, info.stream_bytes)
            content = self._view.read_bytes(
                info, first, max(begin + nbytes, last) - first, read_timeout_s(last - first)
            )
            self._window = (file, first, content)
        return content[begin - first : begin - first + nbytes]

    def read(self, wanted: Sequence[Wanted], *, cast: bool) -> None:
        """Read tensors, or boxes of them, into their targets; with `cast` converted to the targets' dtypes."""
        files = list(dict.fromkeys(one.file for one in wanted))
        infos = [self._info(name) for name in files]
        layouts = [Layout(["d", []], (info.stream_bytes,), 0) for info in infos]
        reader = BoxReader([self._view] * len(files), infos, layouts, self._threads)
        converted: list[tuple[Wanted, torch.Tensor]] = []
        for one in wanted:
            if not one.target.numel():
                continue
            if prod(one.shape) * one.dtype.itemsize != one.nbytes:
                raise CorruptCheckpoint(
                    f"{self._view.directory}: {one.item.storage_index.fqn}: {one.nbytes} bytes for {one.dtype} "
                    f"{one.shape}"
                )
            target = one.target
            if cast and target.dtype != one.dtype:
                target = torch.empty(target.shape, dtype=one.dtype, device="cpu")
                converted.append((one, target))
            rank = files.index(one.file)
            box = Overlap(tuple(one.item.storage_offsets), (0,) * target.dim(), tuple(one.item.lengths))
            reader.want(rank, _stored(one), box, target)
        reader.finish()
        for one, read in converted:
            one.target.copy_(read)

    def _info(self, file: str) -> SlotInfo:
        if file not in self._infos:
            path = self._view.directory / file
            info = look_at_standalone_slot(path)
            if self._save_id is None or info.record.job_id != self._save_id:
                of = "none" if self._save_id is None else self._save_id.hex()
                raise CorruptCheckpoint(
                    f"{path}: is of save {info.record.job_id.hex()}, and the metadata of save {of}: files of two saves"
                )
            self._infos[file] = info
        return self._infos[file]


class ObjectItems(SlotItems):
    """As `SlotItems`, of the parts of a commit; a part by its name is `info_named`'s to find."""

    def __init__(self, client: ObjectClient, info_named: Callable[[str], RemoteInfo], threads: int) -> None:
        super().__init__(Path("/"), None, threads)
        self._view = RemoteView(client)
        self._info_named = info_named

    def _info(self, file: str) -> SlotInfo:
        return self._info_named(file)


def _stored(one: Wanted) -> NamedTensor:
    strides = tuple(prod(one.shape[axis + 1 :]) for axis in range(len(one.shape)))
    name, dtype = one.item.storage_index.fqn, str(one.dtype).removeprefix("torch.")
    return NamedTensor(name, "", 0, one.begin, dtype, one.shape, strides, one.dtype.itemsize)


class TorchItems:
    """Items in files that torch's FileSystemWriter wrote: each a file of torch.save, read as data.

    Raises CorruptCheckpoint, StorageError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_bytes(self, file: str, begin: int, nbytes: int) -> bytes:
        """A byte item."""
        with reading(self._folder / file), self._piece(file, begin, nbytes) as (descriptor, offset):
            content = os.pread(descriptor, nbytes, offset)
            require(len(content) == nbytes, f"it ends before byte {begin + nbytes}")
            return content

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Read tensors, or boxes of them, into their targets. One stored tensor at a time is in memory."""
        for one in sorted(wanted, key=lambda one: (one.file, one.begin)):
            where = self._folder / f"{one.file}: {one.item.storage_index.fqn}"
            with reading(where), self._piece(one.file, one.begin, one.nbytes) as (descriptor, offset):
                found = TorchFile(descriptor, offset, one.nbytes, Budget(one.nbytes)).read()
                if not isinstance(found, torch.Tensor) or found.dtype != one.dtype or tuple(found.shape) != one.shape:
                    raise Refused(f"there is something else than a tensor of {one.dtype} {one.shape}")
                for axis, (first, size) in enumerate(zip(one.item.storage_offsets, one.item.lengths, strict=True)):
                    found = found.narrow(axis, first, size)
                one.target.copy_(found.detach())

    @contextlib.contextmanager
    def _piece(self, file: str, begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """A descriptor, and where in it these bytes of a file begin."""
        with reading(self._folder / file):
            if file not in self._descriptors:
                self._descriptors[file] = open_regular(self._folder / file)
                self._stack.callback(os.close, self._descriptors[file])
            size = os.fstat(self._descriptors[file]).st_size
            if begin + nbytes > size:
                raise Refused(f"bytes {begin} to {begin + nbytes} lie beyond the end of the file, which has {size}")
        yield self._descriptors[file], begin


class TorchObjects(TorchItems):
    """As `TorchItems`, of objects: the bytes of one item at a time are fetched, into memory."""

    def __init__(self, client: ObjectClient) -> None:
        super().__init__(RemotePath(client.place))
        self._client = client

    @contextlib.contextmanager
    def _piece(self, file: str, begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
        descriptor = os.memfd_create("lastgood-item", os.MFD_CLOEXEC)
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as memory:
                for at in range(begin, begin + nbytes, _REQUEST_BYTES):
                    memory.write(self._client.get_range(file, at, min(_REQUEST_BYTES, begin + nbytes - at)))
            yield descriptor, 0
        finally:
            os.close(descriptor)
