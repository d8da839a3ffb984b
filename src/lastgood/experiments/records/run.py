"""The run record: one JSON file per run, written once, atomically, and never edited. Needs no torch.

This schema serves the workflow's validation, the CSV columns and the docs (docs/timing.md explains each clock).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lastgood.errors import LastgoodError
from lastgood.experiments.records.spec import RunSpec
from lastgood.files import write_result
from lastgood.sinks import Sink
from lastgood.text import read_model
from lastgood.units import MIB

__all__ = [
    "MOST_RECORD_BYTES",
    "RECORD_VERSION",
    "Clocks",
    "Counts",
    "Failure",
    "Proof",
    "RankFacts",
    "RanksRun",
    "Resources",
    "RunRecord",
    "ShadowFacts",
    "WhereRun",
    "WorkloadFacts",
    "load_record",
]

RECORD_VERSION: Literal[1] = 1
MOST_RECORD_BYTES = 64 * MIB
"""Of a file with any record; one with the timings of every step has a few."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WhereRun(_Part):
    """The machine and the software of a run."""

    cpu: str
    cores: int
    memory_bytes: int
    gpu: str | None
    kernel: str
    scratch_path: str
    scratch_filesystem: str
    scratch_device: str
    versions: dict[str, str]
    git_revision: str | None
    git_dirty: bool | None
    slurm_job: str | None = None
    """Number of the Slurm job that this was measured in; None without Slurm."""
    slurm_node: str | None = None
    """Slurm's name for the node."""


class WorkloadFacts(_Part):
    """What was trained."""

    parameters: int
    state_bytes: int
    """Bytes of one checkpoint's tensors, aliases counted once, after the warm-up."""
    state_tensors: int
    data_name: str
    data_source: str
    data_sha256: str
    losses: list[float]
    """Loss of every measured step, in order."""


class Clocks(_Part):
    """All times in seconds, of measured steps only; the warm-up is excluded."""

    measured_steps: int
    elapsed_s: float
    """First measured step's start to last one's end, saves included, drain excluded."""
    iterations_per_s: float
    durable_iterations_per_s: float
    """measured_steps / (elapsed_s + drain_s): what is unfinished at the end counts."""
    step_s: list[float]
    """Duration of every step, with its save if it had one."""
    hide_s: float
    """Median time from a save (or a step's end, without one) to the next update: what a copy can hide behind."""
    stall_save_s: float
    """Total time in save()."""
    stall_update_s: float
    """Total time that optimizers waited in before_update()."""
    persist_s: list[float]
    """From each save() call to that checkpoint's durability."""
    drain_s: float


class Resources(_Part):
    """Peaks and totals of the training process, over its whole life unless said otherwise."""

    peak_rss_bytes: int
    peak_device_bytes: int
    cpu_s: float
    """User and system time over the measured steps and the drain, all threads."""
    bytes_written: int
    """Bytes that the checkpointer handed to storage over the measured steps and the drain."""


class Counts(_Part):
    """Checkpoints asked for during the measured steps, by what became of them."""

    started: int
    durable: int
    superseded: int
    failed: int
    skipped: int


class Proof(_Part):
    """The restore proof: a digest of live tensors, and one taken in a fresh process after a restore."""

    step: int
    restored_step: int
    digest_live: str
    digest_restored: str
    equal: bool
    """Whether step, digest and the losses of the steps that followed agree."""
    restore_s: float
    next_losses_live: list[float]
    """Losses of the steps that followed the checkpoint in the run that was never stopped."""
    next_losses_restored: list[float]
    """The same steps, trained on from the restored state."""


class RankFacts(_Part):
    """What one rank of several saw."""

    rank: int
    host: str
    state_bytes: int
    """Bytes of the tensors that it holds."""
    checkpoint_bytes: int
    """What it hands to storage, or to other nodes, for one checkpoint; 0 where another rank writes for it."""
    elapsed_s: float
    drain_s: float
    stall_save_s: float
    stall_update_s: float
    resources: Resources
    counts: Counts
    proof_equal: bool | None
    restore_s: float | None


class RanksRun(_Part):
    """A run over several ranks. Around it, a duration is that of the slowest rank, a resource the sum over all."""

    launcher: str
    hosts: list[str]
    """In the order of their ranks."""
    link_bits_per_s: int | None
    """Rate of each host's link, both ways: a testbed's limit, or what the user said; None where nobody knows."""
    bytes_per_disk: int
    """Of one checkpoint, on the disk that gets most of it: hosts of one kernel share a disk. 0 where none gets any."""
    bytes_per_link: int
    """Of one checkpoint, over the link that carries most of it: 0 but for systems that keep it on other nodes."""
    ranks: list[RankFacts]

    @property
    def most_on(self) -> tuple[Sink, int]:
        """The sink that has most to do with one checkpoint, and how many bytes of it go there."""
        return (Sink.LINK, self.bytes_per_link) if self.bytes_per_link else (Sink.DISK, self.bytes_per_disk)


class ShadowFacts(_Part):
    """One of the processes to which Checkmate's gradients go."""

    host: str
    cpu_s: float
    """User and system time over the measured steps and the drain, all threads."""
    received_bytes: int
    """Of gradients, over the measured steps and the drain."""
    optimizer_s: float
    """Seconds in its optimizer over the measured steps and the drain."""
    peak_rss_bytes: int
    """Over its whole life until then."""


class Failure(_Part):
    """One kill of all ranks, behind the measurement, and what the restore in fresh processes gave back."""

    kill_after_steps: float
    """When it was to fall: iterations, at the measured speed, from that life's begin."""
    reached_step: int
    """The last step that some rank had finished."""
    restored_step: int
    lost_steps: int
    """The difference: work that has to be done again."""
    restore_s: float
    losses_checked: int
    """Steps behind the restored one whose losses were known from before the kill."""
    losses_equal: bool
    """Whether they came out the same: to the bit on the CPU, to 1 % on CUDA."""


class RunRecord(_Part):
    """One run, whole."""

    record_version: Literal[1] = RECORD_VERSION
    spec: RunSpec
    started_at: str
    """UTC, ISO 8601."""
    wall_s: float
    """The whole `lastgood run`, from its lock to its record."""
    where: WhereRun
    workload: WorkloadFacts
    clocks: Clocks
    resources: Resources
    counts: Counts
    storage: dict[str, Any] = Field(default_factory=dict)
    """What the system says about how its bytes reached the disk, for instance ``{"direct_io": true}``."""
    proof: Proof | None
    notes: list[str] = Field(default_factory=list)
    ranks: RanksRun | None = None
    """Of a run over several ranks."""
    shadows: list[ShadowFacts] = Field(default_factory=list)
    """Of a run under Checkmate."""
    failures: list[Failure] = Field(default_factory=list)
    """One for each kill that the spec asks for."""

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the whole record or none."""
        write_result(path, (self.model_dump_json(indent=1) + "\n").encode())


def load_record(path: Path) -> RunRecord:
    """Read and check one record. Raises LastgoodError, naming the file and the field, if it is not one."""
    return read_model(
        RunRecord,
        path,
        f"a run record of version {RECORD_VERSION}",
        most_bytes=MOST_RECORD_BYTES,
        advice="remove it and run again",
        error=LastgoodError,
    )
