"""DeepSpeed's `save_checkpoint` and `load_checkpoint` through Lastgood's storage. docs/deepspeed.md.

DeepSpeed makes its checkpoint engine in a factory that knows four of its own. But the engine it made is an attribute of
the DeepSpeedEngine, and everything it saves and loads goes through that; so `use_lastgood` puts another subclass of
DeepSpeed's CheckpointEngine there. DeepSpeed itself is not changed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.bounds import Refused
from lastgood.checkpointers.events import CheckpointEvent
from lastgood.checkpointers.slots.contents import read_tree
from lastgood.checkpointers.torch_files.archive import read_torch_file
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, NoCheckpoint
from lastgood.files import ReadableBy, local_path, make_directory, readers_of, storage_error
from lastgood.integrations.deepspeed_live import import_deepspeed
from lastgood.integrations.deepspeed_objects import build_records, decode_objects, listed_classes
from lastgood.integrations.deepspeed_saves import SaveOptions, TagInfo, TagSaves, own_memory
from lastgood.storage import SlotView
from lastgood.storage.reader import READ_THREADS
from lastgood.storage.standalone_slot import ROOT, is_standalone_slot, look_at_standalone_slot
from lastgood.units import MIB

__all__ = ["LastgoodFiles", "check_interface", "export_torch", "use_lastgood"]

_log = logging.getLogger("lastgood")

_KNOWN_VERSIONS = "0.17.1 to 0.19.8"
_METHODS = {
    "create": ["self", "info"],
    "save": ["self", "state_dict", "path"],
    "makedirs": ["self", "path", "exist_ok"],
    "load": ["self", "path", "map_location"],
    "commit": ["self", "info"],
    "is_data_parallel_writer": ["self", "dp_rank"],
    "is_decoupled": ["self"],
    "get_commit_info": ["self"],
    "cleanup": ["self"],
    "preserves_storage_sharing": ["self"],
}
"""What this module implements or relies on, with the names of the parameters."""
_LATER_METHODS = {"preserves_storage_sharing"}
"""Older versions do not ask."""
_ABSTRACT = {"create", "save", "load", "commit"}
_INFO_FIELDS = ["tag", "save_dir", "save_latest"]


def use_lastgood(
    engine: Any,
    *,
    background: bool = False,
    writer_threads: int = 2,
    pool_bytes: int = 256 * MIB,
    timeout_s: float = 600.0,
    readable_by: ReadableBy | str = ReadableBy.OWNER,
) -> LastgoodFiles:
    """Let a DeepSpeedEngine save and load through Lastgood. Call it on every rank, after `deepspeed.initialize`.

    Args:
        engine: what `deepspeed.initialize` returned.
        background: `save_checkpoint` returns once the state has left the training's memory; DeepSpeed asks at each
            later optimizer step whether all ranks are done, and only then is the tag named in ``latest``. Call `drain`
            before a training ends. Otherwise a tag is durable when `save_checkpoint` returns.
        writer_threads: threads that write one file.
        pool_bytes: host memory of each rank for data on its way to the disk. If a state is larger, a save waits for
            the disk to take the rest.
        timeout_s: how long a rank waits for its own disk.
        readable_by: who may read a tag's files, and its folder if it is new: ``owner``, ``group`` or ``all``.

    Returns the checkpoint engine that was put in place; `events` tells what became of each save.

    Raises ConfigError if the installed DeepSpeed has another interface, the engine's configuration chose a
    checkpoint engine of its own or offloads the optimizer to NVMe, or an option cannot be.
    """
    if writer_threads < 1 or pool_bytes < 1 or timeout_s <= 0:
        raise ConfigError(
            f"use_lastgood: writer_threads, pool_bytes and timeout_s must be positive: {writer_threads}, {pool_bytes}, "
            f"{timeout_s}"
        )
    check_interface()
    _check_engine(engine, background)
    options = SaveOptions(writer_threads, pool_bytes, timeout_s, readers_of(readable_by, "use_lastgood"))
    before = engine.checkpoint_engine
    if isinstance(before, LastgoodFiles):
        before.close()
    engine.checkpoint_engine = _engine_class()(engine.device, lambda: int(engine.global_steps), options, background)
    placed: LastgoodFiles = engine.checkpoint_engine
    return placed


def check_interface() -> None:
    """Raise ConfigError, naming both versions, where DeepSpeed's checkpoint engines are not what this module knows.

    Signatures are compared, not numbers alone: a version that nobody has seen yet is used if nothing has changed.
    """
    deepspeed = import_deepspeed()

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"DeepSpeed {deepspeed.__version__} is installed, and this Lastgood knows the checkpoint engines of "
            f"{_KNOWN_VERSIONS}: {what}; install one of those, or a newer Lastgood"
        )

    try:
        from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
        from deepspeed.runtime.engine import DeepSpeedEngine
    except ImportError as error:
        raise refuse(f"the interface is not there ({error})") from error
    for name, parameters in _METHODS.items():
        method = getattr(CheckpointEngine, name, None)
        if method is None and name in _LATER_METHODS:
            continue
        if method is None:
            raise refuse(f"CheckpointEngine.{name} is missing")
        found = list(inspect.signature(method).parameters)
        if found != parameters:
            raise refuse(f"CheckpointEngine.{name} takes {found} instead of {parameters}")
    unknown = set(getattr(CheckpointEngine, "__abstractmethods__", ())) - _ABSTRACT
    if unknown:
        raise refuse(f"CheckpointEngine wants {sorted(unknown)}")
    fields = [one.name for one in dataclasses.fields(CheckpointCommitInfo)]
    if fields != _INFO_FIELDS:
        raise refuse(f"CheckpointCommitInfo has {fields} instead of {_INFO_FIELDS}")
    if not hasattr(DeepSpeedEngine, "_commit_decoupled_checkpoint"):
        raise refuse("DeepSpeedEngine._commit_decoupled_checkpoint is missing")


def _check_engine(engine: Any, background: bool) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if not isinstance(engine, DeepSpeedEngine):
        raise ConfigError(
            f"use_lastgood: a {type(engine).__name__} is no DeepSpeedEngine; pass the first thing that "
            "deepspeed.initialize returns"
        )
    chosen = engine.checkpoint_engine
    if not isinstance(chosen, (TorchCheckpointEngine, LastgoodFiles)):
        raise ConfigError(
            f"use_lastgood: DeepSpeed's configuration chose {type(chosen).__name__}; take checkpoint.writer, nebula "
            "and datastates out of it"
        )
    if engine.zero_nvme_offload_optimizer():
        raise ConfigError(
            "use_lastgood: the optimizer is offloaded to NVMe, and DeepSpeed copies those files past its checkpoint "
            "engine; offload to the CPU instead"
        )
    if background and isinstance(engine, PipelineEngine):
        raise ConfigError("use_lastgood: a PipelineEngine never asks whether a background save is done; leave it out")


class LastgoodFiles:
    """DeepSpeed's checkpoint engine on Lastgood's storage. Made by `use_lastgood`; DeepSpeed calls its methods."""

    def __init__(
        self, device: torch.device, step: Callable[[], int], options: SaveOptions, background: bool = False
    ) -> None:
        self.name = "LastgoodCheckpointEngine"
        self._saves = TagSaves(device, step, options)
        self._background = background
        self._loaded: dict[Path, tuple[bytes, Path]] = {}
        """For each tag's folder: a file that was loaded, and the save that it is from."""

    @property
    def events(self) -> list[CheckpointEvent]:
        """What became of the last hundred saves, the oldest first."""
        return self._saves.events

    def drain(self) -> None:
        """Collective: finish a background save that is in progress, and name it in ``latest``.

        Raises CheckpointError, the same on all ranks, if it failed.
        """
        trouble = self._finish()
        if trouble:
            raise CheckpointError(trouble)

    def close(self) -> None:
        """Give memory and threads back; a save that is not finished is given up. Not collective."""
        self._saves.close()

    # -- what DeepSpeed calls --------------------------------------------------------------------------------------

    def create(self, info: TagInfo) -> None:
        """All ranks begin a save; a background save before it is finished first."""
        if self._background:
            self._finish()
        self._saves.begin(info)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory whose name survives a power cut. If that fails, the save fails, on all ranks."""
        del exist_ok  # DeepSpeed asks for nothing else
        try:
            make_directory(local_path(path), self._saves.options.readable_by.directory_mode)
        except OSError as error:
            _log.error("%s", storage_error(error, Path(path), "making the directory"))

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file of this rank; it appears under its name when the tag is complete."""
        self._saves.put(state_dict, path)

    def commit(self, info: TagInfo | str) -> bool:
        """All ranks: make the tag durable and visible.

        Raises CheckpointError on all ranks if one of them failed, unless saves run in the background: DeepSpeed looks
        at no answer, and would name the tag in ``latest``.
        """
        tag = info if isinstance(info, str) else info.tag  # DeepSpeed 0.17 gives the tag alone
        pending = self._saves.pending
        if pending is None or pending.tag != tag:
            raise CheckpointError(f"tag {tag!r} was never begun; call save_checkpoint")
        trouble = self._finish()
        if trouble and not self._background:
            raise CheckpointError(trouble)
        return not trouble

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file, of Lastgood or of torch.save, without running code from it.

        Tensors come on the CPU, or on the device that `map_location` names (a function of torch.load's kind is not
        asked). Raises CorruptCheckpoint (file, chunk, both checksums), MismatchError, NoCheckpoint, StorageError.
        """
        place = Path(path)
        if not place.is_file():
            raise NoCheckpoint(f"{place}: there is no such file; was this tag saved by as many ranks?")
        tree = self._load_own(place) if is_standalone_slot(place) else _load_foreign(place)
        where = "cpu" if map_location is None or callable(map_location) else map_location
        device = torch.device(where) if isinstance(where, (str, torch.device)) else torch.device("cpu")
        return tree if device.type == "cpu" else _moved(tree, device)

    def is_decoupled(self) -> bool:
        """Whether `save_checkpoint` leaves commit and ``latest`` for later."""
        return self._background

    def get_commit_info(self) -> Any:
        """All ranks, before an optimizer step: what is to be committed now, None while a rank is still writing.

        ``save_latest`` is off in it: DeepSpeed would write that file whatever `commit` says, so `commit` does.
        """
        pending: Any = self._saves.pending
        if pending is None or not self._saves.poll():
            return None
        return dataclasses.replace(pending, save_latest=False)

    def cleanup(self) -> None:
        """DeepSpeedEngine.destroy calls this for background saves, also when one rank ends by an error.

        So it asks nothing of other ranks: a save that nobody drained is given up, and logged.
        """
        self.close()

    def preserves_storage_sharing(self) -> bool:
        """False: tensors are written without the rest of the storage that they lie in, so none need be cloned."""
        return False

    # -- inside ----------------------------------------------------------------------------------------------------

    def _finish(self) -> str:
        info = self._saves.pending
        if info is None:
            return ""
        trouble = self._saves.finish(write_latest=self._background and info.save_latest)
        if not trouble:
            return ""
        return f"{Path(info.save_dir) / info.tag} was not saved: {trouble}; older tags and `latest` are as they were"

    def _load_own(self, path: Path) -> Any:
        info = look_at_standalone_slot(path)
        self._check_one_save(path, info.record.job_id)
        tree = read_tree(SlotView(path.parent), info, READ_THREADS)
        if list(tree) != [ROOT]:
            raise CorruptCheckpoint(f"{path}: holds {sorted(tree)} instead of one file of DeepSpeed's")
        return decode_objects(tree[ROOT], str(path))

    def _check_one_save(self, path: Path, job_id: bytes) -> None:
        """Files of one tag must come from one save: a save over an older tag may have been killed half-way."""
        folder = path.parent
        known, other = self._loaded.get(folder, (job_id, path))
        if known != job_id and other.is_file() and is_standalone_slot(other):
            known = look_at_standalone_slot(other).record.job_id  # it may have been saved again since
            if known != job_id:
                raise CorruptCheckpoint(
                    f"{path} and {other.name} are from two saves: one was saved over the other and was not finished; "
                    "load another tag"
                )
        self._loaded[folder] = (job_id, path)


@functools.cache
def _engine_class() -> type[LastgoodFiles]:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class LastgoodCheckpointEngine(LastgoodFiles, CheckpointEngine):  # type: ignore[misc, unused-ignore]
        """`LastgoodFiles` as DeepSpeed's own kind."""

    return LastgoodCheckpointEngine


