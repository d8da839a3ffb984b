"""Which machines' memory holds whose checkpoint, and how likely a recovery is (Gemini, SOSP'23, section 4).

With N machines and m replicas of each checkpoint, the own machine's among them:

- *group placement*, where m divides N: groups of m machines, each of which holds the checkpoints of its whole group;
- *mixed placement* elsewhere: groups as long as at least m machines are left behind them; the last ones (more than m,
  fewer than 2 m) form a ring, where each machine's checkpoint lies at itself and the m - 1 machines behind it.

A set of failed machines loses a checkpoint exactly if it contains all holders of one.
"""

from __future__ import annotations

from math import comb

from lastgood.errors import ConfigError

__all__ = ["groups_and_ring", "paper_recovery_probability", "placement", "recovery_probability"]


def groups_and_ring(machines: int, replicas: int) -> tuple[list[range], range]:
    """The groups of a placement, and the ring (empty where `replicas` divides `machines`).

    Raises ConfigError if there are fewer machines than replicas, or no replica.
    """
    if not 1 <= replicas <= machines:
        raise ConfigError(
            f"gemini: {replicas} replicas need as many machines, and at least 1; there are {machines} machines"
        )
    groups = machines // replicas - (1 if machines % replicas else 0)
    ring = range(groups * replicas, machines)
    return [range(first, first + replicas) for first in range(0, groups * replicas, replicas)], ring


def placement(machines: int, replicas: int) -> list[tuple[int, ...]]:
    """For each machine the `replicas` machines that hold its checkpoint, itself first.

    Raises ConfigError as `groups_and_ring` does.
    """
    groups, ring = groups_and_ring(machines, replicas)
    holders = []
    for group in groups:
        for own in group:
            holders.append((own, *(other for other in group if other != own)))
    for position in range(len(ring)):
        holders.append(tuple(ring[(position + ahead) % len(ring)] for ahead in range(replicas)))
    return holders


def recovery_probability(machines: int, replicas: int, failed: int) -> float:
    """Probability that every checkpoint survives when `failed` machines, any with the same chance, fail at once.

    Exact for every placement: sets of failed machines that lose nothing are counted by size, group by group.
    """
    groups, ring = groups_and_ring(machines, replicas)
    _check_failed(machines, failed)
    survivable = [1]  # entry k: sets of k failed machines that lose nothing
    for group in groups:
        survivable = _product(survivable, [comb(len(group), count) for count in range(len(group))])
    if ring:
        survivable = _product(survivable, _ring_sets(len(ring), replicas))
    sets = survivable[failed] if failed < len(survivable) else 0
    return sets / comb(machines, failed)


def paper_recovery_probability(machines: int, replicas: int, failed: int) -> float:
    """The paper's formula for group placement (section 4, corollary): exact below 2 m failures, else a lower bound.

    1 for fewer than m failures, else max(0, 1 - (N / m) C(N - m, k - m) / C(N, k)). Raises ConfigError if m does not
    divide N.
    """
    _, ring = groups_and_ring(machines, replicas)
    if ring:
        raise ConfigError(f"gemini: the formula holds for whole groups; {replicas} does not divide {machines}")
    _check_failed(machines, failed)
    if failed < replicas:
        return 1.0
    lost = (machines // replicas) * comb(machines - replicas, failed - replicas)
    return max(0.0, 1 - lost / comb(machines, failed))


def _check_failed(machines: int, failed: int) -> None:
    if not 0 <= failed <= machines:
        raise ConfigError(f"gemini: {failed} of {machines} machines cannot fail")


def _product(left: list[int], right: list[int]) -> list[int]:
    """Sets of two disjoint lots of machines by size, from those of each."""
    product = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    return product


def _ring_sets(length: int, run: int) -> list[int]:
    """For each k the sets of k places of a ring without `run` neighbouring places in a row.

    A set with a free place is cut at its first free one: `lead` places before it and `trail` at the other end are one
    run around the ring.
    """
    # rows[t][k]: strings of places so far, t of them taken at the end, k taken in all; for each length of the lead.
    counts = [0] * (length + 1)
    for lead in range(run):
        if lead >= length:
            break
        rows = {(0, lead): 1}
        for _ in range(length - lead - 1):
            longer: dict[tuple[int, int], int] = {}
            for (trail, taken), sets in rows.items():
                longer[0, taken] = longer.get((0, taken), 0) + sets
                if trail + 1 < run:
                    longer[trail + 1, taken + 1] = longer.get((trail + 1, taken + 1), 0) + sets
            rows = longer
        for (trail, taken), sets in rows.items():
            if lead + trail < run:
                counts[taken] += sets
    return counts
