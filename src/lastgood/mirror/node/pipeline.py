"""From the stages before them to the updates. One thread, so nothing overtakes anything."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lastgood.mirror.handover.clock import StageClock
from lastgood.mirror.handover.turn import Counters, Stages
from lastgood.mirror.node.follower import Follower

__all__ = ["Pipeline"]

_TICK_S = 0.1


class Pipeline:
    """From what was extracted to the follower.

    Args:
        each: called between two turns, and at least ten times a second.
    """

    def __init__(self, stages: Stages, follower: Follower, each: Callable[[], None] = lambda: None) -> None:
        self._stages = stages
        self._follower = follower
        self._each = each
        self._takes = StageClock()

    def run(self, stop: threading.Event) -> bool:
        """Follow until the stages end or `stop` is set; whether they ended. Raises CheckpointError as they do."""
        while not stop.is_set():
            turn = self._stages.read(_TICK_S)
            self._follower.ended = turn.last
            with self._takes:
                read = self._follower.hear(turn.events)
            for memory in read:
                self._stages.free(memory)
            if turn.last:
                return True
            self._each()
        return False

    def counters(self) -> Counters:
        """What each stage counted."""
        return {**self._stages.counters(), "node": {**self._follower.counters, "seconds": self._takes.seconds}}
