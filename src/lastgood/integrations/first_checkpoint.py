"""Weights of other programs as the first checkpoint of a directory: torch.save, safetensors, DCP, DeepSpeed.

Nothing that is in a file runs: pickles are read through the allow-list of `checkpointers.torch_files` and of DCP's
metadata.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.export.formats import load_exported
from lastgood.checkpointers.export.safetensors_file import read_facts
from lastgood.checkpointers.export.selected import INDEX
from lastgood.checkpointers.pccheck.system import PCcheck
from lastgood.checkpointers.rank_directory import rank_directories
from lastgood.checkpointers.recovery.found_here import found_in
from lastgood.checkpointers.torch_files.archive import is_zip, read_torch_file
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError
from lastgood.files import open_regular, storage_errors
from lastgood.text import parse_json, read_bytes

__all__ = ["Foreign", "import_checkpoint", "read_foreign"]

_TORCH_INDEX = "pytorch_model.bin.index.json"
_MOST_INDEX_BYTES = 64 << 20
_MOST_NAME_BYTES = 4096
_DEEPSPEED_MODEL = "mp_rank_00_model_states.pt"
_DEEPSPEED_LATEST = "latest"


@dataclass(frozen=True)
class Foreign:
    """What a place of another program holds."""

    kind: str
    """In words."""
    tree: Mapping[str, Any]
    """Entries of a state: "model", and whatever else it names."""
    step: int | None = None
    """Finished steps, if it says so."""


def read_foreign(source: Path, part: str = "model") -> Foreign:
    """Read a file, or a folder of shards, of DCP or of DeepSpeed. Plain tensors by name become the entry `part`.

    Raises ConfigError for what is none of these; CorruptCheckpoint, MismatchError and StorageError for what cannot be
    read.
    """
    if not source.exists():
        raise ConfigError(f"{source}: there is no such file or folder")
    if not source.is_dir():
        return _read_file(source, part)
    if (source / ".metadata").is_file():
        return _read_dcp(source, part)
    for index, read in ((INDEX, _safetensors), (_TORCH_INDEX, _torch_tensors)):
        if (source / index).is_file():
            return Foreign(f"shards ({index})", {part: _shards(source, index, read)})
    latest = source / _DEEPSPEED_LATEST
    folder = source
    if latest.is_file():
        name = read_bytes(latest, _MOST_NAME_BYTES).decode(errors="replace").strip()
        if "/" in name or name in ("", ".", ".."):
            raise CorruptCheckpoint(f"{latest}: names no folder beside it: {name[:80]!r}")
        folder = source / name
    if list(folder.glob("*model_states.pt")):
        return _read_deepspeed(folder, part)
    raise ConfigError(
        f"{source}: holds none of .metadata (DCP), {INDEX}, {_TORCH_INDEX}, {_DEEPSPEED_LATEST} or {_DEEPSPEED_MODEL} "
        "(DeepSpeed)"
    )


def import_checkpoint(source: Path, directory: Path, *, step: int | None = None, part: str = "model") -> Foreign:
    """Write what `source` holds as the first checkpoint of `directory`, durable at return; what was read.

    Its step is `step`, else what the source says, else 0. Raises as `read_foreign`, and ConfigError if the directory
    holds checkpoints already.
    """
    there = [str(one) for folder in (directory, *rank_directories(directory).values()) for one in found_in(folder)]
    if there:
        raise ConfigError(f"{there[0]}: an imported checkpoint must be the first one; choose another directory")
    foreign = read_foreign(source, part)
    number = step if step is not None else foreign.step or 0
    # What holds tensors goes into an object (a module, an optimizer); plain values are entries of their own.
    state = {name: _Entry(value) if _is_state(value) else value for name, value in foreign.tree.items()}
    checkpointer = PCcheck(directory, max_in_flight=1, keep=1)
    try:
        checkpointer.start(state)
        checkpointer.save(number)
        checkpointer.drain()
        event = checkpointer.events[-1]
        if event.outcome is not Outcome.DURABLE:
            raise CheckpointError(f"{directory}: {source} was read and could not be saved: {event.error}")
    finally:
        checkpointer.close()
    return Foreign(foreign.kind, foreign.tree, number)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


class _Entry:
    """Stands for the module or optimizer that a later training restores the entry into."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state


# -- files -------------------------------------------------------------------------------------------------------------


