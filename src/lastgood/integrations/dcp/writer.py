"""`LastgoodWriter`, which DCP's `save` and `async_save` call."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lastgood.errors import CheckpointError, ConfigError, MismatchError
from lastgood.files import ReadableBy, readers_of
from lastgood.integrations.dcp.bucket import ObjectSave
from lastgood.integrations.dcp.byte_items import allowed_names
from lastgood.integrations.dcp.folder_save import FolderSave, Save, save_text
from lastgood.integrations.dcp.places import check_options, folder_of, is_place, parse_place
from lastgood.integrations.dcp.roll_call import RollCall, join
from lastgood.integrations.dcp.slot_items import SlotOptions
from lastgood.storage.objects.format import SEGMENT_BYTES
from lastgood.storage.objects.s3 import S3Options
from lastgood.units import MIB

__all__ = ["LastgoodWriter"]

Files = Literal["lastgood", "dcp"]
_THREADS = 4
"""One thread waits for its disk or server for most of its time."""
_POOL_BYTES = 64 * MIB
# No process group means one process, which is what was asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclasses.dataclass
class _Saving:
    """One save on this rank, from DCP's first call to its last."""

    roll: RollCall
    save: Save
    coordinator: bool = False

    def give_up(self) -> None:
        """The save is over, has failed, or was forgotten."""
        self.roll.end()
        self.save.end()


class LastgoodWriter(StorageWriter):
    """Writes a checkpoint of DCP: direct I/O or segments of objects, checksums, one moment of truth, bounded waits.

    Args:
        path: the checkpoint's folder, which all ranks share, or s3://BUCKET/PREFIX. An older checkpoint of that name is
            complete until the new one takes its place.
        layout: "lastgood" writes one slot file for each rank, which `LastgoodReader` reads; "dcp" writes files that
            torch's own `FileSystemReader` reads too.
        writer_threads: threads of each rank that write, or that send segments.
        pool_bytes: host memory of each rank for data on its way, page-locked for a state on CUDA: 64 MiB. For a bucket
            it holds at least two segments of up to 32 MiB; by default one for each thread, and one more.
        timeout_s: how long a rank waits for its own disk or bucket, and for a rank that shows no sign of life.
        readable_by: "owner", "group" or "all": who may read the files of a folder.
        allow: classes and functions that values which are no tensors may hold beside plain ones; `LastgoodReader` must
            be told the same. Other classes are refused here, and not only when the checkpoint is needed.
        s3: how the bucket is reached; by default as the environment and the files of the AWS command line say.

    An object can be used for several saves, one after another, and goes to DCP's background process by pickle.
    Raises ConfigError for other URLs, and for options that there are not, or not for that place. What goes wrong in a
    save is raised by DCP: as `CheckpointException` of all ranks, whose `failures` hold what happened, or, where a rank
    is lost, as WaitTimeout.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Files = "lastgood",
        writer_threads: int = _THREADS,
        pool_bytes: int | None = None,
        timeout_s: float = 600.0,
        readable_by: str = "owner",
        allow: Sequence[Any] = (),
        s3: S3Options | None = None,
    ) -> None:
        super().__init__()
        if layout not in ("lastgood", "dcp"):
            raise ConfigError(f'LastgoodWriter: layout must be "lastgood" or "dcp", not {layout!r}')
        self.place = parse_place(path)
        check_options("LastgoodWriter", self.place, s3)
        self.layout = layout
        self.s3 = s3
        in_bucket = self.place.scheme == "s3"
        most = (
            pool_bytes if pool_bytes is not None else (writer_threads + 1) * SEGMENT_BYTES if in_bucket else _POOL_BYTES
        )
        if writer_threads < 1 or most < 1 or timeout_s <= 0:
            raise ConfigError("LastgoodWriter: writer_threads, pool_bytes and timeout_s must be positive")
        readers = readers_of(readable_by, "LastgoodWriter")
        self.options = SlotOptions(writer_threads, most, timeout_s, readers, allowed_names(allow))
        self._check_bucket()
        self._saving: _Saving | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saving": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder, or a place in a bucket."""
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The folder or URL, as text."""
        return str(self.place) if self.place.scheme == "s3" else str(folder_of(self.place))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a save, where the user gave it a `checkpoint_id`."""
        self._forget()
        if checkpoint_id:
            self.place = parse_place(checkpoint_id)
            check_options("LastgoodWriter", self.place, self.s3)
            self._check_bucket()

    def storage_meta(self) -> StorageMeta | None:
        """DCP's first call in a save, on each rank: the ranks meet, and agree on the save's id."""
        roll = join("save", str(self.place), self.options.timeout_s, self._forget)
        if roll is None:
            return StorageMeta(checkpoint_id=self.checkpoint_id)
        if self._saving is None or self._saving.roll is not roll:
            self._forget()
            self._saving = _Saving(roll, self._begin(roll))
        return self._storage_meta(roll.id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on each rank."""
        del args
        saving = self._current()
        saving.coordinator = is_coordinator
        save = saving.save
        save.together = kwargs.get("use_collectives", True)
        save.rank = kwargs.get("rank", save.rank)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Called by DCP on each rank: nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called by DCP on rank 0 (on each rank by itself without collectives), before any rank writes."""
        saving = self._current()
        if saving.save.together and len(plans) != saving.roll.world_size:
            raise MismatchError(f"{self.place}: {len(plans)} plans of {saving.roll.world_size} ranks")
        saving.save.prepare()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by DCP on each rank: writes its items, and returns when they are durable."""
        saving = self._current()
        save = saving.save
        try:
            results = save.write(plan, planner)
        except BaseException:
            if not save.together:
                self._forget()
            raise
        if save.together and not saving.coordinator:
            save.end()  # DCP calls no more of it here
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by DCP on rank 0 when all ranks have written: gives all of it its name."""
        saving = self._current()
        try:
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_meta = self._storage_meta(saving.roll.id)
            saving.save.finish(metadata, results)
        finally:
            saving.give_up()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_bucket(self) -> None:
        """Raise ConfigError for what a bucket has not."""
        if self.place.scheme != "s3":
            return
        if self.layout == "dcp":
            raise ConfigError(
                f'{self.place}: layout="dcp" is for folders; leave it out, and LastgoodReader reads what a bucket holds'
            )
        if self.options.readable_by is not ReadableBy.OWNER:
            raise ConfigError(f"{self.place}: who may read objects is the bucket's to say, not readable_by's")

    def _begin(self, roll: RollCall) -> Save:
        if self.place.scheme == "s3":
            return ObjectSave(self.place, self.s3, roll, self.options)
        return FolderSave(folder_of(self.place), roll, self.options, torch_files=self.layout == "dcp")

    def _storage_meta(self, save_id: bytes) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save_text(save_id))

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
