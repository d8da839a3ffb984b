"""One bucket of a shadow: where its value stands, which gradients and which seed it holds beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lastgood.gradients.protocol.messages import Step
from lastgood.gradients.shadow.actions import Apply, Check, Commit, Copy, Work

__all__ = ["BucketState"]


@dataclass
class BucketState:
    """Changed by `ShadowState` only."""

    at: int | None = None
    """Its value is that after this iteration; None: it has none."""
    floor: int = 0
    """Its value is the same since this iteration (skipped steps change nothing)."""
    received: set[int] = field(default_factory=set)
    """Iterations whose gradients it holds completely."""
    torn: int | None = None
    """The iteration that never comes; all before it are held or applied."""
    landing: int | None = None
    """A seed of this iteration is arriving, or has."""
    landed: bool = False
    windowed: bool = False
    """It receives what follows that seed."""
    opened: bool = True
    """It keeps the newest gradients only, since it waits for a seed."""
    busy: bool = False
    """Something is being done to its value."""
    checks: dict[int, int] = field(default_factory=dict)
    """Checksums of the trainer's to be compared, by iteration."""

    @property
    def wants_seed(self) -> bool:
        """No way on without a seed, and none is coming."""
        return self.landing is None and (self.at is None or self.torn is not None)

    @property
    def exhausted(self) -> bool:
        """Nothing that it holds will be applied before a seed comes."""
        return self.at is None or self.torn == self.at + 1

    def chain_end(self, base: int) -> int:
        """The last iteration of which it holds all gradients since `base`."""
        while base + 1 in self.received:
            base += 1
        return base

    @property
    def end(self) -> int:
        """The newest iteration that it can be brought to without a further word from trainers; -1 if none."""
        if self.landed and self.landing is not None:
            return self.chain_end(self.landing)
        if self.at is None:
            return -1
        end = self.chain_end(self.at)  # what comes late for one that is torn is not relied upon
        return end if self.torn is None else min(end, self.torn - 1)

    def base_for(self, iteration: int) -> int | None:
        """Behind which iteration the value stands that it has for, or can bring to, exactly this iteration."""
        if self.at is not None and self.floor <= iteration <= self.chain_end(self.at):
            return min(self.at, iteration)
        if self.landed and self.landing is not None and self.landing <= iteration <= self.chain_end(self.landing):
            return self.landing
        return None

    def next_work(
        self, number: int, goal: int, word: int, steps: Mapping[int, Step], spilling: int | None
    ) -> Work | None:
        """What is to be done to its value now.

        Args:
            number: its index.
            goal: the iteration that it may be brought to.
            word: up to which all shadows hold everything.
            steps: those that are known.
            spilling: the iteration that it is to be copied at for a spill.
        """
        if self.landed and self.landing is not None and self._seed_is_due(self.landing, word):
            return Commit(number, self.landing)
        if self.at is None:
            return None
        for iteration in list(self.checks):
            if self.floor <= iteration <= self.at:
                return Check(number, iteration, self.checks.pop(iteration))
        if spilling is not None and self.floor <= spilling <= self.at:
            return Copy(number, spilling)
        following = self.at + 1
        # Behind its seed's iteration it goes on from the seed only.
        limit = goal if self.landing is None else min(goal, self.landing)
        if following <= limit and following in self.received and following in steps and not self.windowed:
            return Apply(number, following, steps[following])
        return None

    def _seed_is_due(self, iteration: int, word: int) -> bool:
        """Whether its value is no longer of use, since it is none, has come as far, or all shadows are further."""
        if self.at is None or self.at >= iteration or word >= iteration:
            return True
        return self.exhausted and word > self.at
