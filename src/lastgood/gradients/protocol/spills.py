"""Which iterations rank 0 lets shadows spill, and which of their spills must stay.

Pure: no I/O, clocks, threads or torch. One spill is asked for at a time, and the next one only once every shadow has
said what became of it; so shadows cannot come to hold different spills with no slot left for a common one. With what
is asked for goes the newest spill that all shadows hold: that one stays, all others may be overwritten. This is safe
since the only other spill that could become common, the one before, is decided by then: all have it (then it is the
one that stays), or one shadow has not, and never will.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lastgood.gradients.layout.entries import Saved

__all__ = ["SpillPlan", "is_left_behind", "retained"]


def is_left_behind(saved: Saved, incarnation: int, adopt: int | None, restored: Saved | None) -> bool:
    """At a shadow: whether an incarnation that begins after iteration `adopt` (None: none) leaves this spill behind.

    Iterations are counted on from what is restored, so no older spill of a later one belongs to it. `restored` is what
    this shadow gave back for it, if it did: no spill of a later incarnation than that belongs to it either.
    """
    if adopt is None or saved.epoch == incarnation:
        return False
    return saved.iteration > adopt or (restored is not None and saved.epoch > restored.epoch)


def retained(held: Sequence[Saved], keep: Saved | None) -> Saved | None:
    """At a shadow: the one spill that stays while a new one is written; of `held`, newest first."""
    return keep if keep in held else next(iter(held), None)


class SpillPlan:
    """All shadows' spills in one incarnation, as rank 0 knows them. The caller holds a lock.

    Promises: `common` is held by every shadow that has not lost its disk, and is told to stay until a newer one is; if
    no shadow fails at a spill that is asked for, it becomes the common one.
    """

    def __init__(self, shadows: int) -> None:
        self._shadows = shadows
        self._held: dict[int, frozenset[Saved]] = {}
        """Of shadows that are connected: what lay on their disks when they connected."""
        self._answers: dict[int, bool] = {}
        self.asked: Saved | None = None
        """What is being spilled."""
        self._began = False
        self.common: Saved | None = None
        """The newest that all hold."""

    # -- what happens ----------------------------------------------------------------------------------------------

    def connected(self, shadow: int, held: Collection[Saved], spilling: Collection[int]) -> None:
        """A shadow says what it has spilled, and which iterations it is asked for and will answer.

        A step that it did not hear of before must not ask it for a spill when it is sent again.
        """
        self._held[shadow] = frozenset(held)
        if not self._began:
            if len(self._held) == self._shadows:
                everywhere = frozenset.intersection(*self._held.values())
                self.common = max(everywhere, key=lambda saved: (saved.epoch, saved.iteration), default=None)
        elif self.asked is not None and (self.asked in held or self.asked.iteration not in spilling):
            self._answer(shadow, self.asked in held)

    def disconnected(self, shadow: int) -> None:
        """Nothing is asked for until it is back."""
        self._held.pop(shadow, None)

    def spilled(self, shadow: int, iteration: int, durable: bool) -> None:
        """A shadow says what became of a spill. What is not waited for any more does not count."""
        if self.asked is not None and iteration == self.asked.iteration:
            self._answer(shadow, durable)

    def _answer(self, shadow: int, durable: bool) -> None:
        self._answers.setdefault(shadow, durable)
        if len(self._answers) == self._shadows:
            if all(self._answers.values()):
                self.common = self.asked
            self.asked = None

    # -- what follows ----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a spill can be asked for: all shadows are there, and nothing of the last one is open."""
        return self.asked is None and len(self._held) == self._shadows

    def ask(self, saved: Saved) -> Saved | None:
        """All shadows are asked now to spill this, and to keep what is returned, if anything, until then."""
        assert self.ready
        self._began = True
        self.asked = saved
        self._answers = {}
        return self.common
