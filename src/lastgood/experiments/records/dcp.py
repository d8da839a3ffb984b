"""Saves and loads through torch.distributed.checkpoint: what is timed, and its record. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.experiments.records.base import MachineLabel, Record, Scale, SpecWithoutWorkload
from lastgood.models import FrozenModel
from lastgood.units import GIB, MIB, format_seconds

__all__ = [
    "DCP_METHOD",
    "DCP_PANEL",
    "DcpIteration",
    "DcpRecord",
    "DcpSpec",
    "Medium",
    "Operation",
    "RankTimes",
    "Saving",
    "ServerWork",
    "Sharding",
    "Spread",
    "StateKind",
]

DCP_METHOD = 1
"""Version of how saves and loads are timed, part of every run's identity."""
DCP_PANEL = "dcp"
Operation = Literal["save", "load", "save-and-load"]
Medium = Literal["disk", "s3"]
"""Where checkpoints are: a folder, or a bucket."""
Spread = Literal["fsdp2", "fsdp1", "ddp"]
"""How the model lies on the ranks: each parameter's shards (torch's fully_shard, or its FullyShardedDataParallel), or a
complete copy on each."""
Sharding = Literal["full", "hybrid"]
StateKind = Literal["model", "full"]
"""The model's tensors, or AdamW's moments as well."""
Saving = Literal["sync", "thread", "process"]
"""`save`, or `async_save` whose writing is done by a thread or by a process."""
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


_USD = {"GET": 0.4e-6, "HEAD": 0.4e-6, "DELETE": 0.0}
_USD_OTHERS = 5e-6
"""PUT, COPY, POST and LIST."""


class DcpSpec(SpecWithoutWorkload):
    """One run: one state saved, loaded, or both, some times over, by all ranks together."""

    CAME_LATER: ClassVar[tuple[str, ...]] = ("medium",)
    NOT_IN_CELL: ClassVar[Mapping[str, Any]] = {"repetition": True}

    spec_version: Literal[1] = 1
    method: int = Field(default=DCP_METHOD, ge=1)
    machine: MachineLabel
    scale: Scale
    operation: Operation
    model: _Name
    state: StateKind = "model"
    spread: Spread = "fsdp2"
    sharding: Sharding = "full"
    replicas: int = Field(default=2, ge=2, le=4096)
    """Groups of ranks that hold the same shards, if sharding is ``hybrid``."""
    backend: Literal["gloo", "nccl"] = "gloo"
    medium: Medium = "disk"
    storage: _Name
    storage_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Of the storage, all resolved."""
    saving: Saving = "sync"
    planner_cache: bool = False
    ranks: int = Field(ge=1, le=65536)
    nodes: int = Field(default=1, ge=1, le=4096)
    iterations: int = Field(ge=1, le=100_000)
    warmup: int = Field(default=1, ge=0, le=1000)
    """Iterations before those that count; their times are kept apart."""
    seed: int = Field(default=0, ge=0)
    repetition: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ranks < self.nodes:
            raise ValueError(f"{self.ranks} ranks are too few for {self.nodes} nodes")
        if self.sharding == "hybrid":
            if self.spread == "ddp":
                raise ValueError("sharding=hybrid is for FSDP; with DDP every rank holds all of the model")
            if self.ranks % self.replicas or self.ranks < 2 * self.replicas:
                raise ValueError(f"sharding=hybrid: {self.ranks} ranks are not {self.replicas} groups of two or more")
        return self

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where the state lies: NCCL's ranks have a GPU each."""
        return "cuda" if self.backend == "nccl" else "cpu"

    @property
    def panel(self) -> str:
        """Its figures show nothing else."""
        return DCP_PANEL

    @property
    def over_ranks(self) -> bool:
        """Ranks are processes of their own, also if there is one."""
        return self.nodes > 1

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        where = "" if self.medium == "disk" else f"-{self.medium}"
        cell = f"w{self.ranks}-{self.spread}-{self.saving}{where}-c{self.cell_hash}"
        name = f"r{self.repetition}.json"
        return PurePosixPath(self.machine, self.scale, DCP_PANEL, self.model, self.storage, cell, name)

    def title(self) -> str:
        """A short name for logs."""
        by = self.storage if self.medium == "disk" else f"{self.storage} on {self.medium}"
        return f"dcp {self.operation} of {self.model} by {by}, {self.spread} {self.ranks} r{self.repetition}"


class RankTimes(FrozenModel):
    """One rank's part of one save or load, in seconds from a common start."""

    nbytes: int = Field(ge=0)
    """That it wrote or read, without metadata."""
    total_s: _Seconds
    """Until the call, or for an asynchronous save its future, was done."""
    stall_s: _Seconds
    """In which its training would have waited."""
    plan_s: _Seconds | None = None
    """Its own plan. None, with all that follow, if torch did the work and its steps cannot be timed."""
    gather_s: _Seconds | None = None
    """From its own plan to the one that comes back from all ranks."""
    transfer_s: _Seconds | None = None
    """Writing or reading its items."""
    finish_s: _Seconds | None = None
    """From its last item to the end: the other ranks, and the metadata."""
    cpu_s: _Seconds | None = None
    """Of its process, all threads, from begin to end."""


