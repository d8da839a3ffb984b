"""One save of a rank into a folder: what `LastgoodWriter` does there, from the draft to the name."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from lastgood.bounds import DAMAGE, Budget
from lastgood.checkpointers.dcp.metadata import decode_metadata
from lastgood.errors import CheckpointError, CorruptCheckpoint, StorageError
from lastgood.integrations.dcp.folder import CheckpointFolder, file_name, manifest_name, metadata_name
from lastgood.integrations.dcp.roll_call import RollCall
from lastgood.integrations.dcp.slot_items import SlotOptions, write_slot_file
from lastgood.integrations.dcp.torch_items import write_torch_files
from lastgood.locks import FileLock
from lastgood.storage import format as fmt
from lastgood.storage.standalone_slot import look_at_standalone_slot

__all__ = ["FolderSave", "Save", "save_id_of", "save_text"]

_log = logging.getLogger("lastgood")

_SAVE_ID_PREFIX = "lastgood-"
"""Of `save_id` in DCP's metadata."""


class Save(Protocol):
    """The side of one rank in one save. Calls come in this order; `end` comes always, perhaps twice.

    DCP says late which `rank` this is, and whether all save `together` or each by itself (``use_collectives=False``).
    """

    rank: int
    together: bool

    def prepare(self) -> None:
        """On the coordinator, before any rank writes."""

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """On each rank: its items; when it returns they are durable."""

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """On the coordinator, with what all ranks wrote: the checkpoint gets its name."""

    def end(self) -> None:
        """The save is over, or has failed."""


class FolderSave:
    """A `Save` into a folder that all ranks share."""

    def __init__(self, path: Path, roll: RollCall, options: SlotOptions, *, torch_files: bool) -> None:
        self.path = path
        self.folder = CheckpointFolder(path, roll.id, options.readable_by)
        self.rank = roll.rank
        self.together = True
        self._group_size = roll.group_size
        self._torch_files = torch_files
        self._options = options
        self._lock: FileLock | None = None
        self._published = False

    def prepare(self) -> None:
        """Make the draft."""
        self._lock = self.folder.make()

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """As `Save.write`, in files of this rank's own."""
        folder, options = self.folder, self._options
        folder.wait_for_draft(options.timeout_s)
        if not plan.items:
            return []
        if self._torch_files:
            return write_torch_files(
                folder.draft,
                lambda number: file_name(self.rank, number, folder.save_id, "distcp"),
                plan,
                planner,
                options.writer_threads,
                options.readable_by,
            )
        path = folder.draft / file_name(self.rank, 0, folder.save_id, "lgs")
        return write_slot_file(path, plan, planner, fmt.Job(folder.save_id, self.rank, self._group_size), options)

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Look at the ranks' files, and give all of it its name."""
        rank = None if self.together else self.rank
        sums = self._look_at_files(results)
        metadata.storage_data = {one.index: one.storage_data.info for written in results for one in written}
        self.folder.seal(pickle.dumps(metadata), sums, rank)
        self.folder.publish(_older_files(self.path, rank), self._options.timeout_s, rank)
        self._published = True

    def end(self) -> None:
        """On the rank that made it, a draft that was not published goes."""
        if self._lock is not None:
            if not self._published:
                self.folder.discard()
            self._lock.release()
            self._lock = None

    def _look_at_files(self, results: Sequence[Sequence[WriteResult]]) -> dict[str, tuple[int, int]]:
        """See each rank's files where rank 0 sees them; what the manifest is to hold of them."""
        sums: dict[str, tuple[int, int]] = {}
        for number, written in enumerate(results):
            rank = self.rank + number
            for name, place in {one.storage_data.info.relative_path: one.storage_data for one in written}.items():
                path = self.folder.draft / name
                try:
                    if place.sums is None:
                        record = look_at_standalone_slot(path).record
                        if record.job_id != self.folder.save_id or record.rank != rank:
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


def save_text(save_id: bytes) -> str:
    """A save's id, as it stands in DCP's metadata."""
    return f"{_SAVE_ID_PREFIX}{save_id.hex()}"


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
