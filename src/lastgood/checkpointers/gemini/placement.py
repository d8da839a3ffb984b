"""Which machines' memory holds whose checkpoint (Gemini, SOSP'23, section 4).

With N machines and m replicas of each checkpoint, the own machine's among them:

- *group placement*, if m divides N: groups of m machines, each of which holds the checkpoints of its whole group;
- *mixed placement* elsewhere: groups as long as at least m machines are left after them; the last ones (more than m,
  fewer than 2 m) form a ring, where each machine's checkpoint lies at itself and the m - 1 machines after it.

A set of failed machines loses a checkpoint exactly if it contains all holders of one.
"""

from __future__ import annotations

from lastgood.errors import ConfigError

__all__ = ["groups_and_ring", "placement"]


def groups_and_ring(machines: int, replicas: int) -> tuple[list[range], range]:
    """The groups of a placement, and the ring (empty if `replicas` divides `machines`).

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