def export_torch(tag_folder: Path | str, target: Path | str) -> list[Path]:
    """Write the files of a tag as DeepSpeed's own engine would, for zero_to_fp32.py and other tools. Needs no engine.

    `target` must not exist, or be empty. Other files in the folder are copied. Returns what was written.

    Raises CorruptCheckpoint, MismatchError, StorageError, CheckpointError if `target` is in use.
    """
    source, target = Path(tag_folder), Path(target)
    if not source.is_dir():
        raise NoCheckpoint(f"{source}: there is no such folder; name the folder of a tag")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; name a new folder")
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted(one for one in source.iterdir() if one.is_file()):
        copy = target / path.name
        if is_standalone_slot(path):
            tree = read_tree(SlotView(source), look_at_standalone_slot(path), READ_THREADS)
            torch.save(decode_objects(own_memory(tree.get(ROOT)), str(path)), copy)
        else:
            shutil.copyfile(path, copy)
        written.append(copy)
    return written


def _load_foreign(path: Path) -> Any:
    """A file of torch.save, which DeepSpeed's own engine wrote: data, and objects of the listed classes."""
    try:
        return build_records(read_torch_file(path.resolve(), listed_classes()), str(path))
    except CorruptCheckpoint as error:
        unknown = error.__cause__.unknown if isinstance(error.__cause__, Refused) else None
        if unknown is None:
            raise
        raise MismatchError(
            f"{path}: not a file of Lastgood, and the allow-list refuses {unknown!r} in it; if you trust it, load "
            "it without use_lastgood, and save it again"
        ) from error


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _moved(value[key], device)
        return value
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
