"""Ranks as threads of one process, that train nothing: for the order of a measurement in pairs of blocks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lastgood.experiments.runs.part import Part

WAIT_S = 60.0


class ThreadPart(Part):
    """Rank `rank` of those that share a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self._meeting = meeting

    def barrier(self) -> None:
        self._meeting.exchange(self.rank, None)

    def follow(self, decided: Any) -> Any:
        return self._meeting.exchange(self.rank, decided)[0]

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)

    def processes_to_watch(self, folder: Path) -> frozenset[int] | None:
        return frozenset({self.rank})


class Meeting:
    """Exchanges of `ranks` threads; a rank that is in another exchange than the others ends them all in time."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._values: list[Any] = [None] * ranks

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(WAIT_S)
        found = list(self._values)
        self._barrier.wait(WAIT_S)
        return found

    def end(self) -> None:
        self._barrier.abort()


class FakeClock:
    def __init__(self, elapsed_s: float, steps: int) -> None:
        self.elapsed_s = elapsed_s
        self._steps = steps

    def step_s(self) -> list[float]:
        return [self.elapsed_s / self._steps] * self._steps


class FakeSegment:
    def __init__(self, elapsed_s: float, steps: int) -> None:
        self.clock = FakeClock(elapsed_s, steps)
        self.losses = [0.0] * steps


class FakeLoop:
    """Notes what it is asked for. Some of its saves stay in progress until it is drained, which takes a moment."""

    def __init__(self, rank: int, flying: list[int], seed: int) -> None:
        self.rank = rank
        self.flying = flying
        """Checkpoints in progress, by rank, as all ranks see them."""
        self.interval_steps = 0
        self.first_step = 0
        self.saves_first = False
        self.progress = self
        self.step = 0
        self.checkpointer = self
        self.trained: list[tuple[int, int]] = []
        """Interval and steps of each stretch."""
        self.begun_with: list[int] = []
        """Checkpoints in progress on all ranks when it began."""
        self.took_s: list[float] = []
        self._random = random.Random(seed)

    def train(self, steps: int) -> Any:
        self.begun_with.append(sum(self.flying))
        self.trained.append((self.interval_steps, steps))
        time.sleep(self._random.uniform(0, 0.002))
        self.step += steps
        if self.interval_steps:
            self.flying[self.rank] += steps // self.interval_steps
        elapsed_s = steps * self._random.uniform(0.01, 0.3)
        self.took_s.append(elapsed_s)
        return FakeSegment(elapsed_s, steps)

    def drain(self) -> None:
        time.sleep(self._random.uniform(0, 0.002))
        self.flying[self.rank] = 0


def on_threads(ranks: int, act: Callable[[ThreadPart], Any]) -> Sequence[Any]:
    """What `act` returns on each rank. Raises what one of them raised."""
    meeting = Meeting(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(ThreadPart(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.end()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive(), "a rank still waits"
    if errors:
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
    return results
