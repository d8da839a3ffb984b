"""One rank's items of a DCP plan in files that torch's own reader reads: each item a file of torch.save, end to end.

What torch's writer leaves out is here: an error in any thread fails the save, each file is flushed to the disk before
the save goes on, and its length and CRC32C are taken while it is written, for the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lastgood.checkpointers.directories.local import LocalDraft
from lastgood.checkpointers.directories.store import SummedStream
from lastgood.errors import StateError, StorageError
from lastgood.files import ReadableBy, storage_error
from lastgood.integrations.dcp.slot_items import Place

__all__ = ["write_torch_files"]


def write_torch_files(
    folder: Path,
    name: Callable[[int], str],
    plan: SavePlan,
    planner: SavePlanner,
    threads: int,
    readable_by: ReadableBy,
) -> list[WriteResult]:
    """Write all items of a plan into up to `threads` files, with the names that `name` gives to numbers.

    When this returns they are durable. Raises StorageError, StateError.
    """
    draft = LocalDraft(0, folder)
    bins = [items for items in _spread(plan.items, threads) if items]
    with ThreadPoolExecutor(len(bins), "lastgood-dcp") as workers:
        writes = [
            workers.submit(_write_file, draft, name(number), items, planner, readable_by)
            for number, items in enumerate(bins)
        ]
        failures = [error for error in (write.exception() for write in writes) if error is not None]
    if failures:
        raise failures[0]
    return [result for write in writes for result in write.result()]


def _spread(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """The items in `count` lists of about as many bytes each, the largest first."""
    bins: list[list[WriteItem]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(items, key=lambda one: one.tensor_storage_size() or 0, reverse=True):
        least = loads.index(min(loads))
        bins[least].append(item)
        loads[least] += (item.tensor_storage_size() or 0) + 1
    return bins


def _write_file(
    draft: LocalDraft, name: str, items: Sequence[WriteItem], planner: SavePlanner, readable_by: ReadableBy
) -> list[WriteResult]:
    path = draft.path / name
    written: list[tuple[WriteItem, int, int]] = []
    stream: SummedStream | None = None
    try:
        with draft.create(name) as stream:
            path.chmod(readable_by.file_mode)
            for item in items:
                begin = stream.nbytes
                _write_item(stream, item, planner)
                written.append((item, begin, stream.nbytes - begin))
    except Exception as error:
        path.unlink(missing_ok=True)
        cause = (stream and stream.failure) or error  # torch says less of it
        if isinstance(cause, OSError):
            raise storage_error(cause, path, "writing") from error
        raise StorageError(f"{path}: writing failed: {error}") from error
    sums = (stream.nbytes, stream.checksum)
    return [
        WriteResult(item.index, nbytes, Place(_StorageInfo(name, begin, nbytes), sums))
        for item, begin, nbytes in written
    ]


def _write_item(stream: SummedStream, item: WriteItem, planner: SavePlanner) -> None:
    found = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        if isinstance(found, torch.Tensor):
            raise StateError(f"{item.index.fqn}: planned as bytes, and the planner gave a tensor")
        stream.write(found.getvalue())
        return
    if not isinstance(found, torch.Tensor):
        raise StateError(f"{item.index.fqn}: planned as a tensor, and the planner gave a {type(found).__name__}")
    tensor = found.detach().cpu()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save would write all of the storage
    torch.save(tensor, stream)
