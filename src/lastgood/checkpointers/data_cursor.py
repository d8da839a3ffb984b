"""Where a training is in its data: batches consumed, and how to come back to that place.

torch's loaders and samplers carry no state of their own, and worker processes run ahead of the training. So what counts
is what the training was given, and a restart replays the epoch's order from the generators that the epoch began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.errors import DataError, MismatchError
from lastgood.state import NewWorld, RngState, is_stateful, state_digest

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["CountedLoader"]


@dataclass(frozen=True)
class _Place:
    """Where a resume begins."""

    epoch: int
    batches: int
    total_batches: int
    loader: Any
    """The loader's own state, if it has one."""


class CountedLoader:
    """An iterable of batches that knows how many were taken, as a part of a training state.

    Iterate over it in place of the loader. After a restart the first ``for`` goes on behind the last batch of the
    checkpoint: the epoch's order is drawn again from the generators' states at its beginning, the consumed batches are
    read and dropped, and the generators of Python, numpy and torch then stand where the checkpoint had them. A loader
    with state_dict and load_state_dict of its own (torchdata's StatefulDataLoader) is asked to do this itself.

    A loop that is left early, by ``break`` or by an error, keeps its place until the next ``for`` begins an epoch, so
    that a checkpoint taken in between goes on behind the last batch. After a resume the place holds until a step was
    trained on: a look at the first batch beforehand uses nothing up.

    Raises DataError for an iterator (``iter(loader)``, a generator): it cannot be begun again.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if isinstance(loader, Iterator) and not is_stateful(loader):
            raise DataError(
                f"data is a {type(loader).__name__}, an iterator that can be gone through once, so a restart could not "
                "come back to a place in it; give the loader itself"
            )
        self.loader = loader
        self.epoch = 0
        """Finished passes over the loader; where samplers need set_epoch, give them this number."""
        self.batches = 0
        """Batches of this epoch that were handed out."""
        self.total_batches = 0
        self._resume: _Place | None = None
        self._resume_generators: dict[str, Any] | None = None
        """Where the generators stood when the resumed loop was begun first: a look at a batch draws from them."""
        self._epoch_start: dict[str, Any] = {}
        self._running: object = None

    def __len__(self) -> int:
        """Batches of a whole epoch, if the loader knows."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Go on with the epoch of a checkpoint, or begin one."""
        if self._resume is not None:
            batches = self._replayed(self._resume)
        else:
            if self.batches:
                self._end_epoch()  # an iterator that was put away and never finished
            self._epoch_start = self._generators()
            batches = iter(self.loader)
        ticket = self._running = object()
        return self._count(batches, ticket)

    def _count(self, batches: Iterator[Any], ticket: object) -> Iterator[Any]:
        for batch in batches:
            if self._running is not ticket:
                raise DataError("two loops run over one attached loader; only one of them can be counted")
            self.batches += 1
            self.total_batches += 1
            yield batch
        # Only the data's end gets here; a loop that is left keeps its place.
        if self._running is ticket:
            self._end_epoch()

    def trained(self) -> None:
        """A step was trained on: from here on a new loop is a new epoch, also after a resume."""
        self._resume = self._resume_generators = None

    def _end_epoch(self) -> None:
        self._resume = self._resume_generators = None
        self._running = None
        self.epoch += 1
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Place, and the generators' states at the epoch's beginning (or the loader's own state)."""
        own = self.loader.state_dict() if is_stateful(self.loader) else None  # type: ignore[attr-defined]
        replicas = self._replicas()
        # Only where a sampler deals its order out to ranks: other states keep the layout that they always had.
        return ({} if replicas is None else {"replicas": replicas}) | {
            "epoch": self.epoch,
            "batches": self.batches,
            "total_batches": self.total_batches,
            "epoch_start": self._epoch_start,
            "generators": [generator.get_state() for generator in self._own_generators()],
            "loader": own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a place; the next loop begins there. Raises DataError if the loader changed its kind."""
        if (state["loader"] is None) != (not is_stateful(self.loader)):
            kinds = "a loader with a state of its own", "a loader without"
            saved, live = kinds if state["loader"] is not None else kinds[::-1]
            raise DataError(f"the checkpoint was made with {saved}, and {live} is attached; attach the same kind")
        self._take(_Place(int(state["epoch"]), int(state["batches"]), int(state["total_batches"]), state["loader"]))
        self._epoch_start = dict(state["epoch_start"])
        self._running = None
        self._resume = self._resume_generators = None
        own = self._own_generators()
        if self.batches:
            self._resume = _Place(self.epoch, self.batches, self.total_batches, state["loader"])
        elif len(own) == len(state["generators"]):
            # Between two epochs there is nothing to replay: the next order is drawn from where they stood.
            for generator, saved in zip(own, state["generators"], strict=True):
                generator.set_state(saved)

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]], world: NewWorld) -> None:
        """Go on behind what all ranks together have consumed, with another number of ranks.

        Where a sampler deals one order out to the ranks (DistributedSampler), this rank goes on behind its share of the
        consumed batches; batches must be of the same size as before. Where every rank goes through the data in the same
        order, the place stays. Raises MismatchError where no place is the same for the new ranks.
        """
        first = states[0]
        saved, live = first.get("replicas"), self._replicas()
        # An order that is dealt out depends on seed and epoch alone, not on the ranks' own generators.
        own = () if saved is None else ("epoch_start", "generators")
        digests = {state_digest({key: value for key, value in state.items() if key not in own}) for state in states}
        if len(digests) > 1:
            places = [(int(state["epoch"]), int(state["batches"])) for state in states]
            raise MismatchError(
                f"data: the ranks of step {world.step} are at different places in their data or drew their orders from "
                f"different generators ((epoch, batch): {places[:8]}), so no place is right for {world.world_size} "
                "ranks; restore with as many ranks as before, or without data"
            )
        if saved is None and live is None:
            self.load_state_dict(dict(first))
            return
        if first["batches"] and (saved is None or live is None or first["loader"] is not None):
            dealt = [f"dealt out to {count} ranks" if count else "the same on every rank" for count in (saved, live)]
            raise MismatchError(
                f"data: the order of step {world.step} was {dealt[0]}, and that of the attached loader is {dealt[1]}, "
                "so there is no place in it to go on from; give both a DistributedSampler (also for one rank), or none"
            )
        before, after = saved or 1, live or 1
        counts = [int(first[key]) * before for key in ("batches", "total_batches")]
        if counts[0] % after:
            raise MismatchError(
                f"data: {counts[0]} batches of this epoch were consumed by {before} ranks together, which {after} "
                "ranks cannot share evenly; restore from a step where they can, or with as many ranks as before"
            )
        self.load_state_dict(
            {
                **first,
                "batches": counts[0] // after,
                "total_batches": counts[1] // after,
                "epoch_start": self._generators(),
                "generators": [generator.get_state() for generator in self._own_generators()],
            }
        )

    def _replicas(self) -> int | None:
        """To how many ranks the loader's sampler deals out one order; None if it says nothing of it."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        samplers = (getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        found = (getattr(sampler, "num_replicas", None) for sampler in samplers)
        return next((number for number in found if type(number) is int and number > 0), None)

    def _take(self, place: _Place) -> None:
        self.epoch, self.batches, self.total_batches = place.epoch, place.batches, place.total_batches
        if place.loader is not None:
            self.loader.load_state_dict(place.loader)  # type: ignore[attr-defined]

    def _replayed(self, place: _Place) -> Iterator[Any]:
        """An iterator that stands behind the consumed batches; the generators stay as they are."""
        self._take(place)
        now = RngState()
        if self._resume_generators is None:
            self._resume_generators = now.state_dict()
        try:
            if place.loader is not None:
                return iter(self.loader)
            self._set_generators(self._epoch_start)
            batches = iter(self.loader)
            for number in range(place.batches):
                try:
                    next(batches)
                except StopIteration:
                    raise DataError(
                        f"the checkpoint was made after batch {place.batches} of an epoch, and the loader now ends "
                        f"after {number}; attach the data that it was made with"
                    ) from None
            return batches
        finally:
            now.load_state_dict(self._resume_generators)

    def _generators(self) -> dict[str, Any]:
        states: dict[str, Any] = {"rng": {**RngState().state_dict(), "cuda": []}}
        states["own"] = [generator.get_state() for generator in self._own_generators()]
        return states

    def _set_generators(self, states: dict[str, Any]) -> None:
        RngState().load_state_dict(states["rng"])
        own = self._own_generators()
        if len(own) != len(states["own"]):
            raise DataError(
                f"the checkpoint was made with {len(states['own'])} generators in loader and sampler, and there are "
                f"{len(own)} now; attach the same loader"
            )
        for generator, state in zip(own, states["own"], strict=True):
            generator.set_state(state)

    def _own_generators(self) -> list[torch.Generator]:
        """Generators that the loader or its samplers were given, each once."""
        loader = self.loader
        sampler = getattr(loader, "sampler", None)
        batch_sampler = getattr(loader, "batch_sampler", None)
        holders = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        found: list[torch.Generator] = []
        for holder in holders:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
                found.append(generator)
        return found
