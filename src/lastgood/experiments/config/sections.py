"""Sections of a configuration for the figures that vary more than the interval. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from lastgood.errors import ConfigError
from lastgood.experiments.config.values import (
    BASELINE,
    Count,
    CountOrZero,
    Interval,
    Listed,
    ModelName,
    Rate,
    SystemName,
    Systems,
    UserPath,
)
from lastgood.experiments.dcp.models import MODELS as DCP_MODELS
from lastgood.experiments.dcp.storages import STORAGES
from lastgood.experiments.records.blocks import PAIR_DESIGN, PairPlan
from lastgood.experiments.traces.trace import load_trace
from lastgood.models import FrozenModel
from lastgood.workloads.optimizer_shapes import MODELS

__all__ = [
    "CheckmateSection",
    "ConcurrencySection",
    "DcpSection",
    "GoodputSection",
    "MemorySection",
    "NodesSection",
    "OptimizerBench",
    "PairsSection",
    "PersistSection",
    "RemoteSection",
    "ThreadsSection",
]


def _no_baseline(systems: list[str] | None) -> list[str] | None:
    if systems and BASELINE in systems:
        raise ValueError(f"{BASELINE} takes no checkpoints, so there is nothing to time")
    return systems


def _not_one(rounds: int) -> int:
    if rounds == 1:
        raise ValueError("one pair says nothing about how well its ratio is known")
    return rounds


def _readable_trace(path: str) -> str:
    try:
        failures = load_trace(Path(path)).failures
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not failures:
        raise ValueError("no failure in it, so there is nothing to live through")
    return path


def _shape(name: str) -> str:
    if name not in MODELS:
        raise ValueError("no such shape")
    return name


def _dcp_model(name: str) -> str:
    if name not in DCP_MODELS:
        raise ValueError("no such model")
    return name


_ON_DISK = [storage.name for storage in STORAGES if storage.disk is not None]
_ON_S3 = [storage.name for storage in STORAGES if storage.s3 is not None]


def _storage(name: str) -> str:
    if name not in _ON_DISK:
        raise ValueError("no such storage")
    return name


def _s3_storage(name: str) -> str:
    if name not in _ON_S3:
        raise ValueError("no such storage of buckets")
    return name


_UpTo64 = Annotated[Count, Field(le=64)]
_Repetitions = Annotated[Count, Field(description="a whole number from 1: measurements of each cell")]
_Intervals = Annotated[Listed[Interval], Field(description="a list of whole numbers from 1: steps between checkpoints")]
_SomeSystems = Annotated[Listed[SystemName], AfterValidator(_no_baseline)]
_Model = Annotated[ModelName, Field(description="one of the models")]


class PairsSection(FrozenModel):
    """Whether runs measure blocks with checkpoints and without in turn, and for how long."""

    rounds: Annotated[CountOrZero, AfterValidator(_not_one)] = Field(
        default=0, description="pairs of blocks at least, from 2; 0: one stretch of steps each"
    )
    steps: Count = Field(default=5, description="a whole number from 1: steps of a block with checkpoints, at least")
    half_width: float = Field(
        default=0.03, gt=0, lt=1, description="a share of the ratio: half its interval, at which enough is known"
    )
    budget_s: float = Field(default=20.0, gt=0, description="seconds of blocks after which no pair is begun")

    def plan(self) -> PairPlan | None:
        """What each run is asked for; None for one stretch of steps."""
        return PairPlan(design=PAIR_DESIGN, **self.model_dump(exclude={"steps"})) if self.rounds else None


class GoodputSection(FrozenModel):
    """Figure 9: goodput under failures. Formulas come from runs of all systems; these are the measured ones."""

    trace: Annotated[UserPath, AfterValidator(_readable_trace)] | None = Field(
        description="a trace file with a failure in it (docs/goodput.md), or null for the public one of figure 9"
    )
    systems: _SomeSystems | None = Field(description="a list of systems without none, or null for those of `systems`")
    intervals: _Intervals
    window_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        description="seconds above 0, at most 86400: restoring and training in one measured run"
    )
    failures: Annotated[Count, Field(le=1000)] = Field(
        description="a whole number from 1 to 1000: kills in one measured run, at most"
    )
    repetitions: _Repetitions


class PersistSection(FrozenModel):
    """Figure 11: the time until one checkpoint is durable, against its size."""

    sizes_mb: Listed[Annotated[Count, Field(le=1_000_000)]] = Field(
        description="a list of whole numbers from 1 to 1000000: sizes of a state in units of 10**6 bytes"
    )
    systems: _SomeSystems | None = Field(description="a list of systems without none, or null for those of `systems`")
    writer_threads: _UpTo64 = Field(description="a whole number from 1 to 64: PCcheck's writer threads; 4 in the paper")
    checkpoints: Count = Field(description="a whole number from 1: checkpoints timed in each run")
    repetitions: _Repetitions


class ConcurrencySection(FrozenModel):
    """Figure 12: slowdown against the checkpoints in flight."""

    model: _Model
    in_flight: Listed[_UpTo64] = Field(description="a list of whole numbers from 1 to 64: PCcheck's max_in_flight")
    writer_threads: _UpTo64 = Field(description="a whole number from 1 to 64: PCcheck's writer threads; 1 in the paper")
    intervals: _Intervals
    repetitions: _Repetitions


class ThreadsSection(FrozenModel):
    """Figure 13: slowdown against the writer threads of each checkpoint."""

    model: _Model
    writer_threads: Listed[_UpTo64] = Field(
        description="a list of whole numbers from 1 to 64: PCcheck's writer_threads"
    )
    intervals: _Intervals
    repetitions: _Repetitions


class MemorySection(FrozenModel):
    """Figure 14: slowdown against the host memory for copies."""

    model: _Model
    pool_shares: Listed[Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)]] = Field(
        description="a list of numbers above 0, at most 16: PCcheck's pool_bytes in sizes of the state"
    )
    intervals: _Intervals
    repetitions: _Repetitions


class _OverNodes(FrozenModel):
    hostfile: UserPath | None = Field(
        description="a hostfile (docs/multinode.md), or null for a testbed inside this machine, which needs root"
    )
    ssh_config: UserPath | None = Field(description="an ssh configuration in place of your own, or null")
    nodes: Annotated[Count, Field(le=4096)] = Field(description="a whole number from 1 to 4096: hosts")
    slots: Annotated[Count, Field(le=1024)] = Field(description="a whole number from 1 to 1024: ranks on each host")
    rate: Rate | None = Field(
        description="as 1gbit: the limit of a testbed's links, of other hosts' only noted, for the bound; or null"
    )
    systems: Systems = Field(
        description="a list of systems that run over several ranks; none is always measured, checkmate at 1 only"
    )
    shared_scratch: bool = Field(
        description="true or false: all nodes see one scratch folder, so PCcheck writes what ranks hold alike only once"
    )
    intervals: _Intervals
    iterations: Count = Field(description="a whole number from 1: steps measured, at least")
    repetitions: _Repetitions

    @property
    def ranks(self) -> int:
        """Processes of one training."""
        return self.nodes * self.slots


class NodesSection(_OverNodes):
    """Figures 8e and 8f: throughput of a training over several nodes."""

    model: _Model
    options: dict[str, Any] = Field(description="options of the model that differ from those in `workloads`")
    parallel: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3", "pipeline"] = Field(
        description="ddp, fsdp2, or DeepSpeed's zero1, zero2, zero3 or pipeline: how ranks share the work"
    )


class OptimizerBench(FrozenModel):
    """The panel of Checkmate's figure that times a shadow's update."""

    model: Annotated[str, AfterValidator(_shape)] = Field(
        description=f"one of {', '.join(MODELS)}: shapes of `lastgood shadow bench`"
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field(description="sgd, adam or adamw")
    threads: Listed[_UpTo64] = Field(description="a list of whole numbers from 1 to 64: threads of each shadow")
    shadows: Listed[_UpTo64] = Field(
        description="a list of whole numbers from 1 to 64: shadows that share the model's buckets"
    )
    updates: Count = Field(description="a whole number from 1: updates timed at each point")


class CheckmateSection(_OverNodes):
    """Checkmate's figure: what a checkpoint of each iteration costs, over several nodes, and what failures cost."""

    shadows: Annotated[Count, Field(le=4096)] = Field(
        description="a whole number from 1 to 4096: Checkmate's shadows, spread over the hosts"
    )
    models: Listed[ModelName] = Field(description="a list of models, at least one; data-parallel training")
    options: dict[ModelName, dict[str, Any]] = Field(
        description="by model: options that differ from those in `workloads`"
    )
    kills: Annotated[CountOrZero, Field(le=1000)] = Field(
        description="a whole number from 0 to 1000: kills of all ranks after each measurement, for the lost iterations"
    )
    optimizer: OptimizerBench = Field(description="what the panel on optimizers times")


