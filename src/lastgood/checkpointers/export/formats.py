"""Checkpoints of a slot directory as files that other programs read, without the model's code.

Whatever is written appears under its name complete and durable, or not at all. docs/looking-inside.md says what each
format keeps.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lastgood._lazy import torch
from lastgood.bounds import memory_for
from lastgood.checkpointers.export.safetensors_file import SafetensorsPlan, load_safetensors, write_safetensors
from lastgood.checkpointers.export.selected import Selection, check_folder, plan_shards, write_shards
from lastgood.checkpointers.slots.contents import NamedTensor, named_tensors, read_blocks, read_layout
from lastgood.checkpointers.torch_files.archive import check_proportion, is_zip, read_torch_file, reading_cost
from lastgood.checkpointers.torch_files.files import map_containers, pack_numpy, unpack_numpy
from lastgood.errors import ConfigError, MismatchError, StateError, StorageError
from lastgood.files import (
    open_new,
    open_regular,
    remove_tree,
    storage_error,
    storage_errors,
    sync_directory,
    temporary_beside,
)
from lastgood.state import Layout, unflatten
from lastgood.storage import SlotInfo, SlotView
from lastgood.units import MIB, format_bytes

__all__ = [
    "ExportFormat",
    "Exported",
    "Written",
    "check_target",
    "export_checkpoint",
    "load_exported",
    "write_export",
]

WINDOW_BYTES = 64 * MIB
"""Read at once for a safetensors file."""


class ExportFormat(str, enum.Enum):
    """What a checkpoint can become."""

    SAFETENSORS = "safetensors"
    PT = "pt"
    DCP = "dcp"


_PROMISED = {".safetensors": ExportFormat.SAFETENSORS, ".pt": ExportFormat.PT, ".pth": ExportFormat.PT}
"""What other programs take a file of that name for: torch.load looks at the name, not at what is in the file."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    format: ExportFormat
    step: int
    tensors: int
    """Names of tensors and arrays."""
    nbytes: int
    """Of the file, or of all files in the directory."""
    seconds: float
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that were not written (safetensors only), and the name that holds the same tensor."""


class Written(NamedTuple):
    """What `write_export` wrote."""

    tensors: int
    """Names of tensors and arrays."""
    nbytes: int
    aliases: Mapping[str, str]
    """Names that were not written, and the name that holds the same tensor."""


def export_checkpoint(
    view: SlotView,
    info: SlotInfo,
    out: Path,
    to: ExportFormat,
    *,
    force: bool = False,
    threads: int = 4,
    window_bytes: int = WINDOW_BYTES,
    mode: int | None = None,
    selection: Selection | None = None,
    tell: Callable[[int], object] = int,
) -> Exported:
    """Write one committed checkpoint to `out`: a file, or for DCP a directory. Every byte read is checked.

    A safetensors file is written while `window_bytes` (or one block of the state, or 4 chunks of the slot) after the
    other are read; the other formats take one checkpoint's size of memory. An open SlotStore keeps the slot from being
    reused meanwhile; a view cannot, and raises CorruptCheckpoint when a training has reused it. What is at `out` is
    replaced only with `force`, and only by its like. A file gets `mode`, or what the umask leaves of 0666. With a
    `selection` (safetensors only) a part of it is written for other programs, which cannot be read back. `tell` hears
    of each block's bytes once they are read.

    Raises:
        ConfigError: `out` exists, or is not what could be replaced.
        StateError: the format cannot hold a tensor; names it, and a format that can.
        StorageError: no room (found before anything is written if it can be known), or a failed write.
        CorruptCheckpoint, MismatchError, WaitTimeout: the checkpoint cannot be read.
    """
    started = time.perf_counter()
    check_target(out, to, force, selection)
    with view.hold(info):
        layout = read_layout(view, info)
        tensors = named_tensors(layout)
        left = next((tensor for tensor in tensors if tensor.owner is not None), None)
        if left is not None:
            raise MismatchError(
                f"{info.path}: step {info.step}: {left.name} was written by rank {left.owner}, not by rank "
                f"{info.record.rank}; export the job, the directory that holds those of all ranks"
            )
        # Other formats take the whole state into memory anyway.
        window = max(window_bytes, 4 * info.record.chunk_bytes)
        window = window if to is ExportFormat.SAFETENSORS else layout.stream_bytes
        blocks = _told(read_blocks(view, info, layout, threads, window), tell)
        written = write_export(out, to, layout, info, blocks, force=force, mode=mode, selection=selection)
    seconds = time.perf_counter() - started
    return Exported(out, to, info.step, written.tensors, written.nbytes, seconds, written.aliases)


def _told(
    blocks: Iterator[tuple[int, torch.Tensor]], tell: Callable[[int], object]
) -> Iterator[tuple[int, torch.Tensor]]:
    for number, block in blocks:
        tell(block.numel())
        yield number, block
        del block  # before the next ones are made


def write_export(
    out: Path,
    to: ExportFormat,
    layout: Layout,
    info: SlotInfo,
    blocks: Iterator[tuple[int, torch.Tensor]],
    *,
    force: bool,
    mode: int | None = None,
    selection: Selection | None = None,
) -> Written:
    """Write a state from its layout and `blocks`, all of them in order.

    `info` is what the file says of its source; `out` was checked. Raises as `export_checkpoint`.
    """
    where = f"{info.path}: step {info.step}"
    tensors = named_tensors(layout)
    count = len(tensors)
    aliases: dict[str, str] = {}
    if to is not ExportFormat.PT:
        _check_elements(out, to, tensors, layout)
    if selection is not None and selection.chooses:
        chosen = plan_shards(tensors, selection, where, out)
        aliases, count = chosen.aliases, sum(map(len, chosen.files.values()))
        with _appearing(out, chosen.nbytes, force=force) as temporary:
            write_shards(temporary, chosen, selection, info, blocks, mode)
    elif to is ExportFormat.SAFETENSORS:
        plan = SafetensorsPlan(layout, tensors, info)
        aliases = plan.aliases
        with _appearing(out, plan.file_bytes, force=force) as temporary:
            write_safetensors(temporary, plan, blocks, mode)
    elif to is ExportFormat.PT:
        with _appearing(out, layout.payload_bytes, force=force) as temporary:
            os.close(open_new(temporary, mode=mode))
            _save_pt(temporary, out, unflatten(layout, [block for _, block in blocks], where))
    else:
        with _appearing(out, sum(tensor.nbytes for tensor in tensors), force=force) as temporary:
            _save_dcp(temporary, out, unflatten(layout, [block for _, block in blocks], where))
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else [out]
    return Written(count, sum(path.stat().st_size for path in files), aliases)


def _check_elements(out: Path, to: ExportFormat, tensors: Sequence[NamedTensor], layout: Layout) -> None:
    """Refuse views whose elements, one by one, are far more than the memory that they look at. Raises StateError."""
    elements, stored = sum(tensor.nbytes for tensor in tensors), layout.payload_bytes
    if elements > memory_for(stored):
        raise StateError(
            f"{out}: elements of {format_bytes(elements)} in memory of {format_bytes(stored)} (expanded tensors), and "
            f"{to.value} writes each of them; export to pt, which keeps memory as it is"
        )


def load_exported(path: Path | str) -> dict[str, Any]:
    """The tree of an exported safetensors or .pt file, as `unflatten` gives it: to the bit, shared memory included.

    Raises StorageError, CorruptCheckpoint, and MismatchError for a file that Lastgood did not export.
    """
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path  # named by a user, who may have put a link there
    if path.is_dir():
        raise StorageError(f"{path}: is a directory; one of torch.distributed.checkpoint is read with torch")
    with storage_errors(path, "reading"), os.fdopen(open_regular(path), "rb") as file:
        head = file.read(9)
    return _load_pt(path) if is_zip(head) else load_safetensors(path)


# -- appearing complete ------------------------------------------------------------------------------------------------


def check_target(out: Path, to: ExportFormat, force: bool, selection: Selection | None = None) -> None:
    """Refuse, with ConfigError, a place where an export may not be written, and a selection for another format."""
    if selection is not None and selection.chooses and to is not ExportFormat.SAFETENSORS:
        raise ConfigError(f"{to.value} holds all of a checkpoint as it is; a choice of it is written as safetensors")
    if selection is not None and selection.shard_bytes is not None:
        check_folder(out, force)
        return
    promised = _PROMISED.get(out.suffix.lower())
    if promised not in (None, to):
        raise ConfigError(
            f"{out}: what is called {out.suffix} is read as {promised.value}, and {to.value} is to be written; give "
            f"--to {promised.value}, or another name"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no directory {out.parent}; make it first")
    if not os.path.lexists(out):
        return
    if not force:
        raise ConfigError(f"{out}: is there already; choose another name, or give --force to replace it")
    if to is ExportFormat.DCP:
        # Never remove a directory that someone named by mistake.
        if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / ".metadata").is_file()):
            raise ConfigError(f"{out}: is no distributed checkpoint (a directory with .metadata), so not replaced")
    elif not out.is_file():
        raise ConfigError(f"{out}: is not a file, so not replaced")


@contextlib.contextmanager
def _appearing(out: Path, needed_bytes: int, *, force: bool) -> Iterator[Path]:
    """A temporary name beside `out`, for a file or directory that then appears at `out`, durable; or is removed."""
    free = shutil.disk_usage(out.parent).free
    if needed_bytes > free:
        raise StorageError(
            f"{out}: exporting takes {needed_bytes} bytes ({format_bytes(needed_bytes)}), and its file system has "
            f"{format_bytes(free)} free; free some or use another directory"
        )
    temporary = temporary_beside(out)
    try:
        yield temporary
        _sync(temporary)
        if not force and os.path.lexists(out):
            raise ConfigError(f"{out}: appeared meanwhile, and was not replaced")
        _take_place(temporary, out)
        sync_directory(out.parent)
    except BaseException as error:
        remove_tree(temporary)
        if isinstance(error, OSError):
            raise storage_error(error, out, "exporting", needed_bytes) from error
        raise


def _sync(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _sync(inner)
        sync_directory(path)
        return
    with os.fdopen(open_regular(path), "rb") as file:
        os.fsync(file.fileno())


def _take_place(temporary: Path, out: Path) -> None:
    if not temporary.is_dir() or not out.is_dir():
        temporary.replace(out)
        return
    # A directory with files in it cannot be renamed over.
    old = temporary_beside(out)
    out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        old.rename(out)
        raise
    remove_tree(old)


# -- torch's own formats -----------------------------------------------------------------------------------------------


def _save_pt(temporary: Path, out: Path, tree: dict[str, Any]) -> None:
    packed = pack_numpy(_one_dtype_each(tree, {}), "state")
    cost = reading_cost(packed, "state")
    try:
        torch.save(packed, temporary)
        check_proportion(cost, temporary, str(out))
    except RuntimeError as error:  # what torch's writer makes of a full disk
        raise StorageError(f"{out}: torch.save failed: {error}") from error


def _one_dtype_each(value: Any, dtypes: dict[int, torch.dtype]) -> Any:
    """`value` with copies of tensors whose memory holds a tensor of another dtype too, which torch.save refuses."""
    if isinstance(value, torch.Tensor):
        if dtypes.setdefault(value.untyped_storage().data_ptr(), value.dtype) != value.dtype:
            return value.clone()
        return value
    return map_containers(lambda item: _one_dtype_each(item, dtypes), value)


def _load_pt(path: Path) -> dict[str, Any]:
    packed = read_torch_file(path)
    if type(packed) not in (dict, OrderedDict):  # a module's own state_dict() is an OrderedDict
        raise MismatchError(f"{path}: not exported by Lastgood: it holds a {type(packed).__name__}")
    tree: dict[str, Any] = unpack_numpy(packed, str(path))
    return tree


def _save_dcp(temporary: Path, out: Path, tree: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            # One process is what is meant here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            save(tree, checkpoint_id=str(temporary), no_dist=True)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        if isinstance(reason, ValueError):  # two paths that give one name, the one thing it cannot hold
            raise StateError(
                f"{out}: torch.distributed.checkpoint cannot hold this state: {reason}; export to pt, which can"
            ) from error
        if isinstance(reason, OSError) or not isinstance(reason, Exception):
            raise reason from error
        raise StorageError(f"{out}: torch.distributed.checkpoint failed: {reason}") from error
