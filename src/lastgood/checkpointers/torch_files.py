"""Checkpoints as files of torch.save, made durable: shared by the systems whose papers persist that way.

Such a file is a pickle inside a zip. It is read with ``weights_only=True``, torch's allow-list unpickler.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lastgood._lazy import lazy_module
from lastgood.errors import CorruptCheckpoint, NoCheckpoint, StorageError
from lastgood.state.flatten import is_stateful

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["TorchFiles", "plain_tree"]

_log = logging.getLogger("lastgood")
_NAME = re.compile(r"step-(\d{12})\.pt")
_FORMAT = "lastgood-torch-1"


class TorchFiles:
    """Whole checkpoints ``step-N.pt`` in one directory; a file under its final name is complete and durable."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def prepare(self) -> None:
        """Make the directory, and remove what a killed process left half-written."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob("*.tmp"):
            leftover.unlink()

    def write(self, step: int, tree: Mapping[str, Any]) -> int:
        """torch.save, fsync, rename, fsync of the directory; then drop all but the newest `keep`. Returns the bytes.

        Raises StorageError naming the file and the bytes needed; the older checkpoints stay.
        """
        final = self.directory / f"step-{step:012d}.pt"
        temporary = final.with_suffix(".tmp")
        try:
            torch.save({"format": _FORMAT, "step": step, "state": dict(tree)}, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
                written = os.fstat(file.fileno()).st_size
            temporary.replace(final)
            _fsync_directory(self.directory)
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(_explain(temporary, tree, error)) from error
        for old in self.steps()[self.keep :]:
            (self.directory / f"step-{old:012d}.pt").unlink(missing_ok=True)
        return written

    def steps(self) -> list[int]:
        """Steps that have a file, newest first."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def read(self, step: int | None) -> tuple[int, dict[str, Any], str]:
        """The newest readable checkpoint (or that of `step`): its step, tree and file name.

        Raises NoCheckpoint, naming what was found and why it was not taken.
        """
        wanted = self.steps() if step is None else [found for found in self.steps() if found == step]
        refused = []
        for candidate in wanted:
            path = self.directory / f"step-{candidate:012d}.pt"
            try:
                return candidate, self._load(path), str(path)
            except CorruptCheckpoint as error:
                _log.warning("%s; trying the checkpoint before it", error)
                refused.append(str(error))
        asked = "whole checkpoint" if step is None else f"whole checkpoint of step {step}"
        raise NoCheckpoint(
            f"{self.directory}: no {asked}; files of steps {self.steps() or 'none'}"
            + "".join(f"; {why}" for why in refused)
        )

    def _load(self, path: Path) -> dict[str, Any]:
        with torch.serialization.safe_globals(_allowed_globals()):
            try:
                # torch.save stores a CRC-32 of each tensor, which torch.load does not look at.
                with zipfile.ZipFile(path) as archive:
                    damaged = archive.testzip()
                if damaged is not None:
                    raise CorruptCheckpoint(f"{path}: the checksum of {damaged} does not hold")
                document = torch.load(path, map_location="cpu", weights_only=True)
            except CorruptCheckpoint:
                raise
            except Exception as error:
                # torch.load raises whatever the damaged bytes provoke: RuntimeError, UnpicklingError, EOFError,
                # KeyError.
                raise CorruptCheckpoint(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise CorruptCheckpoint(f"{path}: not a checkpoint of format {_FORMAT}")
        state = document["state"]
        if not isinstance(state, dict):
            raise CorruptCheckpoint(f"{path}: holds no state")
        return state


def plain_tree(value: Any) -> Any:
    """`value` with every object that has state_dict/load_state_dict replaced by its state_dict; tensors stay live."""
    if isinstance(value, torch.Tensor):
        return value
    if is_stateful(value):
        return plain_tree(value.state_dict())
    if type(value) in (dict, OrderedDict):
        return type(value)((key, plain_tree(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(plain_tree(item) for item in value)
    return value


def _allowed_globals() -> list[Any]:
    multiarray = importlib.import_module("numpy._core.multiarray")  # numpy's own home of what pickles name
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OSUVMm"}
    return [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype, *dtypes, Counter]


def _explain(path: Path, tree: Mapping[str, Any], error: BaseException) -> str:
    needed = _tensor_bytes(tree)
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return f"{path}: writing about {needed} bytes failed with {free} bytes free on that file system: {error}"


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