class DcpSection(FrozenModel):
    """The figure of torch's distributed checkpoint: rates of saves and loads by storage, threads and ranks.

    Defaults are for configurations from before it.
    """

    model: Annotated[str, AfterValidator(_dcp_model)] = Field(
        default="L7b-64MB", description="a model of `lastgood dcp save --model`, for instance L7b-64MB"
    )
    state: Literal["model", "full"] = Field(default="model", description="model, or full: with AdamW's moments")
    spread: Literal["fsdp2", "fsdp1", "ddp"] = Field(
        default="fsdp2", description="fsdp2, fsdp1 or ddp: how the model lies on the ranks"
    )
    ranks: Listed[Annotated[Count, Field(le=1024)]] = Field(
        default=[1, 2, 4], description="a list of whole numbers from 1 to 1024: processes of this machine"
    )
    storages: Listed[Annotated[str, AfterValidator(_storage)]] = Field(
        default=["disk", "lastgood"], description=f"a list of {', '.join(_ON_DISK)}"
    )
    thread_counts: Listed[_UpTo64] = Field(
        default=[1, 4],
        description="a list of whole numbers from 1 to 64: threads of each rank, of storages that have them",
    )
    s3_storages: list[Annotated[str, AfterValidator(_s3_storage)]] = Field(
        default=["lastgood", "s3torchconnector"],
        description=f"a list of {', '.join(_ON_S3)}, on an S3 server of each run's own; empty: none",
    )
    s3_ranks: Listed[Annotated[Count, Field(le=1024)]] = Field(
        default=[1, 2], description="a list of whole numbers from 1 to 1024: as `ranks`, on S3"
    )
    s3_thread_counts: Listed[_UpTo64] = Field(
        default=[4], description="a list of whole numbers from 1 to 64: as `thread_counts`, on S3"
    )
    iterations: Count = Field(default=3, description="a whole number from 1: timed saves, and as many loads")
    warmup: CountOrZero = Field(default=1, description="a whole number from 0: untimed ones before them")
    repetitions: _Repetitions = 1


