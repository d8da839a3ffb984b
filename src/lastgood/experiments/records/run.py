"""The run record: one JSON file per run, written once, atomically, and never edited. Needs no torch.

This schema serves the workflow's validation, the CSV columns and the docs (docs/timing.md explains each clock).
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from lastgood.checkpointers.registry import system_traits
from lastgood.experiments.records.base import Record
from lastgood.experiments.records.blocks import Block, Pairs, without_none_pairs
from lastgood.experiments.records.spec import RunSpec
from lastgood.models import FrozenModel
from lastgood.sinks import Sink

__all__ = [
    "Clocks",
    "Counts",
    "Failure",
    "Proof",
    "RankFacts",
    "RanksRun",
    "Resources",
    "RunRecord",
    "ShadowFacts",
    "WorkloadFacts",
]


class WorkloadFacts(FrozenModel):
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


class Clocks(FrozenModel):
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


class Resources(FrozenModel):
    """Peaks and totals of the training process, over its whole life unless said otherwise."""

    peak_rss_bytes: int
    peak_device_bytes: int
    cpu_s: float
    """User and system time over the measured steps and the drain, all threads."""
    bytes_written: int
    """Bytes that the checkpointer handed to storage over the measured steps and the drain."""


class Counts(FrozenModel):
    """Checkpoints asked for during the measured steps, by what became of them."""

    started: int
    durable: int
    superseded: int
    failed: int
    skipped: int


class Proof(FrozenModel):
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


class LiveProof(FrozenModel):
    """The half of a proof that the training which took the checkpoint has seen."""

    step: int
    digest: str
    next_losses: list[float]


class RestoredProof(LiveProof):
    """The half that a fresh process has seen which restored it."""

    restore_s: float


class RankFacts(FrozenModel):
    """What one rank of several saw."""

    rank: int
    host: str
    state_bytes: int
    """Bytes of the tensors that it holds."""
    checkpoint_bytes: int
    """What it hands to storage, or to other nodes, for one checkpoint; 0 if another rank writes for it."""
    elapsed_s: float
    drain_s: float
    stall_save_s: float
    stall_update_s: float
    resources: Resources
    counts: Counts
    proof_equal: bool | None
    restore_s: float | None


class RanksRun(FrozenModel):
    """A run over several ranks. Around it, a duration is that of the slowest rank, a resource the sum over all."""

    launcher: str
    hosts: list[str]
    """In the order of their ranks."""
    link_bits_per_s: int | None
    """Rate of each host's link, both ways: a testbed's limit, or what the user said; None if nobody knows."""
    bytes_per_disk: int
    """Of one checkpoint, on the disk that gets most of it: hosts of one kernel share a disk. 0 if none gets any."""
    bytes_per_link: int
    """Of one checkpoint, over the link that carries most of it: 0 but for systems that keep it on other nodes."""
    ranks: list[RankFacts]

    @property
    def most_on(self) -> tuple[Sink, int]:
        """The sink that has most to do with one checkpoint, and how many bytes of it go there."""
        return (Sink.LINK, self.bytes_per_link) if self.bytes_per_link else (Sink.DISK, self.bytes_per_disk)


class ShadowFacts(FrozenModel):
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


class Failure(FrozenModel):
    """One kill of all ranks, after the measurement, and what the restore in fresh processes gave back."""

    kill_after_steps: float
    """When it was to fall: iterations, at the measured speed, from the begin of that incarnation."""
    reached_step: int
    """The last step that some rank had finished."""
    restored_step: int
    lost_steps: int
    """The difference: work that has to be done again."""
    restore_s: float
    losses_checked: int
    """Steps after the restored one whose losses were known from before the kill."""
    losses_equal: bool
    """Whether they came out the same: to the bit on the CPU, to 1 % on CUDA."""


class RunRecord(Record[RunSpec]):
    """One run, complete."""

    NAME: ClassVar[str] = "a run record"

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
    pairs: Pairs | None = None
    """Of a run in pairs of blocks; `clocks` are then those of its blocks with checkpoints, all disturbed ones
    included (of its blocks without, if it takes none)."""

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_none_pairs(write(self))

    @property
    def blocks(self) -> list[Block]:
        """All blocks that say something; none of a run in one stretch.

        A system that takes gradients sends them in every step: what older records of it call a block without
        checkpoints was none.
        """
        if self.pairs is None:
            return []
        always = system_traits(self.spec.system).takes_gradients
        return [block for block in self.pairs.blocks if block.kind == "with" or not always]

    def summary(self) -> str:
        """Throughput, durable checkpoints, and whether the restore was proved."""
        proof = "" if self.proof is None else f", restore {'proved' if self.proof.equal else 'NOT EQUAL'}"
        rate = f"{self.clocks.iterations_per_s:.3g} iterations/s"
        return f"{rate}, {self.counts.durable} durable checkpoints{proof}, {self.wall_s:.0f} s in all"

    def marks(self) -> list[str]:
        """That the restore gave back something else."""
        if self.proof is None or self.proof.equal:
            return []
        return ["the restored state differs from the live one; see the record's proof"]

    def faults(self, min_durable: int = 2) -> list[str]:
        """What it owes and does not show: durable checkpoints, and a restore exact to the bit; one sentence each."""
        faults = []
        counts = self.counts
        if counts.durable < min_durable:
            faults.append(f"{counts.durable} durable checkpoints of {counts.started} started, {min_durable} needed")
        if counts.failed:
            faults.append(f"{counts.failed} checkpoints failed: {'; '.join(self.notes) or 'see the log of the run'}")
        proof = self.proof
        if proof is None:
            faults.append("no restore proof in the record")
            return faults
        if proof.restored_step != proof.step:
            faults.append(f"restored step {proof.restored_step} where {proof.step} was the checkpoint to prove")
        if not proof.equal or proof.digest_live != proof.digest_restored:
            faults.append(f"the restored state differs: digest {proof.digest_restored}, live {proof.digest_live}")
        if proof.next_losses_live != proof.next_losses_restored:
            faults.append("training went on with other losses after the restore than without it")
        return faults
