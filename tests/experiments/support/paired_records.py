"""Made-up records of runs in pairs of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lastgood.experiments.records.blocks import Block, Disturbance, PairPlan, Pairs
from lastgood.experiments.records.run import RunRecord
from tests.experiments.support.records import make_record

QUIET = Disturbance(others_cpu_s=0.0, steal_s=0.0)


def make_blocks(
    ratios: Sequence[float], *, none_step_s: float = 0.1, steps: int = 20, disturbed: Sequence[int] = ()
) -> list[Block]:
    """A round for each ratio of rates; the rounds named in `disturbed` were."""
    blocks = []
    for number, ratio in enumerate(ratios):
        for kind in ("without", "with") if number % 2 else ("with", "without"):
            took_s = steps * none_step_s / (ratio if kind == "with" else 1)
            blocks.append(
                Block(
                    round=number,
                    kind=kind,
                    began_s=float(len(blocks)),
                    steps=steps,
                    elapsed_s=0.9 * took_s if kind == "with" else took_s,
                    drain_s=0.1 * took_s if kind == "with" else 0.0,
                    disturbance=QUIET,
                    disturbed="somebody" if number in disturbed else None,
                )
            )
    return blocks


def make_paired(
    system: str = "pccheck",
    interval_steps: int = 10,
    ratios: Sequence[float] = (0.9, 0.9, 0.9),
    *,
    none_step_s: float = 0.1,
    disturbed: Sequence[int] = (),
    ended_by: Literal["interval", "budget"] = "interval",
    bursts: Sequence[float] = (),
    **overrides: Any,
) -> RunRecord:
    """A record of one run in pairs; `overrides` are those of `make_record`."""
    record = make_record(system, interval_steps, iterations_per_s=1 / none_step_s, **overrides)
    blocks = make_blocks(ratios, none_step_s=none_step_s, disturbed=disturbed)
    if system == "none":
        blocks = [block for block in blocks if block.kind == "without"]
    return record.model_copy(
        update={
            "spec": record.spec.model_copy(update={"pairs": PairPlan()}),
            "pairs": Pairs(blocks=blocks, ended_by=ended_by, write_bursts_bytes_per_s=list(bursts)),
        }
    )
