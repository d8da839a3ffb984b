"""The training's own digests of its weights, beside those of what this node made of the packets.

The agent tells one now and then. This node takes its own of the same steps, as it stands there, before it goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from lastgood._lazy import torch
from lastgood.mirror.agent.messages import weights_digest

__all__ = ["WeightDigests"]

_log = logging.getLogger("lastgood.mirror")
_KEPT: Final = 16
"""Of each side: the agent leaves out steps in which it is busy, and so may this node."""


class WeightDigests:
    """Digests of one incarnation. For one thread; they are made in another one, of a copy.

    Args:
        counters: `digests_compared` and `digests_different` are counted there.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._every = 0
        self._told: dict[int, str] = {}
        self._own: dict[int, str] = {}
        self._making: threading.Thread | None = None

    def expect(self, every: int) -> None:
        """An agent has come that tells a digest after each `every`-th step; 0: none is there, or it tells none."""
        self._every = every
        self.clear()

    def clear(self) -> None:
        """What was told and made is of another incarnation, or of another agent."""
        self._told, self._own = {}, {}

    def is_due(self, iteration: int) -> bool:
        """Whether the weights after this iteration are to be given to `take`."""
        return bool(self._every) and iteration % self._every == 0 and not self.busy

    @property
    def busy(self) -> bool:
        """Whether a digest is being made: one copy at a time."""
        return self._making is not None and self._making.is_alive()

    def take(self, iteration: int, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Make this node's digest of tensors that nobody changes any more; None: it could not be brought there."""
        own = self._own
        if weights is None:
            return

        def make() -> None:
            try:
                own[iteration] = weights_digest(weights)
            except Exception:  # without it the step is not compared
                _log.exception("the digest of step %d", iteration)

        self._making = threading.Thread(target=make, name="mirror-digest", daemon=True)
        self._making.start()

    def tell(self, iteration: int, digest: str) -> None:
        """The agent's digest."""
        self._told[iteration] = digest

    def difference(self) -> int | None:
        """Compare what both sides have of a step; the first step in which they differ, if any does."""
        for iteration in sorted(self._told.keys() & set(self._own)):
            self._counters["digests_compared"] += 1
            if self._told.pop(iteration) != self._own.pop(iteration):
                self._counters["digests_different"] += 1
                return iteration
        for held in (self._told, self._own):
            for oldest in sorted(held)[:-_KEPT]:
                del held[oldest]
        return None
