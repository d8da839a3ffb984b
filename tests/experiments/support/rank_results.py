"""Made-up results of single ranks."""

from __future__ import annotations

from lastgood.experiments.multirank.results import (
    LiveProof,
    MeasuredRank,
)
from tests.experiments.support.records import make_record


def measured(
    rank: int, *, host: str | None = None, boot: str = "k", state: int = 100, written: int = 400
) -> MeasuredRank:
    record = make_record(measured_steps=40, state_bytes=state, losses=[float(rank)] * 3)
    resources = record.resources.model_copy(update={"bytes_written": written})
    return MeasuredRank(
        token="t",
        rank=rank,
        host=host or f"vm{rank}",
        boot_id=boot,
        workload=record.workload,
        clocks=record.clocks,
        resources=resources,
        counts=record.counts,
        storage={"group_size": 2},
        notes=[],
        live=LiveProof(step=9, digest=f"d{rank}", next_losses=[1.0 + rank]),
    )
