"""`LastgoodWriter`, which DCP's `save` and `async_save` call."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lastgood.bounds import DAMAGE, Budget
from lastgood.checkpointers.dcp.metadata import decode_metadata
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, StorageError
from lastgood.files import readers_of
from lastgood.integrations.dcp.byte_items import allowed_names
from lastgood.integrations.dcp.folder import CheckpointFolder, file_name, manifest_name, metadata_name, open_target
from lastgood.integrations.dcp.roll_call import RollCall, join
from lastgood.integrations.dcp.slot_items import SlotOptions, write_slot_file
from lastgood.integrations.dcp.torch_items import write_torch_files
from lastgood.locks import FileLock
from lastgood.storage import format as fmt
from lastgood.storage.standalone_slot import look_at_standalone_slot
from lastgood.units import MIB

__all__ = ["LastgoodWriter", "save_id_of"]

_log = logging.getLogger("lastgood")

_SAVE_ID_PREFIX = "lastgood-"
"""Of `save_id` in DCP's metadata."""

Files = Literal["lastgood", "dcp"]
# No process group means one process, which is what was asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclasses.dataclass
class _Saving:
    """One save on this rank, from DCP's first call to its last."""

    roll: RollCall
    folder: CheckpointFolder
    lock: FileLock | None = None
    coordinator: bool = False
    use_collectives: bool = True
    rank: int = 0
    published: bool = False

    def give_up(self) -> None:
        """The save has failed, or was forgotten: on the rank that made it, the draft goes."""
        self.roll.end()
        if self.lock is not None:
            if not self.published:
                self.folder.discard()
            self.lock.release()
            self.lock = None


