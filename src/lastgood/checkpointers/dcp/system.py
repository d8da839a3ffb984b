"""PyTorch's distributed checkpoint (torch.distributed.checkpoint, DCP), made durable and checked.

Copying and writing are DCP's: `async_save` copies the state (*stages* it) before it returns, and then writes in a
thread or process of its own. Here each process of a job saves its own complete state in its own directory
(``no_dist``); ranks that hold shards save one checkpoint together (integrations/dcp/together.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from lastgood._lazy import torch
from lastgood.checkpointers.dcp.reader import StoredTensors
from lastgood.checkpointers.directories.named_state import LAYOUT_NAME, read_tree
from lastgood.checkpointers.directories.store import Draft
from lastgood.checkpointers.directory_system import DirectoryOptions, DirectorySystem, LibrarySave, synchronize
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.traits import Traits
from lastgood.errors import CheckpointError, ConfigError
from lastgood.locations import Location
from lastgood.sinks import Sink
from lastgood.state.compare import Keys

__all__ = ["DCPOptions", "TorchDCP"]

_END_S = 5.0
"""How long DCP's helper process may take to end before it is killed."""


class DCPOptions(DirectoryOptions):
    """Options of torch DCP."""

    mode: Literal["sync", "async_thread", "async_process"] = Field(
        default="async_thread", description="sync, async_thread or async_process: who writes while training goes on"
    )
    writer_threads: int = Field(default=1, ge=1, le=64)
    """Threads, and files, of DCP's FileSystemWriter."""
    pinned: bool = True
    """Stage into page-locked memory if the state is on a CUDA device."""

    def host_bytes(self, state_bytes: int) -> int:
        """The staged copy, which DCP keeps from save to save."""
        return 0 if self.mode == "sync" else state_bytes