def _read_file(path: Path, part: str) -> Foreign:
    with storage_errors(path, "reading"), os.fdopen(open_regular(path, follow=True), "rb") as file:
        head = file.read(9)
    if not is_zip(head):
        try:
            read_facts(path)
        except MismatchError:
            return Foreign("safetensors", {part: _safetensors(path)})
        return Foreign("safetensors exported by Lastgood", load_exported(path))
    tree = load_exported(path)
    if tree and all(isinstance(value, torch.Tensor) for value in tree.values()):
        return Foreign("torch.save", {part: OrderedDict(tree)})
    if not all(type(name) is str for name in tree):
        raise MismatchError(f"{path}: its entries have no names, so they cannot be those of a state")
    return Foreign("torch.save", tree)


def _safetensors(path: Path) -> OrderedDict[str, Any]:
    """Plain tensors by name. Raises CorruptCheckpoint, StorageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with storage_errors(path, "reading"):
        try:
            found = load_file(path)
        except SafetensorError as error:
            raise CorruptCheckpoint(f"{path}: not a complete file of safetensors: {error}") from error
    return OrderedDict(sorted(found.items()))


def _torch_tensors(path: Path) -> OrderedDict[str, Any]:
    found = read_torch_file(path)
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise MismatchError(f"{path}: holds something else than tensors by name")
    return OrderedDict(found)


def _shards(folder: Path, index: str, read: Callable[[Path], Mapping[str, Any]]) -> OrderedDict[str, Any]:
    """All tensors that an index of Hugging Face's names."""
    path = folder / index
    document = parse_json(read_bytes(path, _MOST_INDEX_BYTES), str(path), most_bytes=_MOST_INDEX_BYTES)
    weights = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weights, dict) or not all(type(file) is str and "/" not in file for file in weights.values()):
        raise CorruptCheckpoint(f"{path}: names no files of this folder")
    read_files = {file: read(folder / file) for file in sorted(set(weights.values()))}
    missing = [name for name, file in weights.items() if name not in read_files[file]]
    if missing:
        raise CorruptCheckpoint(
            f"{folder / weights[missing[0]]}: lacks {missing[0]!r:.80}, which {index} says is there"
        )
    return OrderedDict((name, read_files[file][name]) for name, file in weights.items())


# -- folders -----------------------------------------------------------------------------------------------------------


def _read_dcp(folder: Path, part: str) -> Foreign:
    """Whole tensors, whoever wrote them; DCP has no names but paths joined by dots."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from lastgood.integrations.dcp.reader import LastgoodReader

    reader = LastgoodReader(folder)
    found: dict[str, Any] = {}
    for name, about in reader.read_metadata().state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            found[name] = torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
    if not found:
        raise MismatchError(f"{folder}: holds no tensors")
    load(found, storage_reader=LastgoodReader(folder), no_dist=True)
    tree: dict[str, OrderedDict[str, Any]] = {}
    for name, tensor in found.items():
        entry, dot, rest = name.partition(".")
        if dot:
            tree.setdefault(entry, OrderedDict())[rest] = tensor
        else:
            tree.setdefault(part, OrderedDict())[name] = tensor
    if len(tree) > 1 and part not in tree:
        # Layers of a bare model, not entries of a state.
        return Foreign("torch.distributed.checkpoint", {part: OrderedDict(found)})
    return Foreign("torch.distributed.checkpoint", {part: tree[part]} if part in tree else {part: OrderedDict(found)})


def _read_deepspeed(folder: Path, part: str) -> Foreign:
    files = sorted(path.name for path in folder.glob("*model_states.pt"))
    if files != [_DEEPSPEED_MODEL]:
        spread = any(name.startswith("zero_pp_rank") for name in files)
        why = "by ZeRO's third stage" if spread else "by tensor parallelism"
        raise MismatchError(
            f"{folder}: its weights are spread over {len(files)} files {why}; zero_to_fp32.py of that folder puts them "
            "together in one that can be imported"
        )
    found = read_torch_file(folder / _DEEPSPEED_MODEL)
    module = found.get("module") if isinstance(found, dict) else None
    if not isinstance(module, Mapping) or not module:
        raise MismatchError(f"{folder / _DEEPSPEED_MODEL}: holds no module")
    steps = found.get("global_steps")
    return Foreign("DeepSpeed", {part: OrderedDict(module)}, steps if type(steps) is int and steps >= 0 else None)
