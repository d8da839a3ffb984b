"""Checkpoints as files of torch.save, made durable: shared by the systems whose papers persist that way.

Such a file is a pickle inside a zip. `archive` reads it, and runs nothing that is in it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.bounds import MOST_DEPTH, require
from lastgood.checkpointers.torch_files.archive import check_proportion, read_torch_file, reading_cost
from lastgood.errors import CorruptCheckpoint, NoCheckpoint, StateError, StorageError
from lastgood.files import (
    ReadableBy,
    entries_of,
    make_directory,
    open_new,
    open_regular,
    remove_temporary_files,
    storage_errors,
    sync_directory,
    temporary_beside,
)
from lastgood.state.compare import Keys
from lastgood.state.flatten import is_stateful
from lastgood.state.numpy_values import array_of_bytes, describe_numpy
from lastgood.state.optimizers import state_of

__all__ = ["TorchFiles", "map_containers", "pack_numpy", "plain_tree", "save_durably", "unpack_numpy"]

_log = logging.getLogger("lastgood")
_NAME = re.compile(r"checkpoint-(\d{8,})-step-(\d+)\.pt")
_OLDER_TEMPORARY = re.compile(r"checkpoint-\d{8,}-step-\d+\.tmp")
_FORMAT = "lastgood-torch-1"


@dataclass(frozen=True)
class TorchFiles:
    """Complete checkpoints ``checkpoint-SEQUENCE-step-STEP.pt`` in one directory.

    A file under its final name is complete and durable. The newest is the one with the highest sequence: after a return
    to an earlier step, the steps of the incarnation that was given up are older, though their numbers are higher.
    """

    directory: Path
    keep: int
    readable_by: ReadableBy = ReadableBy.OWNER

    def prepare(self) -> None:
        """Remove what a killed process left half-written. Only under the directory's lock. Raises StorageError."""
        with storage_errors(self.directory, "preparing the checkpoint directory"):
            make_directory(self.directory, self.readable_by.directory_mode)
            remove_temporary_files(self.directory, _OLDER_TEMPORARY)

    def write(
        self,
        step: int,
        tree: Mapping[str, Any],
        phases: list[tuple[str, float, float]] | None = None,
        objects: frozenset[Keys] | None = None,
    ) -> int:
        """torch.save, fsync, rename, fsync of the directory; then drop all but the newest `keep`. Returns the bytes.

        When it did what is added to `phases`, for `CheckpointEvent.phases`. `objects` says which entries are what an
        object's state_dict returned.

        Raises StorageError naming the file and the bytes needed; the older checkpoints stay.
        """
        sequence = max((known for known, _, _ in self.files()), default=0) + 1
        final = self.directory / f"checkpoint-{sequence:08d}-step-{step}.pt"
        document = {"format": _FORMAT, "step": step, "state": pack_numpy(dict(tree), "state")}
        if objects is not None:
            document["objects"] = sorted(objects, key=repr)
        written = save_durably(document, final, reading_cost(document, "state"), self.readable_by.file_mode, phases)
        for _, _, old in self.files()[self.keep :]:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s: cannot remove an old checkpoint: %s", old, error)
        return written

    @staticmethod
    def check(tree: Mapping[str, Any]) -> None:
        """Raise StateError, naming the place, for what `write` would refuse; nothing is written."""
        reading_cost(pack_numpy(dict(tree), "state"), "state")
        dtypes: dict[int, tuple[torch.dtype, str]] = {}
        for path, tensor in _named_tensors(tree, "state"):
            if not tensor.numel():
                continue
            dtype, other = dtypes.setdefault(tensor.untyped_storage().data_ptr(), (tensor.dtype, path))
            if dtype != tensor.dtype:
                raise StateError(
                    f"{path} and {other} see the same memory as two dtypes, which torch.save does not write; give one "
                    "of them memory of its own with clone()"
                )

    def path_of(self, step: int) -> Path | None:
        """The newest file of a step."""
        return next((path for _, found, path in self.files() if found == step), None)

    def steps(self) -> list[int]:
        """Steps that have a file, newest first."""
        return [step for _, step, _ in self.files()]

    def files(self) -> list[tuple[int, int, Path]]:
        """Sequence, step and path of every file, newest first. Raises StorageError."""
        found = ((_NAME.fullmatch(path.name), path) for path in entries_of(self.directory))
        return sorted(((int(match[1]), int(match[2]), path) for match, path in found if match), reverse=True)

    def read(self, step: int | None) -> tuple[int, dict[str, Any], str, frozenset[Keys] | None]:
        """The newest readable checkpoint (or that of `step`): its step, tree and file name, and what are objects'.

        A file of an earlier version does not say the last: None.

        Raises NoCheckpoint, or CorruptCheckpoint if files are there and none of them can be read, naming each.
        """
        refused = []
        for _, candidate, path in self.files():
            if step is not None and candidate != step:
                continue
            try:
                tree, objects = self.read_file(path, candidate)
                return candidate, tree, str(path), objects
            except (CorruptCheckpoint, StorageError) as error:
                _log.warning("%s; trying the checkpoint before it", error)
                refused.append(str(error))
        if refused:
            raise CorruptCheckpoint(
                f"{self.directory}: no checkpoint can be read: {'; '.join(refused)}; bring a copy back, or move the "
                "directory away to begin again"
            )
        asked = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        raise NoCheckpoint(f"{self.directory}: no {asked}; files of steps {self.steps() or 'none'}")

    @staticmethod
    def read_file(path: Path, step: int) -> tuple[dict[str, Any], frozenset[Keys] | None]:
        """The checkpoint of `step` in one file, as `read` gives it. Raises CorruptCheckpoint, StorageError."""
        document = read_torch_file(path)
        if type(document) is not dict or document.get("format") != _FORMAT:
            raise CorruptCheckpoint(f"{path}: not a checkpoint of format {_FORMAT}")
        state = document.get("state")
        if type(state) is not dict:
            raise CorruptCheckpoint(f"{path}: holds no state")
        if document.get("step") != step:
            raise CorruptCheckpoint(f"{path}: is of step {str(document.get('step'))[:40]}, not of step {step}")
        unpacked: dict[str, Any] = unpack_numpy(state, str(path))
        objects = document.get("objects")
        if objects is None:
            return unpacked, None
        if type(objects) is not list or not all(type(keys) is tuple for keys in objects):
            raise CorruptCheckpoint(f"{path}: what is said of its objects is no list of keys")
        try:
            return unpacked, frozenset(objects)
        except TypeError as error:
            raise CorruptCheckpoint(f"{path}: what is said of its objects is no list of keys: {error}") from error


