"""Runs of the suite as MLPerf Storage describes checkpoint runs, and each of its rules that they keep or break.

Rules and sizes: MLCommons, "MLPerf Storage", Rules.md, section 4 and table 2 (v2.0 and v3.0 have the same numbers);
names of the results: DLIO's summary.json, which MLPerf's own tool reads. A result of the name MLPerf comes only from
that tool, so this is a comparison, and is labelled as one. Needs no torch.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from lastgood.errors import ConfigError
from lastgood.experiments.records.dcp import DcpIteration, DcpRecord
from lastgood.models import FrozenModel
from lastgood.units import GIB, format_bytes, format_seconds

__all__ = ["MLPERF_MODELS", "MlperfSummary", "Rule", "summarize"]

_CHECKPOINTS: Final = 10
_GAP_S: Final = 30.0
_LEAST_PER_HOST: Final = 4
_TIMES_MEMORY: Final = 3
_SIZE_TOLERANCE: Final = 0.05
_MOST_CACHED: Final = 0.01


class _Wanted(NamedTuple):
    processes: int
    checkpoint_gib: float


MLPERF_MODELS: Final = {
    "llama3-8b": _Wanted(8, 105),
    "llama3-70b": _Wanted(64, 912),
    "llama3-405b": _Wanted(512, 5.29 * 1024),
    "llama3-1t": _Wanted(1024, 18 * 1024),
}
"""Table 2: processes, and GiB of a checkpoint (model and optimizer)."""


class Rule(FrozenModel):
    """One rule, and what the runs did."""

    name: str
    """MLPerf's, if it has one."""
    met: bool
    found: str
    """What was done, in words."""


class MlperfSummary(FrozenModel):
    """The numbers under DLIO's names, and the rules."""

    note: Literal["not an MLPerf result: only MLCommons' own tool makes one"] = (
        "not an MLPerf result: only MLCommons' own tool makes one"
    )
    model: str
    storage: str
    num_accelerators: int
    """Processes."""
    num_hosts: int
    start: str
    end: str
    metric: dict[str, float]
    """Rates are means of each checkpoint's bytes over its slowest process, in GiB/s, under DLIO's names."""
    rules: list[Rule]

    @property
    def broken(self) -> list[Rule]:
        """Rules that the runs did not keep."""
        return [rule for rule in self.rules if not rule.met]


def summarize(save: DcpRecord, load: DcpRecord | None = None) -> MlperfSummary:
    """Of the record of a save and that of the load after it, or of one that did both.

    Raises ConfigError for records that do not belong together, or hold nothing of one of the two.
    """
    load = load or save
    same = ("model", "state", "ranks", "storage", "machine")
    different = [name for name in same if getattr(save.spec, name) != getattr(load.spec, name)]
    if different or save.suffix != load.suffix:
        what = ", ".join(different) or "the checkpoint's suffix"
        raise ConfigError(f"these two records do not belong together: they differ in {what}")
    saves, loads = save.counted("save"), load.counted("load")
    if not saves or not loads:
        raise ConfigError(
            "a summary takes saves and loads: name the record of `lastgood dcp save` and that of `lastgood dcp load`, "
            "or the one of `lastgood dcp save-and-load`"
        )
    metric = {
        **_metrics("save", saves, save.state_bytes),
        **_metrics("load", loads, load.state_bytes),
        "checkpoint_size_GB": save.state_bytes / GIB,
    }
    return MlperfSummary(
        model=save.spec.model,
        storage=save.spec.storage,
        num_accelerators=save.spec.ranks,
        num_hosts=save.spec.nodes,
        start=save.started_at,
        end=_ended(load).isoformat(timespec="seconds"),
        metric=metric,
        rules=list(_rules(save, load, saves, loads)),
    )


def _metrics(what: str, found: list[DcpIteration], nbytes: int) -> dict[str, float]:
    rates = [nbytes / GIB / one.slowest_s for one in found]
    seconds = [one.slowest_s for one in found]
    return {
        f"{what}_checkpoint_io_mean_GB_per_second": statistics.fmean(rates),
        f"{what}_checkpoint_io_stdev_GB_per_second": statistics.pstdev(rates),
        f"{what}_checkpoint_duration_mean_seconds": statistics.fmean(seconds),
        f"{what}_checkpoint_duration_stdev_seconds": statistics.pstdev(seconds),
    }


