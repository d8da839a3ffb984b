"""What a shadow will never get: which ranks have ended which iterations, and which buckets lack something of them."""

from __future__ import annotations

from collections.abc import Mapping

from lastgood.gradients.shadow.bucket import BucketState
from lastgood.gradients.shadow.iterations import Iterations

__all__ = ["Senders", "find_torn", "why_torn"]


class Senders:
    """How far each rank has sent its gradients. A part of `ShadowState`, which changes it."""

    def __init__(self) -> None:
        self._ended: dict[int, int] = {}
        self._gone: set[int] = set()
        self._never_connected: set[int] = set()
        """Ranks that have never connected in this incarnation."""

    def fence(self) -> None:
        """What ranks of an incarnation that is over sent says nothing any more."""
        self._ended.clear()
        self._gone.clear()

    def begin(self, ranks: int) -> None:
        """None of so many ranks has connected in this incarnation."""
        self._never_connected = set(range(ranks))

    def connected(self, rank: int) -> None:
        """A data connection of this rank begins."""
        self._gone.discard(rank)
        self._never_connected.discard(rank)

    def gone(self, rank: int) -> None:
        """The last data connection of this rank ended: it never sends again what it has not sent."""
        self._gone.add(rank)

    def ended(self, rank: int, iteration: int) -> None:
        """A rank sends nothing more for this iteration, nor for older ones."""
        self._ended[rank] = max(iteration, self._ended.get(rank, 0))

    def over(self, known: Iterations, slots: int) -> int:
        """Of iterations up to this one nothing more comes from any rank; -1 if that is not known of any."""
        # Of a rank that is gone, nothing more comes of all iterations that are known to have ended.
        newest = max(known.steps, default=0)
        ended = {rank: max(newest, self._ended.get(rank, 0)) for rank in self._gone} if self._gone else {}
        # Nor of one that has not come so far, of those that slots are full with: others wait for room in them.
        ended = {**dict.fromkeys(self._never_connected, newest - slots), **self._ended, **ended}
        if len(ended) < known.ranks or not known.ranks:
            return -1
        return min(ended.values())


def find_torn(buckets: Mapping[int, BucketState], known: Iterations, completed: int, over: int) -> dict[int, list[int]]:
    """Note in which iteration buckets are torn now; returns those of which that is news, by iteration."""
    torn: dict[int, list[int]] = {}
    for number, bucket in buckets.items():
        if bucket.at is None or bucket.landing is not None or bucket.opened:
            continue
        # The one that is being applied is still among the received.
        missing = bucket.chain_end(bucket.at) + 1
        # Rank 0 says each step before the word that it is complete, and on a new connection only those after that.
        reached = range(bucket.at + 1, min(missing - 1, completed) + 1)
        unknown = next((one for one in reached if one not in known.steps), None)
        if unknown is not None:
            missing = unknown
        elif missing > over:
            continue
        # One that is void may be found to be so after one that is torn.
        if bucket.torn is None or missing < bucket.torn:
            bucket.torn = missing
            torn.setdefault(missing, []).append(number)
    return torn


def why_torn(iteration: int, known: Iterations, completed: int) -> str:
    """For people."""
    if iteration in known.void:
        return "the training's update used other gradients than were sent"
    if iteration <= completed and iteration not in known.steps:
        return "it is complete elsewhere, and what its update was never came"
    return "all ranks have ended this iteration, and bytes of it have not come"
