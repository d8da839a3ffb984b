"""The steps of a DCP save or load on one rank, timed between torch's planner and the storage."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from lastgood.experiments.records.dcp import RankTimes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
    from torch.futures import Future

__all__ = ["TimedReader", "TimedWriter"]


class _Steps:
    """When a rank had its own plan, got the one of all, and had its items moved (`time.perf_counter`)."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.planned: float | None = None
        self.gathered: float | None = None
        self.moved: float | None = None

    def times(self, ended: float, nbytes: int) -> RankTimes:
        """Of a call that waited until all was done."""
        total = ended - self.began
        if self.planned is None or self.gathered is None or self.moved is None:
            return RankTimes(nbytes=nbytes, total_s=total, stall_s=total)
        return RankTimes(
            nbytes=nbytes,
            total_s=total,
            stall_s=total,
            plan_s=self.planned - self.began,
            gather_s=self.gathered - self.planned,
            transfer_s=self.moved - self.gathered,
            finish_s=ended - self.moved,
        )


class TimedWriter(StorageWriter):
    """`inner`, and the moments between its calls in `steps`; make it right before the save."""

    def __init__(self, inner: StorageWriter) -> None:
        self._inner = inner
        self.steps = _Steps()
        self.nbytes = 0
        """That `inner` says it wrote."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """See `StorageWriter`, as all that follow."""
        self._inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Torch gives ranks only to those that take any named argument."""
        if "kwargs" not in inspect.signature(self._inner.set_up_storage_writer).parameters:
            kwargs = {}
        self._inner.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The rank's own plan is ready after it."""
        prepared = self._inner.prepare_local_plan(plan)
        self.steps.planned = time.perf_counter()
        return prepared

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On one rank only."""
        return self._inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Waits, as torch does at once after it."""
        self.steps.gathered = time.perf_counter()
        future = self._inner.write_data(plan, planner)
        future.wait()
        self.nbytes = sum(result.size_in_bytes for result in future.value())
        self.steps.moved = time.perf_counter()
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On one rank only."""
        self._inner.finish(metadata, results)

    def storage_meta(self) -> Any:
        """What goes into the metadata."""
        return self._inner.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """It is never found by a name."""
        del checkpoint_id
        return False


class TimedReader(StorageReader):
    """As `TimedWriter`, for a load."""

    def __init__(self, inner: StorageReader) -> None:
        self._inner = inner
        self.steps = _Steps()

    def reset(self, checkpoint_id: Any = None) -> None:
        """See `StorageReader`, as all that follow."""
        self._inner.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Counted to the plan."""
        if "kwargs" not in inspect.signature(self._inner.read_metadata).parameters:
            kwargs = {}
        return self._inner.read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Torch gives ranks only to those that take any named argument."""
        if "kwargs" not in inspect.signature(self._inner.set_up_storage_reader).parameters:
            kwargs = {}
        self._inner.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The rank's own plan is ready after it."""
        prepared = self._inner.prepare_local_plan(plan)
        self.steps.planned = time.perf_counter()
        return prepared

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On one rank only."""
        return self._inner.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Waits, as torch does at once after it."""
        self.steps.gathered = time.perf_counter()
        future = self._inner.read_data(plan, planner)
        future.wait()
        self.steps.moved = time.perf_counter()
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """It is never found by a name."""
        del checkpoint_id
        return False