def _rules(save: DcpRecord, load: DcpRecord, saves: list[DcpIteration], loads: list[DcpIteration]) -> Iterator[Rule]:
    spec = save.spec
    wanted = MLPERF_MODELS.get(spec.model)
    if wanted is None:
        known = ", ".join(MLPERF_MODELS)
        yield Rule(name="model (table 2)", met=False, found=f"{spec.model} is none of {known}")
    else:
        yield Rule(name="model (table 2)", met=True, found=spec.model)
        size = save.state_bytes / GIB
        yield Rule(
            name="checkpoint size (table 2)",
            met=abs(size / wanted.checkpoint_gib - 1) <= _SIZE_TOLERANCE,
            found=f"{size:.3g} GiB of {wanted.checkpoint_gib:.4g}",
        )
        yield Rule(
            name="checkpointClosedMpiProcesses",
            met=spec.ranks == wanted.processes,
            found=f"{spec.ranks} processes of {wanted.processes}",
        )
    least = spec.ranks // spec.nodes
    yield Rule(
        name="checkpointClosedAcceleratorsPerHost",
        met=least >= _LEAST_PER_HOST,
        found=f"{least} processes a host; at least {_LEAST_PER_HOST}",
    )
    for name, found, record in (("writes", saves, save), ("reads", loads, load)):
        warm = sum(one.warmup for one in record.iterations)
        before = f", after {warm} that do not count" if warm else ""
        yield Rule(
            name=f"{_CHECKPOINTS} {name}",
            met=len(found) == _CHECKPOINTS and not warm,
            found=f"{len(found)} {name}{before}",
        )
    separate = save is not load
    yield Rule(
        name="writes first, then reads",
        met=separate,
        found="the load is a run after the save" if separate else "each save was loaded at once",
    )
    yield Rule(
        name="every checkpoint that was written is read",
        met=not separate,
        found="each one" if not separate else f"the newest one, {len(loads)} times",
    )
    if separate:
        gap_s = (datetime.datetime.fromisoformat(load.started_at) - _ended(save)).total_seconds()
        yield Rule(
            name="checkpointCacheFlushValidation",
            met=0 <= gap_s <= _GAP_S,
            found=f"{format_seconds(max(0.0, gap_s))} between writing and reading"
            if gap_s >= 0
            else "reading began before writing had ended",
        )
    yield Rule(
        name="flushed to stable storage",
        met=save.durable and not any("tmpfs" in reason for reason in save.invalid),
        found="every save ends with a flush" if save.durable else "saves may end in the page cache",
    )
    yield _caches(save, load)
    different = sum(one.equal is not True for one in loads)
    yield Rule(
        name="loads equal what was saved (Lastgood's own)",
        met=not different,
        found=f"{len(loads) - different} of {len(loads)} loads",
    )


def _caches(save: DcpRecord, load: DcpRecord) -> Rule:
    """Three times the memory of a host is written on it, or its caches are dropped before reading."""
    per_host, memory = save.state_bytes / save.spec.nodes, save.where.memory_bytes
    found = f"{format_bytes(int(per_host))} a host, which has {format_bytes(memory)}"
    remote = "://" in load.place
    shares = [one.cached_share for one in load.counted("load")]
    held = None if None in shares else max((share for share in shares if share is not None), default=None)
    if per_host < _TIMES_MEMORY * memory:
        found += (
            "; what the server keeps in memory is not known"
            if remote
            else "; how much of the files was in the page cache was not looked at"
            if held is None
            else f"; {100 * held:.0f} % of the files were in the page cache when a load began, at most"
        )
    dropped = not remote and held is not None and held <= _MOST_CACHED
    return Rule(
        name=f"{_TIMES_MEMORY} times the memory, or caches dropped",
        met=dropped or per_host >= _TIMES_MEMORY * memory,
        found=found,
    )


def _ended(record: DcpRecord) -> datetime.datetime:
    return datetime.datetime.fromisoformat(record.started_at) + datetime.timedelta(seconds=record.wall_s)
