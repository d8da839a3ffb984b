"""What a shadow knows of iterations beside their gradients: their steps, which were saved, whose side records came."""

from __future__ import annotations

from lastgood.errors import CheckpointError
from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.protocol.messages import Absent, Step

__all__ = ["Iterations"]

_MAX_STEPS = 100_000


class Iterations:
    """A part of `ShadowState`, which changes it."""

    def __init__(self) -> None:
        self.ranks = 0
        """How many train."""
        self.side_ranks: frozenset[int] = frozenset()
        """Ranks whose side records this shadow keeps."""
        self.steps: dict[int, Step] = {}
        """Those of which all is known."""
        self.saves: dict[int, Saved] = {}
        self.sides: dict[int, set[int]] = {}
        self.given_up: set[int] = set()
        """Saved iterations that lack a side record permanently."""
        self.newest_side: dict[int, int] = {}
        self.void: set[int] = set()
        """Iterations whose gradients are not what the update used: nobody holds them, whatever has come."""
        self._early: dict[int, Step] = {}
        """Steps that want the word of other ranks."""
        self._absent: dict[int, dict[int, Absent]] = {}
        """What those ranks said, by iteration and rank."""

    def add_step(self, message: Step, incarnation: int) -> None:
        """Again said, it changes nothing. Raises CheckpointError if far too many are open."""
        iteration = message.iteration
        if iteration in self.steps or iteration in self._early:
            return
        _check_room(len(self.steps) + len(self._early), iteration)
        self._early[iteration] = message
        self._join(iteration)
        if message.void:
            self.void.add(iteration)
        if message.saved and iteration not in self.given_up:
            self.saves[iteration] = Saved(epoch=incarnation, iteration=iteration, step=message.step or 0)

    def add_absent(self, rank: int, message: Absent) -> None:
        """A rank's parameters without a gradient. Raises CheckpointError if far too many iterations are open."""
        if message.iteration not in self.steps:
            _check_room(len(self._absent), message.iteration)
            self._absent.setdefault(message.iteration, {})[rank] = message
            self._join(message.iteration)

    def _join(self, iteration: int) -> None:
        """All is known of a step once every rank has said which of its own parameters it left alone."""
        step = self._early.get(iteration)
        if step is None:
            return
        told = self._absent.get(iteration, {})
        others = range(1, self.ranks) if step.apart else range(0)
        if all(rank in told for rank in others):
            absent = (*step.absent, *(parameter for rank in others for parameter in told[rank].parameters))
            self.steps[iteration] = step.model_copy(update={"absent": absent})
            # There is one rule for all ranks: one that steps while rank 0 does not is not followed by it.
            if any(told[rank].void or (step.rule is None and told[rank].updated) for rank in others):
                self.void.add(iteration)
            del self._early[iteration]
            self._absent.pop(iteration, None)

    def lacks_side(self, rank: int, iteration: int, oldest: int) -> bool:
        """Whether this side record is of use: not one of an iteration before `oldest`, nor one that is held."""
        if rank not in self.side_ranks or iteration in self.given_up or iteration < oldest:
            return False
        return rank not in self.sides.get(iteration, set())

    def add_side(self, rank: int, iteration: int, oldest: int) -> bool:
        """Whether this side record is to be kept."""
        self.newest_side[rank] = max(iteration, self.newest_side.get(rank, 0))
        if not self.lacks_side(rank, iteration, oldest):
            return False
        self.sides.setdefault(iteration, set()).add(rank)
        return True

    def sides_whole(self, iteration: int) -> bool:
        """Whether all side records of an iteration are here."""
        return self.side_ranks <= self.sides.get(iteration, set())

    def late(self) -> list[tuple[int, str]]:
        """Saved iterations whose side records will not come, since a later one of the same rank did; and why."""
        found = []
        for iteration in self.saves:
            missing = self.side_ranks - self.sides.get(iteration, set())
            passed = [rank for rank in missing if self.newest_side.get(rank, 0) > iteration]
            if passed:
                found.append((iteration, f"rank {min(passed)} sent a later side record, and none of this iteration"))
        return found

    def give_up(self, iteration: int) -> bool:
        """It cannot be given back. Says whether side records of it were held."""
        self.given_up.add(iteration)
        self.saves.pop(iteration, None)
        return bool(self.sides.pop(iteration, None))

    def keep_until(self, last: int) -> list[int]:
        """Forget all after an iteration; returns those whose side records go."""
        for known in (self.steps, self.saves, self._early, self._absent):
            for iteration in [one for one in known if one > last]:
                del known[iteration]
        self.void = {one for one in self.void if one <= last}
        return self._drop_sides([one for one in self.sides if one > last])

    def become(self, saved: Saved) -> list[int]:
        """Only this is known, with all its side records; returns those whose side records go, this one among them."""
        dropped = self.keep_until(-1)
        self.saves[saved.iteration] = saved
        self.sides[saved.iteration] = set(self.side_ranks)
        return dropped

    def forget(self, oldest: int, lowest: int) -> list[int]:
        """Nothing before `oldest` is given back, and all is applied up to `lowest`; returns as `keep_until`."""
        for known in (self.steps, self._early, self._absent):
            for iteration in [one for one in known if one <= lowest]:
                del known[iteration]
        self.void = {one for one in self.void if one > lowest}
        for iteration in [one for one in self.saves if one < oldest]:
            del self.saves[iteration]
        self.given_up = {one for one in self.given_up if one >= oldest}
        return self._drop_sides([one for one in self.sides if one < oldest])

    def _drop_sides(self, iterations: list[int]) -> list[int]:
        for iteration in iterations:
            del self.sides[iteration]
        return iterations


def _check_room(count: int, iteration: int) -> None:
    if count >= _MAX_STEPS:
        raise CheckpointError(f"{_MAX_STEPS} iterations are open; iteration {iteration} is one too many")