class TorchDCP(DirectorySystem):
    """dcp.save or dcp.async_save, one checkpoint at a time, with files synced, a manifest, and an atomic rename."""

    name: ClassVar[str] = "dcp"
    traits: ClassVar[Traits] = Traits(
        label="PyTorch DCP",
        colour="#6F693D",
        order=50,
        safe_in=Sink.DISK,
        keeps="folders",
        marker=".metadata",
        ranks_write="first",
        over_shards="lastgood.integrations.dcp.together:TogetherDCP",
    )
    Options: ClassVar[type[BaseOptions]] = DCPOptions
    options: DCPOptions

    def __init__(self, directory: Path | str | Location, options: DCPOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._stager: Any = None
        self._helper: _Helper | None = None

    def _start(self) -> None:
        super()._start()
        self._start_library()

    def _start_library(self) -> None:
        if self.options.mode == "async_process":
            self._helper = _Helper()
        elif torch.cuda.is_available():
            # DCP's writer uses CUDA for states on the CPU too. Left to its thread, the state's list of generators would
            # change at any moment of the first saves.
            torch.cuda.init()

    def _take(self, tensors: dict[str, torch.Tensor], draft: Draft) -> Future[Any] | None:
        from lastgood.checkpointers.dcp.torch_io import DraftWriter

        return self._hand_over(tensors, DraftWriter(draft, self.options.writer_threads), no_dist=True)

    def _hand_over(self, tensors: dict[str, torch.Tensor], writer: Any, **among: Any) -> Future[Any] | None:
        """Copy the tensors and let DCP write them, `among` the ranks that its own arguments name; as `_take`."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

        from lastgood.checkpointers.dcp.torch_io import KeptStager

        devices = sorted({tensor.device for tensor in tensors.values() if tensor.is_cuda}, key=str)
        if self.options.mode == "sync":
            # DCP's threads read on streams of their own, which do not wait for the training's.
            synchronize(tensors)
            save(tensors, storage_writer=writer, **among)
            return None
        if self._stager is None:
            self._stager = KeptStager(devices, pinned=self.options.pinned, shared=self._helper is not None)
        with contextlib.ExitStack() as stack:
            if len(devices) == 1:
                stack.enter_context(torch.cuda.device(devices[0]))  # the one that DCP waits for after its copies
            if self._helper is not None:
                stack.enter_context(self._helper.ready())
            kind = AsyncCheckpointerType.THREAD if self._helper is None else AsyncCheckpointerType.PROCESS
            # A stager that works at once gives a plain future.
            future: Any = async_save(
                tensors,
                storage_writer=writer,
                async_stager=self._stager,
                async_checkpointer_type=kind,
                **among,
            )
        return future  # type: ignore[no-any-return] # torch's own type for it depends on the stager

    def _seal(self, draft: Draft) -> None:
        """The writer has done it, perhaps in another process."""

    def _stop(self, flight: LibrarySave) -> None:
        if self._helper is not None and (self._helper.dead or not flight.future.done()):
            self._helper.end(0)

    def _explained(self, error: BaseException) -> BaseException:
        from lastgood.checkpointers.dcp.torch_io import first_cause

        cause = first_cause(error)
        if cause is not error and not isinstance(cause, (Exception, KeyboardInterrupt, SystemExit)):
            return CheckpointError(f"torch.distributed.checkpoint failed: {type(cause).__name__}: {cause}")
        return cause

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            if self._helper is not None:
                self._helper.close()
                self._helper = None
            if self._stager is not None and (self._late is None or self._late.done()):
                self._stager.end()
            self._stager = None

    def storage_facts(self) -> dict[str, Any]:
        """Buffered writes, then fsync; and how DCP was told to write."""
        return {
            "direct_io": False,
            "durability": "DCP's files, fsync of each, manifest, fsync of the directory, rename, fsync of its parent",
            "checksums": "CRC32C of each file, taken while it is written",
            "mode": self.options.mode,
            "writer_threads": self.options.writer_threads,
        }

    def _read(self, checkpoint: Path, nbytes: int) -> tuple[dict[str, Any], frozenset[Keys]]:
        stored = StoredTensors(checkpoint, nbytes)
        return read_tree(checkpoint, nbytes, stored.elements(LAYOUT_NAME), stored.load)


# -- DCP's threads and processes ---------------------------------------------------------------------------------------


class _Helper:
    """What DCP needs to write in a process: a process group of one here, and an end of that process.

    DCP starts its helper at the first save, keeps it in a global variable, and never gives it up, not even when it is
    dead. One that a program has started for saves of its own is used, and left alone. No port is needed here; DCP takes
    a free one of this host for the helper.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore
        from torch.distributed.checkpoint import _async_process_executor

        self._module: Any = _async_process_executor
        if not hasattr(self._module, "_CHECKPOINT_PROCESS"):
            raise ConfigError(f"torch {torch.__version__} runs DCP's process in another way; use mode async_thread")
        self._ours = self._module._CHECKPOINT_PROCESS is None
        self._own_group = not dist.is_initialized()
        if self._own_group:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """While inside, DCP may start its helper; on a host whose own name nobody knows as well."""
        if not self._own_group or "MASTER_ADDR" in os.environ:
            yield
            return
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        try:
            yield
        finally:
            os.environ.pop("MASTER_ADDR", None)

    @property
    def dead(self) -> bool:
        """Whether the process has ended, so that DCP could never save again."""
        running = self._module._CHECKPOINT_PROCESS
        return running is not None and not running._save_process.is_alive()

    def end(self, patience_s: float) -> None:
        """End the process: as DCP would, or after `patience_s` by force. The next save starts another one."""
        running = self._module._CHECKPOINT_PROCESS
        if running is None or not (self._ours or self.dead):
            return
        self._module._CHECKPOINT_PROCESS = None
        process = running._save_process
        if patience_s > 0:
            with contextlib.suppress(OSError, ValueError):
                running._send(self._module._CheckpointSaveProcessControlOpts.TERMINATE)
            process.join(patience_s)
        if process.is_alive():
            process.kill()
        process.join(_END_S)

    def close(self) -> None:
        """End the process and the process group that were made here."""
        import torch.distributed as dist

        self.end(_END_S)
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
