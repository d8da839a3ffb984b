"""The files of one DeepSpeed tag: written by several threads, durable on every rank before the first one is named.

Needs no DeepSpeed. All ranks call `begin`, each rank `put` for its own files, then all ranks `finish` (or `poll`, and
`finish` once that is true). The ranks agree twice: that all have written, and that all have named their files. So a tag
that a finished save returned is complete and durable, and one that failed changed nothing but, perhaps, its own folder.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lastgood._lazy import torch
from lastgood._native import ChunkPool
from lastgood.checkpointers.copies.chunks import Lander, copy_through_pool, host_ranges
from lastgood.checkpointers.copies.device_streams import DeviceStreams
from lastgood.checkpointers.copies.host import CopyFence, PinnedMemory, make_pool
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import CheckpointError, StateError, WaitTimeout
from lastgood.files import (
    ReadableBy,
    local_path,
    open_new,
    remove_temporary_files,
    remove_tree,
    storage_error,
    storage_errors,
    sync_directory,
    temporary_beside,
    write_atomically,
)
from lastgood.integrations.deepspeed_objects import encode_objects
from lastgood.state import FlatState, flatten
from lastgood.storage import files
from lastgood.storage import format as fmt
from lastgood.storage.standalone_slot import ROOT, StandaloneSlot
from lastgood.units import MIB
from lastgood.world import world_of_torch

__all__ = ["SaveOptions", "TagInfo", "TagSaves", "own_memory"]

_log = logging.getLogger("lastgood")

_CHUNK_BYTES = 4 * MIB
_COMMITS_AT_ONCE = 4
_MOST_OPEN_FILES = 8
_EVENTS_KEPT = 100
_OLDER_TEMPORARY = re.compile(r".+\.(pt|bin|safetensors)\.lastgood-tmp")
_WORD_BYTES = 1024
"""Of what a rank tells the others: one byte for its condition, the rest is text."""
_DONE, _FAILED, _WRITING = 0, 1, 2


class TagInfo(Protocol):
    """What DeepSpeed says about a save (its CheckpointCommitInfo)."""

    tag: str
    save_dir: str
    save_latest: bool


@dataclass(frozen=True)
class SaveOptions:
    """How files are written."""

    writer_threads: int = 2
    """Threads that write one file."""
    pool_bytes: int = 256 * MIB
    """Host memory of each rank for data on its way to the disk; on a CUDA device it is page-locked."""
    timeout_s: float = 600.0
    """How long a rank waits for its own disk."""
    readable_by: ReadableBy = ReadableBy.OWNER
    """Who may read a tag's files, and its folder if it is new; what `save_16bit_model` writes is as the umask
    has it."""


class _Export:
    """A file for others to read (`save_16bit_model`), as torch.save writes it, flushed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = temporary_beside(path)

    def store(self, state: Any) -> int:
        try:
            os.close(open_new(self._temporary, mode=None))
            torch.save(own_memory(state), self._temporary)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if its own writer is refused
            self.discard()
            raise CheckpointError(f"{self.path}: writing failed: {error}") from error
        files.flush_file(self._temporary)
        return self._temporary.stat().st_size

    def publish(self) -> None:
        with storage_errors(self.path, "naming"):
            self._temporary.replace(self.path)

    def discard(self) -> None:
        remove_tree(self._temporary)


@dataclass
class _Saving:
    info: TagInfo
    save_dir: Path
    """As it was when the save began, wherever the process goes."""
    job: fmt.Job
    event: CheckpointEvent
    written: list[StandaloneSlot | _Export] = field(default_factory=list)
    commits: list[Future[int]] = field(default_factory=list)
    failure: str = ""

    @property
    def folder(self) -> Path:
        return self.save_dir / self.info.tag


