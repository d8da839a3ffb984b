"""From what each rank measured to one record: the slowest rank's durations, sums of resources, durable on all ranks.

Pure, and needs no torch.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from pydantic import Field

from lastgood.errors import LastgoodError
from lastgood.experiments.records.blocks import Pairs
from lastgood.experiments.records.run import (
    Clocks,
    Counts,
    Failure,
    LiveProof,
    Proof,
    RankFacts,
    RanksRun,
    Resources,
    RestoredProof,
    ShadowFacts,
    WorkloadFacts,
)
from lastgood.experiments.systems.over_ranks import Writers
from lastgood.models import FrozenModel

__all__ = [
    "AfterKill",
    "MeasuredRank",
    "RestoredRank",
    "Resumed",
    "merge_clocks",
    "merge_counts",
    "merge_kills",
    "merge_proofs",
    "merge_ranks",
    "merge_resources",
    "merge_workloads",
]

T = TypeVar("T", int, str)


class _Result(FrozenModel):
    token: str
    """Of the launch that asked for it: a file of another launch is not taken for this one's."""
    rank: int
    host: str
    boot_id: str
    """Of its kernel: hosts that share one share its disks."""


class MeasuredRank(_Result):
    """What a rank hands back after the measurement."""

    workload: WorkloadFacts
    clocks: Clocks
    resources: Resources
    counts: Counts
    storage: dict[str, object]
    notes: list[str]
    shadows: list[ShadowFacts] = Field(default_factory=list)
    """Rank 0's view of them; the others have none."""
    pairs: Pairs | None = None
    """Rank 0's, whose blocks are those of all ranks."""
    live: LiveProof | None

    def checkpoint_bytes(self, writers: Writers) -> int:
        """Of one checkpoint; on a disk, without what alignment adds to it; to peers, what goes to other machines."""
        written = self.counts.durable + self.counts.superseded
        each = round(self.resources.bytes_written / written) if written else 0
        if writers == "peers":
            copies = self.storage["group_size"]
            assert isinstance(copies, int)
            return each * (copies - 1) // copies  # one stays on its own machine
        return each if writers == "shadows" else min(self.workload.state_bytes, each)


class Resumed(FrozenModel):
    """What a rank found after a kill, once it has restored and taken a few steps."""

    reached_step: int
    """The last step that this rank had finished before the kill."""
    restored_step: int
    restore_s: float
    losses_checked: int
    losses_equal: bool


class AfterKill(_Result, Resumed):
    """What a rank hands back after a kill."""

    live: LiveProof | None
    """Of the last incarnation, if the run also proves a restore."""


class RestoredRank(_Result, RestoredProof):
    """What a rank hands back after a restore in a fresh process."""


def merge_clocks(ranks: Sequence[Clocks]) -> Clocks:
    """The slowest rank's durations, each for itself; time to hide behind is the shortest.

    The drain lasts until the last rank has drained: `elapsed_s + drain_s` is the largest such sum of a rank. Raises
    LastgoodError if ranks measured different numbers of steps.
    """
    steps = _one("measured steps", [clocks.measured_steps for clocks in ranks])
    elapsed_s = max(clocks.elapsed_s for clocks in ranks)
    drained_s = max(clocks.elapsed_s + clocks.drain_s for clocks in ranks)
    persist = [clocks.persist_s for clocks in ranks if clocks.persist_s]
    most = max((len(times) for times in persist), default=0)
    return Clocks(
        measured_steps=steps,
        elapsed_s=elapsed_s,
        iterations_per_s=steps / elapsed_s,
        durable_iterations_per_s=steps / drained_s,
        step_s=[max(times) for times in zip(*(clocks.step_s for clocks in ranks), strict=True)],
        hide_s=min(clocks.hide_s for clocks in ranks),
        stall_save_s=max(clocks.stall_save_s for clocks in ranks),
        stall_update_s=max(clocks.stall_update_s for clocks in ranks),
        # Checkpoint by checkpoint; a rank that lacks some cannot be lined up with the others.
        persist_s=[max(times) for times in zip(*(times for times in persist if len(times) == most), strict=True)],
        drain_s=drained_s - elapsed_s,
    )


def merge_counts(ranks: Sequence[Counts]) -> Counts:
    """By what became of checkpoints on all ranks that were asked for any: durable is what is durable on every one.

    Raises LastgoodError if ranks were asked for different numbers of checkpoints.
    """
    asked = [counts for counts in ranks if counts.started]
    if not asked:
        return ranks[0]
    started = _one("checkpoints", [counts.started for counts in asked])
    durable = min(counts.durable for counts in asked)
    failed = min(max(counts.failed for counts in asked), started - durable)
    skipped = min(max(counts.skipped for counts in asked), started - durable - failed)
    superseded = started - durable - failed - skipped
    return Counts(started=started, durable=durable, superseded=superseded, failed=failed, skipped=skipped)


def merge_resources(ranks: Sequence[Resources]) -> Resources:
    """Sums over all ranks."""
    return Resources(**{name: sum(getattr(one, name) for one in ranks) for name in Resources.model_fields})


