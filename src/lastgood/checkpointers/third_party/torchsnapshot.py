"""torchsnapshot (pytorch/torchsnapshot, from PyPI) as a system: an optional third party.

``Snapshot.async_take`` copies the state before it returns and writes in a thread of its own. The library flushes
nothing, writes its metadata last, and has no checksums; flushes, the manifest and the rename are Lastgood's.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from lastgood._lazy import torch
from lastgood.checkpointers.directories.named_state import LAYOUT_NAME, read_tree
from lastgood.checkpointers.directories.store import Draft
from lastgood.checkpointers.directory_system import DirectorySystem, in_thread, synchronize
from lastgood.checkpointers.third_party.torchsnapshot_reader import StoredSnapshot
from lastgood.checkpointers.traits import Traits
from lastgood.errors import StorageError
from lastgood.sinks import Sink
from lastgood.state.compare import Keys

__all__ = ["TorchSnapshot"]

_KEY = "state"


class TorchSnapshot(DirectorySystem):
    """torchsnapshot's async_take, one at a time, made durable."""

    name: ClassVar[str] = "torchsnapshot"
    traits: ClassVar[Traits] = Traits(
        colour="#1016A5",
        order=120,
        safe_in=Sink.DISK,
        keeps="folders",
        marker=".snapshot_metadata",
    )

    @classmethod
    def unavailable(cls) -> str | None:
        """The package may be missing."""
        if importlib.util.find_spec("torchsnapshot") is None:
            return "the package torchsnapshot is not installed; pip install torchsnapshot"
        return None

    def _take(self, tensors: dict[str, torch.Tensor], draft: Draft) -> Future[Any]:
        from torchsnapshot import Snapshot, StateDict

        synchronize(tensors)
        pending = Snapshot.async_take(path=str(draft.folder()), app_state={_KEY: StateDict(**tensors)})
        return in_thread(pending.wait, f"torchsnapshot-wait-{draft.step}")

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, RuntimeError):  # the traceback of its thread as a text; its last line says what happened
            return StorageError(f"{self.directory}: torchsnapshot failed: {str(error).strip().splitlines()[-1]}")
        return error

    def _read(self, checkpoint: Path, nbytes: int) -> tuple[dict[str, Any], frozenset[Keys]]:
        stored = StoredSnapshot(checkpoint, nbytes, _KEY)
        return read_tree(checkpoint, nbytes, stored.elements(LAYOUT_NAME), stored.load)

    def storage_facts(self) -> dict[str, Any]:
        """The library flushes nothing; that is done after it."""
        return {
            "direct_io": False,
            "durability": "torchsnapshot's files; then fsync of each by Lastgood, manifest, fsync, rename, fsync",
            "checksums": "CRC32C of each file, read back when it is written",
        }