class LastgoodWriter(StorageWriter):
    """Writes a checkpoint of DCP: direct I/O, checksums, one rename when it is complete, bounded waits.

    Args:
        path: the checkpoint's folder, which all ranks share. An older checkpoint of that name is complete until the new
            one takes its place.
        layout: "lastgood" writes one slot file for each rank, which `LastgoodReader` reads; "dcp" writes files that
            torch's own `FileSystemReader` reads too.
        writer_threads: threads of each rank that write.
        pool_bytes: host memory of each rank for data on its way to the disk; page-locked for a state on CUDA.
        timeout_s: how long a rank waits for its own disk, and for a rank that shows no sign of life.
        readable_by: "owner", "group" or "all": who may read the files.
        allow: classes and functions that values which are no tensors may hold beside plain ones; `LastgoodReader` must
            be told the same. Other classes are refused here, and not only when the checkpoint is needed.

    An object can be used for several saves, one after another, and goes to DCP's background process by pickle.
    Raises ConfigError for a URL and for options that there are not. What goes wrong in a save is raised by DCP: as
    `CheckpointException` of all ranks, whose `failures` hold what happened, or, where a rank is lost, as WaitTimeout.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Files = "lastgood",
        writer_threads: int = 2,
        pool_bytes: int = 64 * MIB,
        timeout_s: float = 600.0,
        readable_by: str = "owner",
        allow: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        if layout not in ("lastgood", "dcp"):
            raise ConfigError(f'LastgoodWriter: layout must be "lastgood" or "dcp", not {layout!r}')
        if writer_threads < 1 or pool_bytes < 1 or timeout_s <= 0:
            raise ConfigError("LastgoodWriter: writer_threads, pool_bytes and timeout_s must be positive")
        self.path = open_target(path)
        self.layout = layout
        self.options = SlotOptions(
            writer_threads, pool_bytes, timeout_s, readers_of(readable_by, "LastgoodWriter"), allowed_names(allow)
        )
        self._saving: _Saving | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saving": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder."""
        try:
            open_target(checkpoint_id)
        except ConfigError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The folder, as text."""
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a save, where the user gave it a `checkpoint_id`."""
        self._forget()
        if checkpoint_id:
            self.path = open_target(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """DCP's first call in a save, on each rank: the ranks meet, and agree on the save's id."""
        roll = join("save", str(self.path), self.options.timeout_s, self._forget)
        if roll is None:
            return StorageMeta(checkpoint_id=self.checkpoint_id)
        if self._saving is not None and self._saving.roll is roll:
            return self._storage_meta(self._saving.folder)
        self._forget()
        folder = CheckpointFolder(self.path, roll.id, self.options.readable_by)
        self._saving = _Saving(roll, folder)
        return self._storage_meta(folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on each rank."""
        del args
        saving = self._current()
        saving.coordinator = is_coordinator
        saving.use_collectives = kwargs.get("use_collectives", True)
        saving.rank = kwargs.get("rank", saving.roll.rank)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Called by DCP on each rank: nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called by DCP on rank 0 (on each rank by itself without collectives): makes the draft."""
        saving = self._current()
        if saving.use_collectives and len(plans) != saving.roll.world_size:
            raise MismatchError(f"{self.path}: {len(plans)} plans of {saving.roll.world_size} ranks")
        saving.lock = saving.folder.make()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by DCP on each rank: writes its items, and returns when they are durable."""
        saving = self._current()
        saving.folder.wait_for_draft(self.options.timeout_s)
        results: list[WriteResult] = []
        try:
            if plan.items:
                results = self._write(saving, plan, planner)
        except BaseException:
            if not saving.use_collectives:
                self._forget()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by DCP on rank 0 when all ranks have written: looks at their files, and gives all of it its name."""
        saving = self._current()
        rank = None if saving.use_collectives else saving.rank
        try:
            sums = self._look_at_files(saving, results)
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = {one.index: one.storage_data.info for written in results for one in written}
            metadata.storage_meta = self._storage_meta(saving.folder)
            saving.folder.seal(pickle.dumps(metadata), sums, rank)
            older = _older_files(self.path, rank)
            saving.folder.publish(older, self.options.timeout_s, rank)
            saving.published = True
        finally:
            saving.give_up()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _write(self, saving: _Saving, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        folder = saving.folder
        if self.layout == "dcp":
            return write_torch_files(
                folder.draft,
                lambda number: file_name(saving.rank, number, folder.save_id, "distcp"),
                plan,
                planner,
                self.options.writer_threads,
                self.options.readable_by,
            )
        path = folder.draft / file_name(saving.rank, 0, folder.save_id, "lgs")
        return write_slot_file(
            path, plan, planner, fmt.Job(folder.save_id, saving.rank, saving.roll.group_size), self.options
        )

    def _look_at_files(self, saving: _Saving, results: list[list[WriteResult]]) -> dict[str, tuple[int, int]]:
        """See each rank's files where rank 0 sees them; what the manifest is to hold of them."""
        sums: dict[str, tuple[int, int]] = {}
        for number, written in enumerate(results):
            rank = saving.rank + number
            for name, place in {one.storage_data.info.relative_path: one.storage_data for one in written}.items():
                path = saving.folder.draft / name
                try:
                    if place.sums is None:
                        record = look_at_standalone_slot(path).record
                        if record.job_id != saving.folder.save_id or record.rank != rank:
                            raise CheckpointError(f"{path}: holds {record.job}, not what rank {rank} has written")
                        continue
                    size = path.stat().st_size
                except (OSError, StorageError) as error:
                    raise StorageError(
                        f"{self.path.parent}: rank {rank} has written {name}, and rank 0 does not see it ({error}); "
                        "the folder must be shared by all ranks"
                    ) from error
                if size != place.sums[0]:
                    raise StorageError(f"{path}: has {size} bytes, and rank {rank} has written {place.sums[0]}")
                sums[name] = place.sums
        return sums

    def _storage_meta(self, folder: CheckpointFolder) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=f"{_SAVE_ID_PREFIX}{folder.save_id.hex()}")

    def _current(self) -> _Saving:
        if self._saving is None:
            raise CheckpointError(
                "LastgoodWriter: called by something else than torch.distributed.checkpoint's save and async_save"
            )
        return self._saving

    def _forget(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.give_up()


def _older_files(path: Path, rank: int | None) -> list[str]:
    """The files of the checkpoint that has the name now, by its metadata; none if it cannot be read."""
    try:
        content = (path / metadata_name(rank)).read_bytes()
        metadata = decode_metadata(content, Budget(len(content)))
        save_id = save_id_of(metadata.storage_meta)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, CheckpointError, *DAMAGE) as error:
        _log.warning("%s: an older checkpoint whose metadata cannot be read; its files stay: %s", path, error)
        return []
    manifest = [] if save_id is None else [manifest_name(save_id)]
    return [*manifest, *{place.relative_path for place in metadata.storage_data.values()}]


def save_id_of(meta: StorageMeta | None) -> bytes | None:
    """The id of the save of `LastgoodWriter` that wrote a checkpoint; None if another writer did.

    Raises CorruptCheckpoint.
    """
    text = (meta and meta.save_id) or ""
    if not text.startswith(_SAVE_ID_PREFIX):
        return None
    try:
        save_id = bytes.fromhex(text.removeprefix(_SAVE_ID_PREFIX))
    except ValueError:
        save_id = b""
    if len(save_id) != fmt.JOB_ID_BYTES:
        raise CorruptCheckpoint(f"its metadata names no save: {text[:60]!r}")
    return save_id
