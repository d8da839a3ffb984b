"""The update of one iteration, made of one call of the optimizer's step or of several. Pure.

ZeRO steps torch's optimizer once for each group of parameters (stages 1 and 2), or for each sub-group (stage 3). For
shadows these are parts of one update as long as no parameter is stepped twice, and no group with two sets of numbers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from lastgood.optim.rule import MAX_POWERS, UpdateRule

__all__ = ["OpenUpdate", "StepPart"]


@dataclass(frozen=True)
class StepPart:
    """What one call of an optimizer's step is about to do."""

    rule: UpdateRule | None
    """Of all groups; None: it will change nothing (a loss scaler found an overflow, or there is no gradient)."""
    stepped: frozenset[int] = frozenset()
    """Parameters with a gradient."""
    groups: frozenset[int] = frozenset()
    """Their groups: the others' numbers are not of this part."""
    fault: str | None = None
    """Why shadows cannot repeat it."""


class OpenUpdate:
    """The parts of one iteration so far."""

    def __init__(self) -> None:
        self.rule: UpdateRule | None = None
        """Of all parts; None: nothing was stepped."""
        self.stepped: frozenset[int] = frozenset()
        """Parameters of all parts."""
        self._groups: frozenset[int] = frozenset()

    def takes(self, part: StepPart) -> bool:
        """Whether a part belongs to this update: it steps no parameter again, and its groups by the same numbers."""
        return not self.stepped & part.stepped and (part.rule is None or self._with(part.rule, part.groups) is not None)

    def add(self, part: StepPart) -> None:
        """Take a part in. Raises ValueError for one that does not belong to this update."""
        if not self.takes(part):
            raise ValueError("a parameter is stepped twice in one update, or a group by other numbers")
        if part.rule is not None:
            self.rule = self._with(part.rule, part.groups)
            self.stepped |= part.stepped
            self._groups |= part.groups

    def _with(self, rule: UpdateRule, groups: Set[int]) -> UpdateRule | None:
        """The rule of all parts and of one more; None if there is none."""
        if self.rule is None:
            return rule
        mine = self.rule
        if (mine.inverse_scale, mine.grad_scale, mine.clip) != (rule.inverse_scale, rule.grad_scale, rule.clip):
            return None
        joined = list(mine.groups)
        for number in groups:
            one, other = mine.groups[number], rule.groups[number]
            if number not in self._groups:
                joined[number] = other
                continue
            powers = tuple(sorted({*one.powers, *other.powers}))
            if replace(one, powers=()) != replace(other, powers=()) or len(powers) > MAX_POWERS:
                return None
            joined[number] = replace(one, powers=powers)
        unaligned = tuple(sorted({*mine.unaligned, *rule.unaligned}))
        return replace(mine, groups=tuple(joined), unaligned=unaligned)
