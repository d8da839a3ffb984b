"""The system `dcp` over ranks that hold shards: all ranks save one checkpoint together, as a user of FSDP2 does."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lastgood.bounds import Budget
from lastgood.checkpointers.dcp.metadata import decode_metadata
from lastgood.checkpointers.dcp.system import TorchDCP
from lastgood.checkpointers.dcp.torch_io import first_cause
from lastgood.checkpointers.directories.local import LocalDraft, LocalStore
from lastgood.checkpointers.directories.named_state import LAYOUT_NAME, stored_tensors
from lastgood.checkpointers.directories.store import StoredCheckpoint
from lastgood.checkpointers.directory_system import LibrarySave
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.slots.contents import NamedTensor, named_tensors
from lastgood.checkpointers.slots.live_tensors import LiveTensors
from lastgood.checkpointers.torch_files.archive import reading
from lastgood.errors import CorruptCheckpoint, MismatchError, NoCheckpoint, StorageError
from lastgood.files import read_bounded, storage_errors
from lastgood.integrations.dcp.folder import metadata_name
from lastgood.integrations.dcp.reader import LastgoodReader
from lastgood.integrations.dcp.writer import LastgoodWriter
from lastgood.state import FlatState, Layout, apply_tree, stateful_paths, unflatten
from lastgood.state.build import tensor_over
from lastgood.state.layout import BLOCK_ALIGNMENT, MAX_LAYOUT_BYTES, Node
from lastgood.state.shards import describe_shard, local_part, wrap

__all__ = ["TogetherDCP"]

_log = logging.getLogger("lastgood")


class TogetherDCP(TorchDCP):
    """dcp.save or dcp.async_save of all ranks into one folder that they share.

    Tensors that are spread over ranks go as DTensors under the names that their users know, so that DCP plans who
    writes what and torch's own tools read them. All else is each rank's own, under ``rank-NNNNN/``. Made, started and
    restored on all ranks at the same time; a restore is for as many ranks as saved it. The files are those of
    `LastgoodWriter` with ``layout="dcp"``: flushed, with a manifest, and named when all ranks' are there.
    """

    holds_directory: ClassVar[bool] = False

    def __init__(self, directory: Path | str, options: Any = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._folders_of_job = LocalStore(self.directory, self.options.keep, self.readable_by)
        self._group: Any = None
        """Ranks that write in the background must not use the group of the training's collectives."""
        self._sequence = 0

    def _start(self) -> None:
        self._flat(spread=True)
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self.options.limit_s))
        newest = [0]
        if dist.get_rank() == 0:
            self._store.prepare()
            newest = [max((known.sequence for known in self._store.found()), default=0)]
        dist.broadcast_object_list(newest, src=0, group=self._group)
        self._sequence = newest[0]
        self._start_library()

    def _save(self, event: CheckpointEvent) -> None:
        self._sequence += 1  # whatever happens here, on all ranks
        self.drain()
        self._refuse_late()
        path = self.directory / StoredCheckpoint(self._sequence, event.step, "").name
        options = self.options
        writer = LastgoodWriter(
            path,
            layout="dcp",
            writer_threads=options.writer_threads,
            timeout_s=options.limit_s,
            readable_by=self.readable_by.value,
        )
        try:
            future = self._hand_over(self._named(self._flat(spread=True)), writer, process_group=self._group)
            event.copied_s = time.perf_counter()
            if future is None:
                self._finish(event, path)
                return
            flight = LibrarySave(self, event, LocalDraft(event.step, path), future)
            flight.start()
            self._flight = flight
        except BaseException as error:
            cause = self._explained(error)
            if cause is error or not isinstance(cause, Exception):
                raise  # perhaps Ctrl-C and its like
            raise cause from error

    def _land(self, flight: LibrarySave) -> None:
        try:
            flight.result()
            self._finish(flight.event, Path(flight.draft.where))
        except BaseException as error:  # this thread has no caller: the event and the log carry the failure
            self._end_late(flight)
            self._fail(flight.event, self._explained(error))

    def _finish(self, event: CheckpointEvent, path: Path) -> None:
        """It is durable; note what this rank wrote of it."""
        rank = dist.get_rank()
        event.bytes_written = sum(file.stat().st_size for file in path.glob(f"__{rank}_*"))
        event.finished_s = time.perf_counter()
        event.outcome = Outcome.DURABLE
        if rank == 0:
            self._folders_of_job.drop_old()

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest checkpoint that all ranks can read (or that of `step`) into `state`, all ranks together.

        Raises NoCheckpoint, CorruptCheckpoint (there are some, and none can be read), MismatchError.
        """
        self.drain()
        known = self._store.found()
        refused = []
        for candidate in known:
            if step is not None and candidate.step != step:
                continue
            try:
                layout, tree = self._read_together(Path(candidate.where), LiveTensors(state, list(state)))
            except (Exception, CheckpointException) as error:
                cause = first_cause(error)
                if not isinstance(cause, (CorruptCheckpoint, StorageError)):
                    raise cause from error
                _log.warning("%s; trying the checkpoint before it", cause)
                refused.append(str(cause))
                continue
            apply_tree(state, tree, candidate.where, stateful_paths(layout))
            return candidate.step
        if refused:
            raise CorruptCheckpoint(f"{self.directory}: no checkpoint can be read: {'; '.join(refused)}")
        steps = [found.step for found in known]
        raise NoCheckpoint(f"{self.directory}: no such checkpoint; checkpoints of steps {steps or 'none'}")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _named(self, flat: FlatState) -> dict[str, Any]:
        """The live tensors under the names by which they are stored, and this rank's layout. Copies none of them."""
        rank = dist.get_rank()
        spread = (tensor.name for tensor in named_tensors(flat.layout) if tensor.shard is not None)
        live = dict(zip(spread, flat.sharded, strict=True))
        text = torch.frombuffer(bytearray(flat.layout.to_json()), dtype=torch.uint8)
        return {
            _own(LAYOUT_NAME, rank): text,
            **{
                _name(tensor, rank): tensor.over(flat.blocks) if tensor.shard is None else live[tensor.name]
                for tensor in stored_tensors(flat.layout)
            },
        }

    def _read_together(self, path: Path, live: LiveTensors) -> tuple[Layout, dict[str, Any]]:
        """This rank's layout and its tree, in fresh memory; all ranks call it. Raises what DCP makes of an error."""
        rank = dist.get_rank()
        with storage_errors(path, "reading"):
            nbytes = sum(file.stat().st_size for file in path.iterdir())
        text = torch.empty(_layout_bytes(path, nbytes), dtype=torch.uint8, device="cpu")
        self._load(path, {_own(LAYOUT_NAME, rank): text})
        layout = Layout.from_json(text.numpy().tobytes(), str(path), nbytes)
        if layout.payload_bytes > nbytes + BLOCK_ALIGNMENT * len(layout.block_bytes):
            raise CorruptCheckpoint(f"{path}: a layout of {layout.payload_bytes} bytes, in files of {nbytes}")
        blocks = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in layout.block_bytes]
        likes = [(tensor, live.like(tensor)) for tensor in named_tensors(layout) if tensor.shard is not None]
        for tensor, like in likes:
            if like is None or describe_shard(like, tensor.name) != tensor.shard:
                raise MismatchError(
                    f"{path}: {tensor.name} is spread over these ranks in another way than over those that saved it"
                )
        spread = {tensor.name: wrap(tensor.over(blocks), like) for tensor, like in likes if tensor.nbytes}
        stored = stored_tensors(layout)
        targets = {
            _name(tensor, rank): tensor.over(blocks) if tensor.shard is None else spread[tensor.name]
            for tensor in stored
        }
        self._load(path, targets)
        for tensor in stored:
            if tensor.shard is not None and spread[tensor.name].is_cuda:
                tensor.over(blocks).copy_(local_part(spread[tensor.name]))
        waiting = iter(like for _, like in likes)

        def leaf(node: Node) -> torch.Tensor | None:
            return wrap(tensor_over(blocks, *node[1][1:]), next(waiting)) if node[0] == "H" else None

        return layout, unflatten(layout, blocks, str(path), leaf)

    def _load(self, path: Path, targets: dict[str, Any]) -> None:
        load(targets, storage_reader=LastgoodReader(path, timeout_s=self.options.limit_s), process_group=self._group)


def _own(name: str, rank: int) -> str:
    return f"{rank_directory('', rank).name}/{name}"


def _name(tensor: NamedTensor, rank: int) -> str:
    return _own(tensor.name, rank) if tensor.shard is None else tensor.name


def _layout_bytes(path: Path, nbytes: int) -> int:
    """Of this rank's layout, by DCP's metadata. Raises MismatchError if other ranks have saved it."""
    metadata_file = path / metadata_name(None)
    with reading(metadata_file):
        metadata = decode_metadata(read_bounded(metadata_file, nbytes), Budget(nbytes))
    known = [name for name in metadata.state_dict_metadata if name.endswith(f"/{LAYOUT_NAME}")]
    about = metadata.state_dict_metadata.get(_own(LAYOUT_NAME, dist.get_rank()))
    if len(known) != dist.get_world_size() or not isinstance(about, TensorStorageMetadata):
        raise MismatchError(f"{path}: was saved by {len(known)} ranks, and there are {dist.get_world_size()} now")
    (size,) = about.size if len(about.size) == 1 else (0,)
    if not 0 < size <= min(nbytes, MAX_LAYOUT_BYTES):
        raise CorruptCheckpoint(f"{path}: a layout of {size} bytes in files of {nbytes}")
    return size
