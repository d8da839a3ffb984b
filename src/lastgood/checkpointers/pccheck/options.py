"""Options of PCcheck. Needs no torch."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from lastgood.checkpointers.agreement.address import check_control
from lastgood.checkpointers.attach.process_end import EXIT_DRAIN_S
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.ranks.directories import Buffers
from lastgood.checkpointers.ranks.replicated import Declared
from lastgood.errors import ConfigError
from lastgood.storage.objects.format import SEGMENT_BYTES
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.units import MIB

__all__ = ["PCcheckOptions"]


class PCcheckOptions(BaseOptions):
    """Options of PCcheck; N, p and b are the paper's names."""

    model_config = ConfigDict(hide_input_in_errors=True)

    path_options: ClassVar[tuple[str, ...]] = ("archive_dir",)
    place_options: ClassVar[tuple[str, ...]] = ("resume_from", "remote")
    later_options: ClassVar[tuple[str, ...]] = (
        "control", "join_timeout_s", "agreement_timeout_s", "resume_from", "resume_buffers", "replicated",
        "remote", "remote_every", "remote_keep", "remote_mbps", "remote_region", "remote_endpoint_url",
        "remote_profile", "keep_best", "best_metric", "best_is",
    )  # fmt: skip

    max_in_flight: int = Field(default=2, ge=1, le=64)
    """N: checkpoints in progress at once."""
    writer_threads: int = Field(default=2, ge=1, le=64)
    """p: writer threads of each."""
    chunk_bytes: int = Field(default=4 * MIB, ge=4096, multiple_of=4096, le=1 << 30)
    """b: what one write takes."""
    pool_bytes: int | None = Field(default=None, ge=2 * 4096)
    """Host memory for copies on their way to storage; None for the size of one checkpoint."""
    keep: int = Field(default=2, ge=1, le=64)
    """K: complete checkpoints kept; 1 is the paper's setting."""
    keep_best: int = Field(default=0, ge=0, le=64)
    """So many stay beside those, the best by the metric that the training gives (`metric`)."""
    best_metric: str = Field(default="loss", pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
    """Its name."""
    best_is: Literal["min", "max"] = "min"
    """Whether less of it is better, or more."""
    pressure: Literal["wait", "skip"] = "wait"
    """What a save does when N are in progress: wait for a place, as in the paper, or skip and be counted."""
    medium: Literal["file", "pmem"] = "file"
    """How slots are written: direct I/O, or stores into mapped persistent memory (a directory on a DAX file system)."""
    writer_cpus: tuple[int, ...] = ()
    """CPUs that writer threads stay on, in turn; none: wherever the kernel likes."""
    rank: int = Field(default=0, ge=0)
    """Whose part of a job of several ranks this is; if neither is given, torch.distributed says both."""
    world_size: int = Field(default=1, ge=1)
    """Ranks of the job; checkpoints of another number are refused. More than one agree on their checkpoints."""
    control: str | None = None
    """``HOST:PORT`` where rank 0 listens for the others; None: torch.distributed tells them of one; "off": ranks do not
    agree, and each uses the directory itself."""
    join_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """How long a rank waits at its beginning for all others."""
    agreement_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """So long out of touch with a rank, checkpoints that wait for it fail; one silent for half of it is missing."""
    resume_from: str | None = None
    """Another job, of any number of ranks, that `attach` goes on from while this one has no checkpoint of its own: a
    directory, or s3://BUCKET/PREFIX."""
    resume_buffers: Buffers = "equal"
    """Buffers of modules, if their number of ranks changes: equal on all ranks, or else refused; or rank 0's."""
    replicated: Declared = "none"
    """What ranks hold alike, so that one of them writes it: nothing; what the placements of DTensors say; beside it
    all plain parameters and optimizer tensors, as in data-parallel training (docs/resharding.md)."""
    loss_spike: float | None = Field(default=8.0, gt=0)
    """How many spreads above the median a loss given to step() is high (`loss_watch`); None: only NaN and infinity."""
    archive_every: int | None = Field(default=None, ge=1)
    """M: every M-th checkpoint is exported to `archive_dir` in the background, and stays there; None: none is."""
    archive_dir: str | None = None
    """Directory of the archive (safetensors files), of this job and rank alone."""
    remote: str | None = None
    """Where checkpoints go in the background that outlive this machine: s3://BUCKET/PREFIX, or a folder of objects
    (docs/s3.md). A place for one job. Keys come from the environment or from a profile."""
    remote_every: int = Field(default=10, ge=1)
    """M: every M-th checkpoint is sent there."""
    remote_keep: int = Field(default=2, ge=1, le=1000)
    """So many of the newest stay there, and the newest one that was not judged bad."""
    remote_mbps: float | None = Field(default=None, gt=0, le=1e6)
    """What each rank sends at most, in 10**6 bits per second; None: as much as goes."""
    remote_region: str | None = None
    """Of the bucket; None: as the environment says."""
    remote_endpoint_url: str | None = None
    """Of a server that is not AWS; None: as the environment says."""
    remote_profile: str | None = None
    """Of the AWS command line's files, for the keys; None: as the environment says."""
    max_failed_restarts: int | None = Field(default=3, ge=1)
    """F: after so many incarnations from one checkpoint without a newer one, the next older is taken; None: never."""
    exit_drain_s: float = Field(default=EXIT_DRAIN_S, ge=0)
    """How long an ending process waits for checkpoints in progress before it gives them up."""

    @field_validator("writer_cpus")
    @classmethod
    def _cpus_exist(cls, cpus: tuple[int, ...]) -> tuple[int, ...]:
        allowed = os.sched_getaffinity(0)
        if not allowed.issuperset(cpus):
            raise ValueError(f"this process may use CPUs {sorted(allowed)}, not {sorted(set(cpus) - allowed)}")
        return cpus

    @field_validator("control")
    @classmethod
    def _control_is_an_address(cls, control: str | None) -> str | None:
        return None if control is None else check_control(control)

    @model_validator(mode="after")
    def _archive_has_both(self) -> PCcheckOptions:
        if (self.archive_every is None) != (self.archive_dir is None):
            raise ValueError("archive_every and archive_dir go together")
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")
        return self

    @model_validator(mode="after")
    def _bucket_can_be(self) -> PCcheckOptions:
        try:
            self.resume_place  # noqa: B018 - as above
        except ConfigError as error:
            raise ValueError(f"resume_from: {error}") from None
        return self

    @model_validator(mode="after")
    def _remote_can_be(self) -> PCcheckOptions:
        if self.remote is None:
            fields = type(self).model_fields
            reach = {"remote_region", "remote_endpoint_url", "remote_profile"} if self.resume_place else set()
            alone = [
                name
                for name, field in fields.items()
                if name.startswith("remote_") and name not in reach and getattr(self, name) != field.default
            ]
            if alone:
                raise ValueError(f"{', '.join(alone)}: only with remote, a place for checkpoints")
        try:
            self.remote_place  # noqa: B018 - it refuses what cannot be
        except ConfigError as error:
            raise ValueError(f"remote: {error}") from None
        return self

    @property
    def remote_place(self) -> ObjectPlace | None:
        """`remote`, and how it is reached; None if there is none."""
        if self.remote is None:
            return None
        return self._place(self.remote)

    @property
    def resume_place(self) -> ObjectPlace | None:
        """`resume_from`, if that is a bucket, and how it is reached: as `remote` is."""
        if self.resume_from is None or not self.resume_from.lower().startswith("s3:"):
            return None
        return self._place(self.resume_from)

    def _place(self, named: str) -> ObjectPlace:
        return ObjectPlace(named, self.remote_region, self.remote_endpoint_url, self.remote_profile)

    @property
    def slots(self) -> int:
        """Slot files: for each checkpoint in flight and each that is kept; one that is archived, one that is sent."""
        kept = self.keep + self.keep_best
        return self.max_in_flight + kept + (self.archive_every is not None) + (self.remote is not None)

    def disk_bytes(self, state_bytes: int) -> int:
        """All slots."""
        return self.slots * state_bytes

    def host_bytes(self, state_bytes: int) -> int:
        """The pool, and a segment on its way to `remote`."""
        pool = state_bytes if self.pool_bytes is None else self.pool_bytes
        return pool + (0 if self.remote is None else min(SEGMENT_BYTES, state_bytes))