class TagSaves:
    """The saves of one rank of one training, one tag at a time.

    `device` is where the process group's collectives want their tensors; `step` tells the finished training steps.
    """

    def __init__(self, device: torch.device, step: Callable[[], int], options: SaveOptions) -> None:
        self.events: list[CheckpointEvent] = []
        """What became of the last hundred saves; `step` is DeepSpeed's global step."""
        self._device = device
        self._step = step
        self.options = options
        self.rank, self.world_size = world_of_torch()
        self._saving: _Saving | None = None
        self._pool: ChunkPool | None = None
        self._pinned: PinnedMemory | None = None
        self._direct: dict[Path, bool] = {}
        self._committers = ThreadPoolExecutor(_COMMITS_AT_ONCE, "lastgood-deepspeed")

    @property
    def pending(self) -> TagInfo | None:
        """The save that is not finished."""
        return None if self._saving is None else self._saving.info

    def begin(self, info: TagInfo) -> None:
        """Collective. A save that was begun and never finished (something in between raised) is given up."""
        if self._saving is not None:
            self._end(self._saving, f"the save of tag {self._saving.info.tag!r} was never finished")
        save_dir = local_path(info.save_dir)
        if self.rank == 0:
            _remove_leftovers(save_dir, info.tag)
        job_id = self._from_first_rank(os.urandom(fmt.JOB_ID_BYTES))
        step = self._step()
        event = CheckpointEvent(step, time.perf_counter())
        self.events = [*self.events[-_EVENTS_KEPT + 1 :], event]
        self._saving = _Saving(info, save_dir, fmt.Job(job_id, self.rank, self.world_size), event)

    def put(self, state: Any, path: str | Path) -> None:
        """Write one file. When this returns, `state` may be changed; what is left to do is done by other threads.

        Raises CheckpointError only if no save was begun: a failure is remembered for `finish`, because one rank that
        raised here would leave the others waiting.
        """
        saving, path = self._saving, local_path(path)
        if saving is None:
            raise CheckpointError(f"{path}: DeepSpeed saves a file without having begun a save; call save_checkpoint")
        if saving.failure:
            return
        try:
            if path.parent == saving.folder:
                self._write(saving, state, path)
            else:
                export = _Export(path)
                saving.written.append(export)
                saving.event.bytes_written += export.store(state)
            saving.event.copied_s = time.perf_counter()
        except Exception as error:  # told to all ranks by finish
            saving.failure = f"{path.name}: {_text(error)}"
            _log.error("rank %d: tag %s: %s", self.rank, saving.info.tag, saving.failure)

    def poll(self) -> bool:
        """Collective while a save is pending: whether `finish` would not have to wait on any rank."""
        saving = self._saving
        if saving is None:
            return False
        condition = _DONE if saving.failure or all(commit.done() for commit in saving.commits) else _WRITING
        return all(kind != _WRITING for kind, _ in self._exchange(condition, ""))

    def finish(self, *, write_latest: bool) -> str:
        """Collective. Wait for the disk, agree, name the files. Returns what went wrong, the same on all ranks, or "".

        With `write_latest`, rank 0 then writes the file ``latest``, durably and at once.
        """
        saving = self._saving
        if saving is None:
            return ""
        # No rank names a file before all ranks have written theirs, and none goes on before all have named theirs.
        trouble = self._agree(self._wait_for_commits(saving))
        if not trouble:
            trouble = self._agree(self._publish(saving))
        if not trouble and write_latest:
            trouble = self._agree(self._write_latest(saving) if self.rank == 0 else "")
        self._end(saving, trouble)
        return trouble

    def close(self) -> None:
        """Give up what is not finished, and give the memory back. Not collective; safe to call twice."""
        if self._saving is not None:
            self._end(self._saving, f"tag {self._saving.info.tag!r} was not finished when the engine was closed")
        self._committers.shutdown()
        self._pool = None
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None

    # -- one rank --------------------------------------------------------------------------------------------------

    def _write(self, saving: _Saving, state: Any, path: Path) -> None:
        try:
            flat = flatten({ROOT: encode_objects(state, f"state.{ROOT}")})
        except StateError as error:
            raise StateError(str(error).replace(f"state.{ROOT}", "state", 1)) from error
        meta_bytes = flat.layout.to_json()
        meta = torch.frombuffer(bytearray(meta_bytes), dtype=torch.uint8)
        self._wait_for_place(saving)
        folder = path.parent
        if folder not in self._direct:
            self._direct = {folder: files.direct_io_works(folder)}
        file = StandaloneSlot(
            path,
            job=saving.job,
            step=saving.event.step,
            stream_bytes=flat.layout.stream_bytes + meta.numel(),
            pool=self._pool_for(flat),
            writer_threads=self.options.writer_threads,
            direct_io=self._direct[folder],
            mode=self.options.readable_by.file_mode,
        )
        saving.written.append(file)
        self._copy(file, flat, meta)
        digest = flat.layout.digest()
        stream_bytes = flat.layout.stream_bytes

        def commit() -> int:
            file.write.commit(stream_bytes, meta.numel(), digest, self.options.timeout_s)
            return file.write.bytes_written

        saving.commits.append(self._committers.submit(commit))

    def _copy(self, file: StandaloneSlot, flat: FlatState, meta: torch.Tensor) -> None:
        """All bytes have left the training's memory when this returns."""
        timeout_s = self.options.timeout_s
        if self._pinned is None:
            ranges = host_ranges(flat.blocks, flat.layout.block_bytes, writes=True)
            file.write.copy_host([*ranges, (meta.data_ptr(), meta.numel())], timeout_s)
            return
        lander = Lander(file.write, timeout_s)
        fence = CopyFence(str(file.path), flat)
        streams = DeviceStreams(flat.blocks)
        memory = self._pinned.tensor
        copy_through_pool(file.write, flat.layout, flat.blocks, meta, memory, streams, fence, lander, timeout_s)
        streams.synchronize()

    def _pool_for(self, flat: FlatState) -> ChunkPool:
        """Buffers for host memory; page-locked ones from the first save on that holds a CUDA tensor."""
        on_device = any(block.is_cuda for block in flat.blocks)
        if self._pool is None or (on_device and self._pinned is None):
            chunks = max(self.options.pool_bytes // _CHUNK_BYTES, self.options.writer_threads + 1)
            self._pool, self._pinned = make_pool(chunks, _CHUNK_BYTES, pinned=on_device)
        return self._pool

    def _wait_for_place(self, saving: _Saving) -> None:
        """A pipeline saves a file for each layer: not too many of them may be open at once."""
        open_files = [commit for commit in saving.commits if not commit.done()]
        if len(open_files) < _MOST_OPEN_FILES:
            return
        wait_for(open_files[:1], self.options.timeout_s)
        if not open_files[0].done():
            raise WaitTimeout(f"{saving.folder}: waited {self.options.timeout_s:.0f} s for a file to be flushed")

    def _wait_for_commits(self, saving: _Saving) -> str:
        if saving.failure:
            return saving.failure
        pending = wait_for(saving.commits, self.options.timeout_s).not_done
        if pending:
            return f"{saving.folder}: waited {self.options.timeout_s:.0f} s for {len(pending)} files to be flushed"
        for commit in saving.commits:
            error = commit.exception()
            if error is not None:
                return _text(error)
            saving.event.bytes_written += commit.result()
        return ""

    def _publish(self, saving: _Saving) -> str:
        try:
            for file in saving.written:
                file.publish()
            for folder in {file.path.parent for file in saving.written}:
                sync_directory(folder)
        except (CheckpointError, OSError) as error:
            return _text(error)
        return ""

    def _write_latest(self, saving: _Saving) -> str:
        path = saving.save_dir / "latest"
        try:
            write_atomically(path, saving.info.tag.encode(), mode=self.options.readable_by.file_mode)
        except OSError as error:
            return _text(storage_error(error, path, "writing"))
        return ""

    def _end(self, saving: _Saving, trouble: str) -> None:
        self._saving = None
        saving.event.finished_s = time.perf_counter()
        saving.event.error = trouble or None
        saving.event.outcome = Outcome.FAILED if trouble else Outcome.DURABLE
        if not trouble:
            return
        _log.error("tag %s was not saved: %s", saving.info.tag, trouble)
        for file in saving.written:
            file.discard()

    # -- all ranks -------------------------------------------------------------------------------------------------

    def _agree(self, failure: str) -> str:
        """Collective: "" if no rank has a failure; else what the first ones say, the same text on all ranks."""
        told = self._exchange(_FAILED if failure else _DONE, failure)
        failed = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(told) if kind == _FAILED]
        more = f"; and {len(failed) - 3} more ranks" if len(failed) > 3 else ""
        return "; ".join(failed[:3]) + more

    def _exchange(self, kind: int, text: str) -> list[tuple[int, str]]:
        """What every rank says, in the order of ranks."""
        word = bytes([kind]) + text.encode()[: _WORD_BYTES - 1]
        if self.world_size == 1:
            return [(kind, text)]
        mine = torch.frombuffer(bytearray(word.ljust(_WORD_BYTES, b"\0")), dtype=torch.uint8).to(self._device)
        all_words = [torch.empty_like(mine) for _ in range(self.world_size)]
        torch.distributed.all_gather(all_words, mine)
        told = [bytes(one.cpu().tolist()) for one in all_words]
        return [(one[0], one[1:].rstrip(b"\0").decode(errors="replace")) for one in told]

    def _from_first_rank(self, content: bytes) -> bytes:
        """Rank 0's bytes. Other ranks get them only once rank 0 has called this."""
        if self.world_size == 1:
            return content
        shared = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        torch.distributed.broadcast(shared, 0)
        return bytes(shared.cpu().tolist())


def _remove_leftovers(save_dir: Path, tag: str) -> None:
    """Remove what a killed training left half-written. Only while no rank is writing."""
    # A tag may have a folder of folders for its name.
    for place in {save_dir, *save_dir.glob("*/"), save_dir / tag}:
        try:
            for leftover in remove_temporary_files(place, _OLDER_TEMPORARY):
                _log.info("%s: removed, a save that was killed left it half-written", leftover)
        except NotADirectoryError:
            continue
        except OSError as error:
            _log.warning("%s: what a killed save left there cannot be removed: %s", place, error)


def own_memory(value: Any) -> Any:
    """Tensors without the rest of the storage that they lie in, which torch.save would write as well."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.untyped_storage().nbytes() > value.nbytes else value.detach()
    if isinstance(value, Mapping):
        return type(value)((key, own_memory(item)) for key, item in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(own_memory(item) for item in value)
    return value


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, (CheckpointError, StateError)) else f"{type(error).__name__}: {error}"