class ServerWork(FrozenModel):
    """What an S3 server did in one save or load, by its own counters."""

    cpu_s: _Seconds
    requests: dict[str, int]
    """By operation and status, as ``PUT 200``."""
    received_bytes: int = Field(ge=0)
    """Bodies of requests."""
    sent_bytes: int = Field(ge=0)

    @property
    def failed(self) -> int:
        """Requests that the server could not do (status 500 and above): their clients repeat them, or give up."""
        return sum(count for name, count in self.requests.items() if name.rpartition(" ")[2] >= "500")

    @property
    def usd(self) -> float:
        """What AWS would ask for these requests: list price of S3 Standard in us-east-1; deletes cost nothing."""
        return sum(
            count * _USD.get(name.partition(" ")[0], _USD_OTHERS)
            for name, count in self.requests.items()
            if name.rpartition(" ")[2] < "500"
        )


class DcpIteration(FrozenModel):
    """One save or load by all ranks."""

    operation: Literal["save", "load"]
    warmup: bool
    ranks: list[RankTimes] = Field(min_length=1)
    digest: str
    """Of the complete state, 16 hexadecimal digits; the same for any number of ranks."""
    equal: bool | None = None
    """Whether a load gave what was saved."""
    server: ServerWork | None = None
    """What a server of the command's own did for it."""
    cached_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the files' bytes, in the page cache of the first rank's host when a load began."""

    @property
    def nbytes(self) -> int:
        """Of all ranks."""
        return sum(rank.nbytes for rank in self.ranks)

    @property
    def slowest_s(self) -> float:
        """Of all ranks."""
        return max(rank.total_s for rank in self.ranks)

    @property
    def mib_per_s(self) -> float:
        """All bytes over the slowest rank's time."""
        return self.nbytes / MIB / self.slowest_s

    @property
    def cpu_s_per_gib(self) -> float | None:
        """Of the ranks' processes together."""
        found = [rank.cpu_s for rank in self.ranks if rank.cpu_s is not None]
        return sum(found) / (self.nbytes / GIB) if len(found) == len(self.ranks) and self.nbytes else None

    @property
    def server_cpu_s_per_gib(self) -> float | None:
        """Of the server."""
        return self.server.cpu_s / (self.nbytes / GIB) if self.server is not None and self.nbytes else None

    @property
    def skew_s(self) -> float | None:
        """Between the first and the last rank that had its items transferred."""
        found = [rank.transfer_s for rank in self.ranks if rank.transfer_s is not None]
        return max(found) - min(found) if len(found) == len(self.ranks) else None

    @property
    def coordination_s(self) -> float | None:
        """What is left of the slowest rank's time when the slowest transfer is taken away."""
        found = [rank.transfer_s for rank in self.ranks if rank.transfer_s is not None]
        return self.slowest_s - max(found) if len(found) == len(self.ranks) else None


class DcpRecord(Record[DcpSpec]):
    """One run, complete."""

    NAME: ClassVar[str] = "a record of DCP saves and loads"

    place: str
    """The folder or URI that the checkpoints were in."""
    suffix: str
    """Their name in it, which `lastgood dcp load --suffix` takes."""
    hosts: list[str]
    """By rank."""
    state_bytes: int = Field(ge=0)
    """Of the complete state, each tensor once."""
    setup_s: _Seconds
    """Processes, model and state, until the first iteration: no part of any other time."""
    durable: bool
    """Whether a save that has ended is on the disk, so far as its storage can promise it."""
    raw_write_bytes_per_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=list)
    """Plain writes to the same disk, or puts into the same bucket, by the first rank, before each save that counts."""
    raw_read_bytes_per_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=list)
    """Gets of what was put, beside them."""
    server: str | None = None
    """The S3 server that the command itself ran."""
    iterations: list[DcpIteration] = Field(min_length=1)
    invalid: list[str] = Field(default_factory=list)
    """Why its numbers must not be compared with others; empty if they may."""

    def counted(self, operation: Literal["save", "load"]) -> list[DcpIteration]:
        """The iterations that count."""
        return [one for one in self.iterations if one.operation == operation and not one.warmup]

    def median_mib_per_s(self, operation: Literal["save", "load"]) -> float | None:
        """Of the iterations that count."""
        found = [one.mib_per_s for one in self.counted(operation)]
        return statistics.median(found) if found else None

    def summary(self) -> str:
        """The medians, and whether all loads were equal."""
        parts = []
        for operation in ("save", "load"):
            rate = self.median_mib_per_s(operation)
            if rate is not None:
                seconds = statistics.median(one.slowest_s for one in self.counted(operation))
                parts.append(f"{operation} {rate:.0f} MiB/s ({format_seconds(seconds)})")
        loads = [one for one in self.iterations if one.operation == "load"]
        if loads:
            parts.append(f"{sum(one.equal is True for one in loads)} of {len(loads)} loads equal to what was saved")
        return ", ".join(parts)

    def marks(self) -> list[str]:
        """What figures mark about it."""
        return self.invalid
