"""What a mirror does to frames: losses alone and in bursts, repetitions, disorder, damage. Seeded: it recurs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from lastgood.errors import ConfigError
from lastgood.mirror.generate.traffic import Frame

__all__ = ["FaultyMirror", "MirrorFaults"]


@dataclass(frozen=True)
class MirrorFaults:
    """Probabilities for each frame. They change what is captured, never the training."""

    loss: float = 0.0
    """Mean share of lost frames."""
    burst: float = 1.0
    """Mean length of a loss, in frames of one port."""
    duplication: float = 0.0
    reordering: float = 0.0
    """A frame comes up to `reach` frames late."""
    reach: int = 8
    corruption: float = 0.0
    """A bit is turned."""
    truncation: float = 0.0
    """The end of the frame is missing."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("burst", "reach"):
                if value < 1:
                    raise ConfigError(f"{one.name} is at least 1, not {value}")
            elif not 0 <= value <= 1:
                raise ConfigError(f"{one.name} is a probability, not {value}")


class FaultyMirror:
    """Passes frames on as a mirror with faults does. `counters` tells what it did."""

    def __init__(self, faults: MirrorFaults, seed: int) -> None:
        self._faults = faults
        self._random = random.Random(seed)
        self._losing: dict[int, int] = {}
        self.counters: Counter[str] = Counter()

    def frames(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """What is captured of these frames."""
        late: list[tuple[int, Frame]] = []
        for number, frame in enumerate(frames):
            self.counters["frames"] += 1
            for one in self._copies(frame):
                if self._happens(self._faults.reordering, "reordered"):
                    late.append((number + self._random.randint(1, self._faults.reach), one))
                else:
                    yield one
            while late and min(due for due, _ in late) <= number:
                due = min(late, key=lambda entry: entry[0])
                late.remove(due)
                yield due[1]
        for _, one in sorted(late, key=lambda entry: entry[0]):
            yield one

    def _copies(self, frame: Frame) -> list[Frame]:
        faults = self._faults
        left = self._losing.get(frame.port, 0)
        if not left and faults.loss and self._random.random() < _begin_of_loss(faults.loss, faults.burst):
            left = 1
            while self._random.random() > 1 / faults.burst:
                left += 1
        if left:
            self._losing[frame.port] = left - 1
            self.counters["lost"] += 1
            return []
        data = frame.data
        if self._happens(faults.corruption, "corrupted"):
            damaged = bytearray(data)
            damaged[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            data = bytes(damaged)
        if self._happens(faults.truncation, "truncated"):
            data = data[: self._random.randrange(len(data))]
        copies = 2 if self._happens(faults.duplication, "duplicated") else 1
        return [Frame(frame.port, data)] * copies

    def _happens(self, probability: float, name: str) -> bool:
        if not probability or self._random.random() >= probability:
            return False
        self.counters[name] += 1
        return True


def _begin_of_loss(loss: float, burst: float) -> float:
    """Probability that a loss begins at a frame after one that passed, for a mean share of lost frames."""
    return 1.0 if loss >= 1 else min(1.0, loss / (burst * (1 - loss) + loss))