def save_durably(
    document: Mapping[str, Any],
    final: Path,
    cost: int,
    mode: int,
    phases: list[tuple[str, float, float]] | None = None,
) -> int:
    """torch.save, fsync, rename, fsync of the directory. Returns the bytes.

    `cost` is that of reading it, and `phases` as for `TorchFiles.write`. Raises StorageError naming the file and the
    bytes needed, StateError for what could not be read again; what was there under that name stays.
    """
    temporary = temporary_beside(final)
    began_s = time.perf_counter()
    try:
        os.close(open_new(temporary, mode=mode))
        torch.save(document, temporary)
        check_proportion(cost, temporary, str(final))
        written_s = time.perf_counter()
        with os.fdopen(open_regular(temporary), "rb") as file:
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_size
        flushed_s = time.perf_counter()
        temporary.replace(final)
        sync_directory(final.parent)
        if phases is not None:
            phases += [
                ("write", began_s, written_s),
                ("flush", written_s, flushed_s),
                ("commit", flushed_s, time.perf_counter()),
            ]
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, RuntimeError)):
            raise StorageError(_explain(temporary, document, error)) from error
        raise
    return written


_NUMPY = "lastgood.numpy"


def plain_tree(value: Any) -> Any:
    """`value` with every object that has state_dict/load_state_dict replaced by its state_dict; tensors stay live."""
    if isinstance(value, torch.Tensor):
        return value
    if is_stateful(value):
        return plain_tree(state_of(value, "state"))
    return map_containers(plain_tree, value)


def pack_numpy(value: Any, path: str, depth: int = 0) -> Any:
    """Replace numpy's values, whose byte order torch's unpickler would lose, by their bytes in a tensor.

    Raises StateError, naming the place below `path`, for what would not come back.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        description = describe_numpy(value.dtype, path)
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else None
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {_NUMPY: description, "shape": shape, "data": data}
    if type(value) in (dict, OrderedDict) and _NUMPY in value:
        raise StateError(f"{path}: the key {_NUMPY!r} is kept for Lastgood; name it otherwise")
    if depth > MOST_DEPTH:
        raise StateError(f"{path}: is deeper than {MOST_DEPTH} levels, or a container in it holds itself")
    return map_containers(lambda item: pack_numpy(item, path, depth + 1), value)


def unpack_numpy(value: Any, where: str) -> Any:
    """What `pack_numpy` was given. `where` names the file. Raises CorruptCheckpoint."""
    if type(value) not in (dict, OrderedDict) or _NUMPY not in value:
        return map_containers(lambda item: unpack_numpy(item, where), value)
    try:
        require(value.keys() == {_NUMPY, "shape", "data"}, "it has other entries")
        return _numpy_value(value[_NUMPY], value["shape"], value["data"])
    except (TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{where}: a value of numpy's in it is damaged: {error}") from error


def _numpy_value(description: Any, shape: Any, data: Any) -> Any:
    if data is not None and not (
        type(data) is torch.Tensor and data.dtype == torch.uint8 and data.dim() == 1 and data.is_contiguous()
    ):
        raise ValueError("its bytes are no tensor of bytes")
    content = b"" if data is None else data.numpy().data
    array = array_of_bytes(content, description, [] if shape is None else shape)
    return array[()] if shape is None else array


def map_containers(function: Callable[[Any], Any], value: Any) -> Any:
    """A container of plain trees with `function` applied to each item; anything else as it is."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, function(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value


def _named_tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _named_tensors(item, f"{path}[{number}]")


def _explain(path: Path, tree: Mapping[str, Any], error: BaseException) -> str:
    needed = sum(tensor.numel() * tensor.element_size() for _, tensor in _named_tensors(tree, "state"))
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return f"{path}: writing about {needed} bytes failed with {free} bytes free on that file system: {error}"