def merge_workloads(ranks: Sequence[WorkloadFacts]) -> WorkloadFacts:
    """Losses are means over ranks, as the loss of a global batch is; the state's size is the largest of a rank.

    Raises LastgoodError if ranks trained on different data.
    """
    first = ranks[0]
    _one("data", [facts.data_sha256 for facts in ranks])
    return first.model_copy(
        update={
            "state_bytes": max(facts.state_bytes for facts in ranks),
            "state_tensors": max(facts.state_tensors for facts in ranks),
            "losses": _mean_losses([facts.losses for facts in ranks]),
        }
    )


def merge_proofs(live: Sequence[LiveProof], restored: Sequence[RestoredRank]) -> tuple[Proof, list[bool]]:
    """One proof, which holds only if every rank's does, and whether each rank's does."""
    equal = [
        (one.step, one.digest, one.next_losses) == (back.step, back.digest, back.next_losses)
        for one, back in zip(live, restored, strict=True)
    ]
    same_step = len({one.step for one in live}) == len({back.step for back in restored}) == 1
    wrong = next((back.step for one, back in zip(live, restored, strict=True) if back.step != one.step), None)
    proof = Proof(
        step=live[0].step,
        restored_step=restored[0].step if wrong is None else wrong,
        digest_live=_digest_of([one.digest for one in live]),
        digest_restored=_digest_of([back.digest for back in restored]),
        equal=all(equal) and same_step,
        restore_s=max(back.restore_s for back in restored),
        next_losses_live=_mean_losses([one.next_losses for one in live]),
        next_losses_restored=_mean_losses([back.next_losses for back in restored]),
    )
    return proof, equal


def merge_kills(moments: Sequence[float], incarnations: Sequence[Sequence[AfterKill]]) -> list[Failure]:
    """Each kill, from what every rank of the incarnation after it found.

    Lost is what the rank that had come furthest has to do again. Raises LastgoodError if ranks of one incarnation
    restored different steps: that training is not what it was.
    """
    failures = []
    for moment, ranks in zip(moments, incarnations, strict=True):
        steps = {one.restored_step for one in ranks}
        if len(steps) != 1:
            each = ", ".join(f"rank {one.rank}: {one.restored_step}" for one in ranks)
            raise LastgoodError(f"ranks restored different steps after one kill ({each})")
        reached = max(one.reached_step for one in ranks)
        restored = steps.pop()
        checked = min(one.losses_checked for one in ranks)
        failures.append(
            Failure(
                kill_after_steps=moment,
                reached_step=reached,
                restored_step=restored,
                lost_steps=max(0, reached - restored),
                restore_s=max(one.restore_s for one in ranks),
                losses_checked=checked,
                losses_equal=all(one.losses_equal for one in ranks),
            )
        )
    return failures


def merge_ranks(
    measured: Sequence[MeasuredRank],
    restored: Sequence[RestoredRank],
    equal: Sequence[bool],
    writers: Writers,
    *,
    launcher: str,
    hosts: Sequence[str],
    link_bits_per_s: int | None,
) -> RanksRun:
    """Each rank's own part of the record, and what one checkpoint puts on a disk, or on a link."""
    ranks = [
        RankFacts(
            rank=one.rank,
            host=one.host,
            state_bytes=one.workload.state_bytes,
            checkpoint_bytes=one.checkpoint_bytes(writers),
            elapsed_s=one.clocks.elapsed_s,
            drain_s=one.clocks.drain_s,
            stall_save_s=one.clocks.stall_save_s,
            stall_update_s=one.clocks.stall_update_s,
            resources=one.resources,
            counts=one.counts,
            proof_equal=equal[number] if equal else None,
            restore_s=restored[number].restore_s if restored else None,
        )
        for number, one in enumerate(measured)
    ]
    on_links = writers in ("peers", "shadows")
    per_link = _most(ranks, [one.host for one in measured]) if on_links else 0
    if writers == "shadows":
        per_link = _past_shadows(ranks, [one.host for one in measured[0].shadows]) if link_bits_per_s else 0
    return RanksRun(
        launcher=launcher,
        hosts=list(hosts),
        link_bits_per_s=link_bits_per_s,
        bytes_per_disk=0 if on_links else _most(ranks, [one.boot_id for one in measured]),
        bytes_per_link=per_link,
        ranks=ranks,
    )


def _most(ranks: Sequence[RankFacts], places: Sequence[str]) -> int:
    totals: dict[str, int] = defaultdict(int)
    for one, place in zip(ranks, places, strict=True):
        totals[place] += one.checkpoint_bytes
    return max(totals.values())


def _past_shadows(ranks: Sequence[RankFacts], shadows: Sequence[str]) -> int:
    """The most that a host sends to shadows of other hosts: each shadow gets an equal part of what a rank sends."""
    totals: dict[str, float] = defaultdict(float)
    for one in ranks:
        totals[one.host] += one.checkpoint_bytes * (1 - shadows.count(one.host) / len(shadows))
    return round(max(totals.values()))


def _one(what: str, values: Sequence[T]) -> T:
    if len(set(values)) != 1:
        each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise LastgoodError(f"ranks of one run have different {what} ({each})")
    return values[0]


def _mean_losses(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*of_ranks, strict=True)]


def _digest_of(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
