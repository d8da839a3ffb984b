"""The order in which a stream visits its items: a permutation an epoch, found from the seed and the epoch alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["EpochOrder"]


class EpochOrder:
    """An endless sequence over `count` items; place `i` is found without visiting the places before it."""

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError(f"an order needs at least one item, not {count}")
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def item(self, place: int) -> int:
        """The item at a place (from 0); places `e * count` to `(e + 1) * count - 1` hold every item once."""
        epoch, offset = divmod(place, self.count)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            self._epoch = epoch
        return int(self._permutation[offset])

    def batch(self, index: int, size: int) -> list[int]:
        """The items of batch `index`. Batches follow one another without a gap, across the ends of epochs."""
        return [self.item(place) for place in range(index * size, (index + 1) * size)]
