"""Reports of ranks, as the decisions of the agreement take them."""

from __future__ import annotations

from lastgood.checkpointers.agreement.decide import Held, Report, Wanted

JOB = "ab" * 16


def report(
    rank, world, held=(), *, job=JOB, mark=None, highest=None, damaged=(), reached=-1, wrote=None, beside="", **wanted
):
    held = tuple(one if isinstance(one, Held) else Held(*one) for one in held)
    if highest is None:
        highest = max((one.identity for one in held), default=(0, 0))
    return Report(
        rank,
        world,
        f"host{rank}",
        f"/d/{rank}",
        job,
        highest,
        held,
        damaged,
        mark,
        Wanted(**wanted),
        reached,
        wrote,
        beside,
    )
