"""`LastgoodReader`, which DCP's `load` calls."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lastgood.bounds import Budget
from lastgood.checkpointers.dcp.metadata import decode_metadata
from lastgood.checkpointers.torch_files.archive import reading
from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError
from lastgood.integrations.dcp.byte_items import allowed_names, checked_bytes
from lastgood.integrations.dcp.collector import no_collection
from lastgood.integrations.dcp.folder import metadata_name
from lastgood.integrations.dcp.folder_save import save_id_of
from lastgood.integrations.dcp.item_files import Wanted
from lastgood.integrations.dcp.places import check_options, folder_of, is_place, parse_place
from lastgood.integrations.dcp.roll_call import RollCall, join
from lastgood.integrations.dcp.slot_items import TRANSFORM
from lastgood.integrations.dcp.sources import FolderSource, ObjectSource, Source
from lastgood.storage.objects.s3 import S3Options
from lastgood.storage.reader import READ_THREADS

__all__ = ["LastgoodReader"]


class LastgoodReader(StorageReader):
    """Reads checkpoints of `LastgoodWriter`, and of torch's FileSystemWriter, and runs nothing that is in them.

    Args:
        path: the checkpoint's folder, or s3://BUCKET/PREFIX. From a bucket only what the rank needs is fetched.
        threads: threads of each rank that read.
        timeout_s: how long a rank waits for its own disk or bucket, and for a rank that shows no sign of life.
        cast: convert tensors that are stored with another dtype than the state has, as torch's own reader does. Without
            it that is an error.
        strict: refuse a checkpoint that holds entries which no rank asks for.
        allow: classes and functions that byte items may name beside plain values, tensors and containers. Objects of
            these classes are made by torch, with all that their pickle says.
        s3: how the bucket is reached; by default as the environment and the files of the AWS command line say.

    Each chunk that is read is checked before a byte of it is used. Errors come as DCP raises them, like those of
    `LastgoodWriter`: CorruptCheckpoint, MismatchError, NoCheckpoint, StorageError, WaitTimeout.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int = READ_THREADS,
        timeout_s: float = 600.0,
        cast: bool = False,
        strict: bool = False,
        allow: Sequence[Any] = (),
        s3: S3Options | None = None,
    ) -> None:
        super().__init__()
        if threads < 1 or timeout_s <= 0:
            raise ConfigError("LastgoodReader: threads and timeout_s must be positive")
        self.place = parse_place(path)
        check_options("LastgoodReader", self.place, s3)
        self.s3 = s3
        self._source: Source | None = None
        self._threads = threads
        self._timeout_s = timeout_s
        self._cast = cast
        self._strict = strict
        self._allow = allowed_names(allow)
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._save_id: bytes | None = None
        self._of_all: bytes | None = None
        """The save, if it was one of all ranks."""
        self._roll: RollCall | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder, or a place in a bucket."""
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The folder or URL, as text."""
        return str(self.place) if self._in_bucket else str(folder_of(self.place))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a load, where the user gave it a `checkpoint_id`."""
        self._metadata = self._roll = None
        self._close()
        if checkpoint_id:
            self.place = parse_place(checkpoint_id)
            check_options("LastgoodReader", self.place, self.s3)
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's first call in a load, on each rank: the ranks meet. Again with `rank` if there is no ``.metadata``.

        Raises NoCheckpoint, CorruptCheckpoint, StorageError; DCP then raises the same.
        """
        del args
        rank = kwargs.get("rank")
        if rank is None:
            self._roll = join("load", str(self.place), self._timeout_s, lambda: None)
        try:
            metadata = self._read_metadata(rank)
            self._of_all = self._save_id if rank is None else None
        except BaseException as error:
            if self._roll is not None and (rank is None or self._roll.refusal is None):
                self._roll.refusal = error
            raise
        if self._roll is not None:
            self._roll.refusal = None
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on each rank."""
        del is_coordinator, args, kwargs
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by DCP on each rank: adds which save this rank has found, for `prepare_global_plan`."""
        return dataclasses.replace(plan, storage_data=self._of_all)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called by DCP on rank 0.

        Raises MismatchError if ranks have found different saves, and for entries that nobody asks for, if they are to
        be refused.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise MismatchError(
                f"{self.place}: the ranks have found checkpoints of different saves: it was saved anew while they "
                "looked; load again"
            )
        if self._strict:
            asked = {item.storage_index.fqn for plan in plans for item in plan.items}
            known = self._known().state_dict_metadata
            left = sorted(name for name, about in known.items() if name not in asked and _full(about))
            if left:
                more = f" and {len(left) - 8} more" if len(left) > 8 else ""
                raise MismatchError(
                    f"{self.place}: the checkpoint holds {left[:8]}{more}, which the state lacks; load with "
                    "strict=False to leave them out"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called by DCP on each rank: reads its items. Nothing is changed before dtypes and shapes are compared."""
        metadata = self._known()
        stored: dict[MetadataIndex, Any] = metadata.storage_data
        tensors: list[Wanted] = []
        values: list[tuple[ReadItem, Any]] = []
        for item in plan.items:
            place = stored.get(item.storage_index)
            if place is None:
                raise CorruptCheckpoint(f"{self.place}: its metadata says not where {item.storage_index.fqn} is")
            if item.type == LoadItemType.BYTE_IO:
                values.append((item, place))
            else:
                tensors.append(self._wanted(metadata, item, place, planner))
        source = self._open()
        with source.slot_items(self._save_id, self._threads) as slots, source.torch_items() as others:
            contents = []
            for item, place in values:
                files = slots if _in_slot(place) else others
                content = files.read_bytes(place.relative_path, place.offset, place.length)
                where = f"{source.where(place.relative_path)}: {item.storage_index.fqn}"
                contents.append((item, checked_bytes(content, where, self._allow)))
            slots.read([one for one in tensors if _in_slot(stored[one.item.storage_index])], cast=self._cast)
            others.read([one for one in tensors if not _in_slot(stored[one.item.storage_index])])
        for one in tensors:
            planner.commit_tensor(one.item, one.target)
        for item, value in contents:
            planner.load_bytes(item, value)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # -- inside --------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None, "_roll": None}

    @property
    def _in_bucket(self) -> bool:
        return self.place.scheme == "s3"

    def _close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _known(self) -> Metadata:
        if self._metadata is None:
            raise ConfigError("LastgoodReader: set_up_storage_reader was not called; load with DCP's load")
        return self._metadata

    def _read_metadata(self, rank: int | None) -> Metadata:
        source = self._open()
        content = source.metadata(rank)
        where = source.where(metadata_name(rank))
        with reading(where), no_collection():
            metadata = decode_metadata(content, Budget(len(content)))
        meta = metadata.storage_meta = metadata.storage_meta or StorageMeta()
        self._save_id = save_id_of(meta)
        if self._save_id is not None:
            source.check(rank, content, self._save_id)
        elif any(map(_in_slot, metadata.storage_data.values())):
            raise CorruptCheckpoint(f"{where}: names slot files, and no save of Lastgood's")
        if self._roll is None or self._roll.rank == 0:  # what rank 0 refuses, all refuse
            self._look_for_files(source, metadata)
        meta.load_id = self._load_id
        return metadata

    def _open(self) -> Source:
        """Where the checkpoint is; it lasts until the next `reset`, and belongs to this process."""
        if self._source is None:
            self._source = ObjectSource(self.place, self.s3) if self._in_bucket else FolderSource(folder_of(self.place))
        return self._source

    def _look_for_files(self, source: Source, metadata: Metadata) -> None:
        """Refuse a checkpoint that lacks files, or whose items lie beyond their ends, before anything is changed."""
        ends: dict[str, int] = {}
        for place in metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        sizes = source.sizes(sorted(ends))
        for name, size in sizes.items():
            if size < ends[name]:
                raise CorruptCheckpoint(
                    f"{source.where(name)}: has {size} bytes, and the metadata has items up to byte {ends[name]}"
                )
        lacking = sorted(set(ends) - set(sizes))
        if lacking:
            more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
            raise CorruptCheckpoint(f"{self.place}: lacks {', '.join(lacking[:4])}{more}, which its metadata names")

    def _wanted(self, metadata: Metadata, item: ReadItem, place: Any, planner: LoadPlanner) -> Wanted:
        index = item.storage_index
        about = metadata.state_dict_metadata[index.fqn]
        if isinstance(about, BytesStorageMetadata):
            raise MismatchError(f"{self.place}: {index.fqn}: the checkpoint holds a plain value, the state a tensor")
        shape = next((tuple(one.sizes) for one in about.chunks if one.offsets == index.offset), None)
        if shape is None:
            raise CorruptCheckpoint(f"{self.place}: its metadata has no part of {index.fqn} at {index.offset}")
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            raise MismatchError(
                f"{self.place}: {index.fqn}: the checkpoint's part has shape {tuple(item.lengths)}, the state's "
                f"{tuple(target.shape)}"
            )
        dtype = about.properties.dtype
        if target.dtype != dtype and not self._cast:
            raise MismatchError(
                f"{self.place}: {index.fqn}: the checkpoint holds {dtype}, the state {target.dtype}; load with "
                "cast=True to convert it"
            )
        return Wanted(item, place.relative_path, place.offset, place.length, dtype, shape, target)


def _in_slot(place: Any) -> bool:
    return bool(place.transform_descriptors == [TRANSFORM])


def _full(about: Any) -> bool:
    return isinstance(about, BytesStorageMetadata) or 0 not in about.size
