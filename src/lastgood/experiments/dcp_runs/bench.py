"""What each rank of the suite does: builds its part of the model, then saves and loads it, timed.

``python -m lastgood.experiments.dcp_runs.bench ORDER`` is one rank; a launcher has set RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Under torchrun `lastgood dcp` itself is one.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from lastgood.checkpointers.dcp.torch_io import first_cause
from lastgood.errors import CheckpointError, LastgoodError
from lastgood.experiments.ceilings.bucket import bucket_burst
from lastgood.experiments.ceilings.disk import disk_bursts
from lastgood.experiments.dcp.clocks import TimedReader, TimedWriter
from lastgood.experiments.dcp.contents import Digest, digest_of, fill, nbytes_of
from lastgood.experiments.dcp.models import build_on_meta
from lastgood.experiments.dcp.places import BucketPlace, FolderPlace, open_place
from lastgood.experiments.dcp.spread import make_optimizer, spread, state_of
from lastgood.experiments.dcp.storages import storage_named
from lastgood.experiments.dcp.watch import difference, read_work
from lastgood.experiments.dcp_runs.order import DcpOrder, DcpResult, Saved, newest_saved, saved_name, write_saved
from lastgood.experiments.machine.page_cache import cached_share, forget_cached_pages
from lastgood.experiments.records.dcp import DcpIteration, RankTimes, ServerWork
from lastgood.files import PRIVATE, write_result
from lastgood.mounts import lies_in_memory
from lastgood.processes import die_with_parent
from lastgood.storage.objects.format import SEGMENT_BYTES
from lastgood.storage.objects.upload import UPLOAD_THREADS
from lastgood.text import parse_model
from lastgood.units import MIB

__all__ = ["main", "run_rank"]

COLLECTIVE_S: Final = 900.0
"""A rank that waits for the others for this long fails."""
_LEAST_OBJECT_BYTES: Final = 8 * MIB
_MOST_THREADS: Final = 16
"""Of a burst of puts and gets."""
_SCRAMBLE: Final = 1 << 40
"""Added to the seed of what lies in memory before a load."""


def run_rank(order: DcpOrder, report: Callable[[str], None]) -> DcpResult | None:
    """Do what the order says together with the other ranks. Rank 0 returns the result, the others None.

    Raises LastgoodError of whatever failed, on the ranks that see it.
    """
    spec = order.spec
    began = time.perf_counter()
    if spec.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "gloo" if spec.backend == "gloo" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_S))
    try:
        if dist.get_world_size() != spec.ranks:
            raise LastgoodError(f"{dist.get_world_size()} ranks were started for a run of {spec.ranks}")
        return _Bench(order, report).run(began)
    except CheckpointException as error:
        raise CheckpointError(_what_failed(error)) from error
    finally:
        dist.destroy_process_group()


def _what_failed(error: CheckpointException) -> str:
    """DCP's error, which holds the tracebacks of all ranks that failed, in one line: the first one's cause."""
    cause = first_cause(error)
    said = str(cause) if isinstance(cause, LastgoodError) else f"{type(cause).__name__}: {cause}"
    return " ".join(f"DCP failed on rank {', '.join(map(str, sorted(error.failures)))}: {said}".split())


class _Bench:
    def __init__(self, order: DcpOrder, report: Callable[[str], None]) -> None:
        self.spec = order.spec
        # Ranks that a user's own launcher started each have a new suffix; the first one's is everybody's.
        self.suffix: str = _from_first(order.suffix)
        self.root: FolderPlace | BucketPlace = open_place(order.place, order.access)
        self.place: FolderPlace | BucketPlace = self.root.below(self.suffix)
        self.watch = order.watch
        self.keep = order.keep
        self.storage = storage_named(order.spec.storage, order.spec.medium)
        self.first = dist.get_rank() == 0
        self.report = report if self.first else lambda _: None
        self.state: Mapping[str, Any] = {}
        self.planner: Any = None
        self.burst: Callable[[], tuple[float, float | None]] | None = None
        """Measures what the disk takes, or what a bucket takes and gives; of the first rank only."""
        self.raw: list[tuple[float, float | None]] = []

    def run(self, began: float) -> DcpResult | None:
        """All iterations, and what they come to."""
        spec = self.spec
        self.report(f"building {spec.model} on {spec.ranks} ranks")
        model = spread(build_on_meta(spec.model), spec.spread, spec.sharding, spec.device, spec.replicas)
        optimizer = make_optimizer(model) if spec.state == "full" else None
        self.state = state_of(model, spec.state, optimizer)
        # A planner that caches must be one and the same for all saves.
        self.planner = DefaultSavePlanner(enable_plan_caching=True) if spec.planner_cache else None
        setup_s = max(_everybody(time.perf_counter() - began))
        with self._bursts():
            found = [one for number in range(spec.warmup + spec.iterations) for one in self._iteration(number)]
        state_bytes = _complete_bytes(self.state)
        hosts = _everybody(socket.gethostname())
        if not self.first:
            return None
        return DcpResult(
            suffix=self.suffix,
            hosts=hosts,
            state_bytes=state_bytes,
            setup_s=setup_s,
            raw_write_bytes_per_s=[written for written, _ in self.raw],
            raw_read_bytes_per_s=[read for _, read in self.raw if read is not None],
            iterations=found,
        )

    @contextmanager
    def _bursts(self) -> Iterator[None]:
        spec, place = self.spec, self.place
        if isinstance(place, BucketPlace):
            nbytes = _complete_bytes(self.state)  # as many objects as each rank has segments
            share = max(_LEAST_OBJECT_BYTES, nbytes // spec.ranks // UPLOAD_THREADS)
            threads = min(_MOST_THREADS, UPLOAD_THREADS * spec.ranks)
            size = min(share, SEGMENT_BYTES)
            self.burst = lambda: bucket_burst(str(place), place.access.options(), nbytes, size, threads)
            yield
            return
        if not self.first or spec.operation == "load":
            yield
            return
        place.path.mkdir(parents=True, exist_ok=True)
        if lies_in_memory(place.path):
            yield
            return
        with disk_bursts(place.path) as burst:
            self.burst = lambda: (burst(), None)
            yield

    def _iteration(self, number: int) -> list[DcpIteration]:
        warmup = number < self.spec.warmup
        made = []
        if self.first:
            # What earlier iterations left to be written is no part of this one.
            os.sync()
            if self.burst is not None and not warmup:
                self.raw.append(self.burst())
        if self.spec.operation != "load":
            made.append(self._save(number, warmup))
        if self.spec.operation != "save":
            made.append(self._load(number, warmup))
        for one in made:
            self.report(
                f"{one.operation} {number + 1} of {self.spec.warmup + self.spec.iterations}"
                f"{' (warm-up)' if warmup else ''}: {one.mib_per_s:.0f} MiB/s, {one.slowest_s:.3f} s"
            )
        return made

    def _save(self, number: int, warmup: bool) -> DcpIteration:
        """Every iteration saves other contents, so nothing can be left out because it is there already."""
        spec = self.spec
        fill(self.state, spec.seed + number)
        digest = _joined(_everybody(digest_of(self.state)))
        place = self.place.below(saved_name(number))
        if self.first:
            os.sync()
        with self._watched() as work:
            times = self._timed_save(place)
        if self.first:
            write_saved(self.place, Saved(spec=spec, number=number, digest=digest))
            if number > 0 and not self.keep:
                self.place.below(saved_name(number - 1)).remove()
        return DcpIteration(
            operation="save", warmup=warmup, ranks=_everybody(times), digest=digest, server=work[0] if work else None
        )

    @contextmanager
    def _watched(self) -> Iterator[list[ServerWork]]:
        """All ranks begin together inside; afterwards, on the first rank, what the server has done meanwhile."""
        found: list[ServerWork] = []
        before = read_work(self.watch) if self.watch is not None and self.first else None
        dist.barrier()
        yield found
        dist.barrier()
        if self.watch is not None and before is not None:
            found.append(difference(before, read_work(self.watch)))

    def _timed_save(self, place: FolderPlace | BucketPlace) -> RankTimes:
        writer = self.storage.writer(place, self.spec.storage_options)
        gc.collect()
        worked = time.process_time()
        if self.spec.saving == "sync":
            timed = TimedWriter(writer)
            save(dict(self.state), storage_writer=timed, planner=self.planner)
            times = timed.steps.times(time.perf_counter(), timed.nbytes)
            return times.model_copy(update={"cpu_s": time.process_time() - worked})
        thread = self.spec.saving == "thread"
        kind = AsyncCheckpointerType.THREAD if thread else AsyncCheckpointerType.PROCESS
        began = time.perf_counter()
        future = async_save(dict(self.state), storage_writer=writer, planner=self.planner, async_checkpointer_type=kind)
        stall = time.perf_counter() - began
        future.result(timeout=COLLECTIVE_S)  # type: ignore[union-attr]
        return RankTimes(
            nbytes=nbytes_of(self.state),
            total_s=time.perf_counter() - began,
            stall_s=stall,
            cpu_s=time.process_time() - worked if thread else None,
        )

    def _load(self, number: int, warmup: bool) -> DcpIteration:
        saved: Saved = _from_first(newest_saved(self.root, self.suffix) if self.first else None)
        fill(self.state, self.spec.seed + number + _SCRAMBLE)
        place = self.place.below(saved_name(saved.number))
        folder = None
        if isinstance(place, FolderPlace) and place.path.is_dir():
            folder = place.path
        elif self.watch is not None and self.first:
            folder = Path(self.watch.folder)
        if folder is not None:
            forget_cached_pages(folder)
        dist.barrier()
        left = cached_share(folder) if folder is not None and self.first else None
        with self._watched() as work:
            timed = TimedReader(self.storage.reader(place, self.spec.storage_options))
            worked = time.process_time()
            load(dict(self.state), storage_reader=timed)
            times = timed.steps.times(time.perf_counter(), nbytes_of(self.state))
            times = times.model_copy(update={"cpu_s": time.process_time() - worked})
        digest = _joined(_everybody(digest_of(self.state)))
        return DcpIteration(
            operation="load",
            warmup=warmup,
            ranks=_everybody(times),
            digest=digest,
            equal=digest == saved.digest,
            cached_share=left,
            server=work[0] if work else None,
        )


def _everybody(value: Any) -> list[Any]:
    """What every rank says, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _from_first(value: Any) -> Any:
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