class RemoteSection(FrozenModel):
    """The figure of checkpoints that leave the machine for S3. Defaults are for configurations from before it."""

    width: Count = Field(default=1024, description="a whole number from 1: weights of a layer are so many squared")
    layers: Annotated[Count, Field(ge=2, le=1000)] = Field(default=8, description="a whole number from 2 to 1000")
    batch: Count = Field(default=64, description="a whole number from 1: samples of a step")
    rounds: Count = Field(default=3, description="a whole number from 1: how often each way is measured")
    steps: Count = Field(default=60, description="a whole number from 1: steps of a block of the training")
    interval: Count = Field(default=5, description="a whole number from 1: steps from checkpoint to checkpoint")
    every: Count = Field(default=4, description="a whole number from 1: every so many-th checkpoint goes to S3")
    dcp_storage: Annotated[str, AfterValidator(_s3_storage)] | None = Field(
        default="s3torchconnector", description=f"what DCP's async_save writes with ({', '.join(_ON_S3)}), or null"
    )
    ranks: _UpTo64 = Field(default=2, description="a whole number from 1 to 64: ranks of a job that comes back")
    other_ranks: _UpTo64 = Field(default=1, description="a whole number from 1 to 64: ranks that come back otherwise")
    repetitions: _Repetitions = 1
