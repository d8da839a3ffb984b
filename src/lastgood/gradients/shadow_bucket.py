"""One bucket of a shadow: where its value stands, which gradients and which seed it holds beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BucketState"]


@dataclass
class BucketState:
    """Changed by `ShadowState` only."""

    at: int | None = None
    """Its value is that behind this iteration; None: it has none."""
    floor: int = 0
    """Its value is the same since this iteration (skipped steps change nothing)."""
    received: set[int] = field(default_factory=set)
    """Iterations whose gradients it holds whole."""
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
        return -1 if self.at is None else self.chain_end(self.at)

    def base_for(self, iteration: int) -> int | None:
        """Behind which iteration the value stands that it has for, or can bring to, exactly this iteration."""
        if self.at is not None and self.floor <= iteration <= self.chain_end(self.at):
            return min(self.at, iteration)
        if self.landed and self.landing is not None and self.landing <= iteration <= self.chain_end(self.landing):
            return self.landing
        return None