def _joined(parts: list[Digest]) -> str:
    """Of the complete state. Raises CheckpointError if ranks that hold the same part do not agree."""
    totals = {
        replica: sum(part.spread for part in parts if part.replica == replica) % (1 << 64)
        for replica in {part.replica for part in parts}
    }
    if len(set(totals.values())) > 1 or len({part.same for part in parts}) > 1:
        said = "; ".join(f"rank {rank}: {asdict(part)}" for rank, part in enumerate(parts))
        raise CheckpointError(f"ranks that hold copies of the same tensors do not hold the same numbers: {said}")
    return f"{(totals[0] + parts[0].same) % (1 << 64):016x}"


def _complete_bytes(state: Mapping[str, Any]) -> int:
    from lastgood.experiments.dcp.contents import pieces_of

    sizes: dict[str, int] = {}
    for piece in pieces_of(state):
        count = 1
        for length in piece.shape:
            count *= length
        sizes[piece.name] = count * piece.local.element_size()
    return sum(sizes.values())


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """One rank's process: do what the order says. 0, or an error's exit code with its message on standard error."""
    (text,) = sys.argv[1:] if arguments is None else arguments
    order = parse_model(DcpOrder, text, "not an order for a rank", most_bytes=MIB)
    if order.parent is not None:
        die_with_parent(order.parent)
    try:
        result = run_rank(order, _say)
        if result is not None and order.result is not None:
            write_result(Path(order.result), result.model_dump_json().encode(), mode=PRIVATE)
    except LastgoodError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
