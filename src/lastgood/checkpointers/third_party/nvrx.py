"""NVIDIA's resiliency extension (nvidia-resiliency-ext, from PyPI) as a system: an optional third party.

Its asynchronous checkpoint: tensors are copied to the host, sent to a worker process that it keeps, and written there
by torch.save. Taken from it are the copy from the device and the queue with its worker. The library flushes nothing,
has no checksums, and waits for ever for a worker that died, or that a request could not be sent to; flushes, the
manifest, the rename and an end of every wait are Lastgood's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from lastgood._lazy import torch
from lastgood.checkpointers.directories.named_state import LAYOUT_NAME, read_tree
from lastgood.checkpointers.directories.store import Draft
from lastgood.checkpointers.directory_system import (
    DirectoryOptions,
    DirectorySystem,
    LibrarySave,
    in_thread,
    synchronize,
)
from lastgood.checkpointers.torch_files.archive import read_torch_file
from lastgood.checkpointers.traits import Traits
from lastgood.errors import CheckpointError, CorruptCheckpoint, StorageError
from lastgood.locations import Location
from lastgood.sinks import Sink
from lastgood.state.compare import Keys

__all__ = ["ResiliencyExtension"]

_FILE = "state.pt"
_FAILURE = "failure"
_POLL_S = 0.005
_END_S = 5.0


class ResiliencyExtension(DirectorySystem):
    """torch.save in the worker process of nvidia-resiliency-ext, one at a time, made durable."""

    name: ClassVar[str] = "nvrx"
    traits: ClassVar[Traits] = Traits(
        colour="#663102",
        order=110,
        safe_in=Sink.DISK,
        keeps="folders",
        marker="state.pt",
    )

    def __init__(self, directory: Path | str | Location, options: DirectoryOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._queue: Any = None
        self._unsent: list[BaseException] = []

    @classmethod
    def unavailable(cls) -> str | None:
        """The package may be missing."""
        if importlib.util.find_spec("nvidia_resiliency_ext") is None:
            return "the package nvidia-resiliency-ext is not installed; pip install nvidia-resiliency-ext"
        return None

    def _take(self, tensors: dict[str, torch.Tensor], draft: Draft) -> Future[Any]:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
            AsyncCallsQueue,
            AsyncRequest,
            PersistentAsyncCaller,
        )
        from nvidia_resiliency_ext.checkpointing.utils import preload_tensors

        place = draft.folder()
        # What is on the host already, the library would hand over as it is, to be changed by training meanwhile.
        staged = {name: tensor if tensor.is_cuda else tensor.clone() for name, tensor in tensors.items()}
        staged = preload_tensors(staged)
        synchronize(tensors)
        if self._queue is None:
            self._queue = AsyncCallsQueue(persistent=True)
            caller = self._queue.persistent_caller = PersistentAsyncCaller()
            caller.rank = 0  # or it would ask torch.distributed for it
            # Requests are sent by a thread, which would print an error (no room in /dev/shm) and lose the request.
            unsent = self._unsent = []
            caller.queue._on_queue_feeder_error = lambda error, _request: unsent.append(error)
        queue, unsent = self._queue, self._unsent
        request = AsyncRequest(_write_in_worker, (staged, str(place), os.getpid()), [])
        queue.schedule_async_request(request)
        return in_thread(lambda: _wait(queue, unsent, place), f"nvrx-wait-{draft.step}")

    def _seal(self, draft: Draft) -> None:
        failure = draft.folder() / _FAILURE
        if failure.exists():
            raise StorageError(failure.read_text(encoding="utf-8"))
        super()._seal(draft)

    def _stop(self, flight: LibrarySave) -> None:
        caller = None if self._queue is None else self._queue.persistent_caller
        sound = flight.future.done() and flight.future.exception() is None
        if caller is not None and not (sound and _alive(caller)):
            self._end_worker(0)

    def _end_worker(self, patience_s: float) -> None:
        if self._queue is None:
            return
        caller = self._queue.persistent_caller
        process, caller.process = caller.process, None  # the library's own end waits without a limit
        self._queue = None
        if process is None:
            return
        if patience_s > 0:
            caller.queue.put("DONE")
            process.join(patience_s)
        if process.is_alive():
            process.kill()
        process.join(_END_S)
        for channel in (caller.queue, caller.preload_q, caller.comp_q):
            channel.cancel_join_thread()

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            self._end_worker(_END_S)

    def _read(self, checkpoint: Path, nbytes: int) -> tuple[dict[str, Any], frozenset[Keys]]:
        path = checkpoint / _FILE
        stored = read_torch_file(path)
        if type(stored) is not dict:
            raise CorruptCheckpoint(f"{path}: holds a {type(stored).__name__} instead of tensors by name")

        def found(name: str) -> torch.Tensor:
            tensor = stored.get(name)
            if type(tensor) is not torch.Tensor:
                raise CorruptCheckpoint(f"{path}: holds no tensor {name}")
            return tensor

        def load(targets: Mapping[str, torch.Tensor]) -> None:
            for name, target in targets.items():
                tensor = found(name)
                if tensor.dtype != target.dtype or tensor.shape != target.shape:
                    raise CorruptCheckpoint(f"{path}: {name} is not {target.dtype} {tuple(target.shape)} there")
                target.copy_(tensor)

        return read_tree(checkpoint, nbytes, found(LAYOUT_NAME).numel(), load)

    def storage_facts(self) -> dict[str, Any]:
        """The library flushes nothing; that is done after it."""
        return {
            "direct_io": False,
            "durability": "torch.save in a process; then fsync by Lastgood, manifest, fsync, rename, fsync",
            "checksums": "CRC32C of the file, read back when it is written",
        }


def _alive(caller: Any) -> bool:
    return caller.process is not None and bool(caller.process.is_alive())


def _wait(queue: Any, unsent: list[BaseException], place: Path) -> None:
    """Return when the worker has done what was asked for; raise CheckpointError when it never will."""
    caller = queue.persistent_caller
    while True:
        alive = _alive(caller)  # asked first: a worker may answer and then die
        if queue.maybe_finalize_async_calls(blocking=False, no_dist=True):
            return
        if unsent:
            raise CheckpointError(
                f"{place}: the state could not be sent to the worker process: {unsent[0]}; is /dev/shm full?"
            )
        if not alive:
            raise CheckpointError(f"{place}: the worker of nvidia-resiliency-ext is dead; the next save starts another")
        time.sleep(_POLL_S)


_watching: list[int] = []


def _write_in_worker(tensors: dict[str, torch.Tensor], place: str, parent: int) -> None:
    """In the library's process, whose end an exception would be: errors go into a file."""
    if not _watching:
        _watching.append(parent)
        threading.Thread(target=_end_with, args=(parent,), name="nvrx-watch", daemon=True).start()
    directory = Path(place)
    try:
        torch.save(tensors, directory / _FILE)
    except Exception as error:
        with contextlib.suppress(OSError):
            (directory / _FAILURE).write_text(f"{directory / _FILE}: torch.save failed: {error}", encoding="utf-8")


def _end_with(parent: int) -> None:
    """The library's worker would outlive a training that is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
