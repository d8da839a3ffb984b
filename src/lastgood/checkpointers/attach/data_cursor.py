"""Where a training is in its data: batches consumed, and how to come back to that place.

torch's loaders and samplers carry no state of their own, and worker processes run ahead of the training. So what counts
is what the training was given, and a restart replays the epoch's order from the generators that the epoch began with.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from lastgood._lazy import torch
from lastgood.checkpointers.attach.data_facts import DataChanged, describe_data, difference, epoch_of, set_epoch
from lastgood.errors import DataError, MismatchError
from lastgood.state import Checked, NewWorld, RngState, generators_kept, is_stateful, state_digest

__all__ = ["CountedLoader"]

_log = logging.getLogger("lastgood")


_NOT_BEGUN: Mapping[str, Any] = {}
"""Stands for the own state of a loader that was never iterated over."""


def _host_generators() -> dict[str, Any]:
    """Of Python, numpy and torch's CPU: what loaders draw from."""
    return {**RngState().state_dict(), "cuda": []}


def _workers(loader: Any) -> int:
    found = getattr(loader, "num_workers", 0)
    return found if type(found) is int else 0


class CountedLoader(Checked):
    """An iterable of batches that knows how many were taken, as a part of a training state.

    Iterate over it in place of the loader. After a restart the first ``for`` goes on after the last batch of the
    checkpoint: the epoch's order is drawn again from the generators' states at its beginning, the consumed batches are
    read and dropped, and the generators of Python, numpy and torch then stand where the checkpoint had them. A loader
    with state_dict and load_state_dict of its own (torchdata's StatefulDataLoader) is asked to do this itself.

    A loop that is left early, by ``break`` or by an error, keeps its place until the next ``for`` begins an epoch, so
    that a checkpoint taken in between goes on after the last batch. After a resume the place holds until a step was
    trained on: a look at the first batch beforehand uses nothing up.

    `changed` says what to do if a checkpoint was made in the middle of an epoch, and the loader has another batch size
    or other data now: refuse it, go on after the same number of samples, or begin the next epoch.

    A checkpoint that is made after more batches were taken, and before they were trained on (in a window of gradient
    accumulation), has the place of the last update: those batches come again. Not so of a loader that keeps its own.

    All else that is asked of it, the loader answers (``dataset``, ``set_epoch``), so that frameworks take it as well.

    A loader's own state_dict is not asked before the loader was begun in this incarnation: some begin, or draw from
    generators, when they are asked.

    Raises DataError for an iterator (``iter(loader)``, a generator): it cannot be begun again.
    """

    saved_keys = ("epoch", "batches", "total_batches", "epoch_start", "generators", "loader")

    def __init__(self, loader: Iterable[Any], changed: DataChanged = "refuse") -> None:
        if isinstance(loader, Iterator) and not is_stateful(loader):
            raise DataError(
                f"data is a {type(loader).__name__}, an iterator that can be gone through once, so a restart could not "
                "come back to a place in it; give the loader itself"
            )
        self.loader = loader
        self.changed: DataChanged = changed
        # accelerate's loaders have the methods in any case, and hand them on to what is beneath.
        beneath = getattr(loader, "base_dataloader", loader)
        self._keeps_its_place = is_stateful(loader) and is_stateful(beneath)
        self._reads_ahead = beneath is not loader and not self._keeps_its_place and not _workers(beneath)
        """Whether it makes the batch after the one that it hands out, in this process, and may draw for it."""
        self._begun = False
        """Whether the loader was iterated over since it was attached or loaded."""
        self._loaded: Any = _NOT_BEGUN
        """The loader's own state until it is begun."""
        self.epoch = 0
        """Finished passes over the loader; if samplers need set_epoch, give them this number."""
        self.batches = 0
        """Batches of this epoch that were handed out."""
        self.total_batches = 0
        self._resume: Mapping[str, Any] | None = None
        """The state that the next loop goes on from."""
        self._resume_generators: dict[str, Any] | None = None
        """Where the generators stood when the resumed loop was begun first: a look at a batch draws from them."""
        self._epoch_start: dict[str, Any] = {}
        self._ahead: dict[str, Any] = {}
        """Where the generators stood when the newest batch was asked for, if the loader reads ahead."""
        self._updated: dict[str, Any] | None = None
        """The place of the last update, as far as it may be another one now."""
        self._made_of: dict[str, Any] | None = None
        self._running: object = None
        self._rolls_back: Literal["", "again", "skip"] = ""
        """What a load does to a loop that runs: end it; have it go on from the loaded place; leave it where it is."""
        self._rewound: object = None
        """The loop that goes on from the loaded place."""

    def __getattr__(self, name: str) -> Any:
        """What the loader has. Only for what is not found here."""
        if name.startswith("__") or "loader" not in self.__dict__:  # in the middle of being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def check_unused(self, name: str) -> None:
        """Raise DataError if batches were taken before the training was attached: they would be in no checkpoint."""
        if self.total_batches and self._resume is None:
            raise DataError(
                f"{name}: {self.total_batches} batches were taken from the counted loader before attach(), which would "
                "go on from another place in the data; call attach() before the first loop"
            )

    def __len__(self) -> int:
        """Batches of a whole epoch, if the loader knows."""
        return len(self.loader)  # type: ignore[arg-type] # the TypeError of a loader without a length is its own

    def __iter__(self) -> Iterator[Any]:
        """Go on with the epoch of a checkpoint, or begin one."""
        batches = self._opened()
        ticket = self._running = object()
        return self._count(batches, ticket)

    def _opened(self) -> Iterator[Any]:
        if self._resume is not None:
            batches = self._replayed(self._resume)
        else:
            if self.batches:
                self._end_epoch()  # an iterator that was put away and never finished
            self._epoch_start = self._generators()
            self._made_of = None
            batches = iter(self.loader)
        self._begun = True
        return batches

    def _count(self, batches: Iterator[Any], ticket: object) -> Iterator[Any]:
        while True:
            if self._rewound is ticket:
                self._rewound, batches = None, self._opened()
                self._running = ticket
            ahead = _host_generators() if self._reads_ahead else {}
            try:
                batch = next(batches)
            except StopIteration:
                break
            if self._running is not ticket:
                raise DataError("two loops run over one attached loader; only one of them can be counted")
            self.batches += 1
            self.total_batches += 1
            self._ahead = ahead
            yield batch
        # Only the data's end gets here; a loop that is left keeps its place.
        if self._running is ticket:
            self._end_epoch()

    @contextlib.contextmanager
    def rolled_back(self, *, skips: bool) -> Iterator[None]:
        """What is loaded meanwhile is a place to go back to in the middle of a loop; with `skips` it is not taken."""
        self._rolls_back = "skip" if skips else "again"
        try:
            yield
        finally:
            self._rolls_back = ""

    def trained(self) -> None:
        """A step was trained on: from here on a new loop is a new epoch, also after a resume."""
        self._resume = self._resume_generators = None
        self.updated()

    def updated(self) -> None:
        """The weights were updated by all batches that were taken: from here a restart goes on."""
        self._updated = self._place()

    @property
    def window(self) -> int:
        """Batches that were taken since the last update."""
        return 0 if self._updated is None else self.total_batches - int(self._updated["total_batches"])

    def end_epoch(self) -> None:
        """This pass is over, though the loader was not asked for more than its last batch. Safe to call twice."""
        if self.batches:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._resume = self._resume_generators = None
        self._running = self._made_of = None
        self.epoch += 1
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Place, and the generators' states at the epoch's beginning (or the loader's own state)."""
        replicas, epoch = self._replicas(), epoch_of(self.loader, midway=bool(self.batches))
        # Only if a sampler deals its order out to ranks: other states keep the layout that they always had.
        found = {} if replicas is None else {"replicas": replicas}
        found |= {} if epoch is None else {"loader_epoch": epoch}
        return found | {
            **self._place(),
            "generators": [generator.get_state() for generator in self._own_generators()],
            "loader": self._own_state(),
            "made_of": self._facts(),
            **self._place_of_update(),
        }

    @property
    def in_window(self) -> bool:
        """Whether batches of this epoch were taken since the last update, and are to come again after a restart."""
        same_epoch = self._updated is not None and self._updated["epoch"] == self.epoch
        return same_epoch and self.window > 0 and not self._keeps_its_place

    def _place_of_update(self) -> dict[str, Any]:
        """What of the present place was another one at the last update."""
        if self._updated is None or not self.in_window:
            return {}
        begins = not self._updated["batches"] and "own" in self._epoch_start
        return self._updated | ({"generators": self._epoch_start["own"]} if begins else {})

    def _place(self) -> dict[str, Any]:
        place = {
            "epoch": self.epoch,
            "batches": self.batches,
            "total_batches": self.total_batches,
            "epoch_start": self._epoch_start,
        }
        return place | {"ahead": self._ahead} if self._reads_ahead else place

    def place_after(self, batches: int) -> dict[str, Any]:
        """The state of a training that has consumed so many batches, if the loader's order is known from the epoch.

        Generators are as they are now: an order that was drawn from them is another one. Raises DataError for a loader
        that keeps its own place, or has no length.
        """
        if self._keeps_its_place:
            raise DataError("a loader that keeps its own place has none that follows from the number of steps")
        try:
            length = len(self)
        except TypeError as error:
            raise DataError("a loader without a length has no place that follows from the number of steps") from error
        epoch, within = divmod(batches, max(1, length))
        found = self.state_dict() | {"epoch": epoch, "batches": within, "total_batches": batches}
        if "loader_epoch" in found:
            found["loader_epoch"] = epoch
        return found | {"epoch_start": self._generators()}

    def _facts(self) -> dict[str, Any]:
        """What the epoch's order was made from: asked once an epoch, since a length may cost, or draw, something."""
        if self._made_of is None:
            own = [(generator, generator.get_state()) for generator in self._own_generators()]
            with generators_kept():
                self._made_of = describe_data(self.loader)
            for generator, state in own:
                generator.set_state(state)
        return self._made_of

    def _own_state(self) -> Any:
        """What the loader says of its place, if it keeps one; asking it leaves the generators alone."""
        if not self._keeps_its_place or not self._begun:
            return self._loaded if self._keeps_its_place else None
        try:
            with generators_kept():
                self._loaded = self.loader.state_dict()  # type: ignore[attr-defined]
        except Exception as error:  # whatever a loader raises: without its state there is still the count of batches
            if self._loaded is not _NOT_BEGUN:
                raise
            self._keeps_its_place = False
            kind = type(self.loader).__name__
            _log.warning(
                "data: state_dict() of the %s fails (%r), so its place is kept as that of a loader without: a restart "
                "reads the consumed batches of the epoch again, and drops them",
                kind,
                error,
            )
            return None
        return self._loaded

    def check_saved(self, saved: Any, path: str) -> None:
        """Refuse the place of another kind of loader, and one in the middle of other data than the attached one."""
        if (saved["loader"] is None) == self._keeps_its_place and not self._state_dict_fails(saved["loader"]):
            kinds = "a loader with a state of its own", "a loader without"
            before, now = kinds if saved["loader"] is not None else kinds[::-1]
            raise DataError(
                f"{path}: the checkpoint was made with {before}, and {now} is attached; attach the same kind"
            )
        if self.changed == "refuse" and saved["batches"]:
            found = difference(saved.get("made_of"), self._facts(), int(saved["batches"]))
            if found is not None and not found.complete:
                raise MismatchError(f"{path}: {found.refusal}")

    def _state_dict_fails(self, saved: Any) -> bool:
        """Whether the loader's state_dict cannot be called, as it could not when the checkpoint was made."""
        if saved is not None or not self._keeps_its_place:
            return False
        try:
            with generators_kept():
                self.loader.state_dict()  # type: ignore[attr-defined]
        except Exception:  # as in _own_state; nothing is loaded into it
            self._keeps_its_place = False
            return True
        return False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a place; the next loop begins there. Raises DataError and MismatchError as `check_saved` does."""
        self.check_saved(state, "data")
        if self._rolls_back == "skip":
            return
        if self._rolls_back and self._running is not None:
            self._rewound = self._running
        state, midway = self._moved(state)
        self._take(state)
        if "loader_epoch" in state:
            set_epoch(self.loader, int(state["loader_epoch"]))
        self._epoch_start, self._ahead = dict(state["epoch_start"]), dict(state.get("ahead", {}))
        self._running = self._updated = None
        self._resume = self._resume_generators = None
        own = self._own_generators()
        if midway:
            self._resume = state
        elif len(own) == len(state["generators"]):
            # Between two epochs there is nothing to replay: the next order is drawn from where they stood.
            for generator, saved in zip(own, state["generators"], strict=True):
                generator.set_state(saved)

    def _moved(self, state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The place in the data of now, and whether it is in the middle of an epoch.

        It is another place if the data changed, and `changed` says what to do then.
        """
        found = difference(state.get("made_of"), self._facts(), int(state["batches"]))
        if found is None or not state["batches"]:
            return state, bool(state["batches"])
        if found.complete or self.changed == "epoch":
            if not found.complete:
                _log.warning("data: %s; the rest of epoch %d is left out", found.change, state["epoch"])
            following = {} if "loader_epoch" not in state else {"loader_epoch": int(state["loader_epoch"]) + 1}
            own = None if state["loader"] is None else _NOT_BEGUN
            moved = {**state, "epoch": int(state["epoch"]) + 1, "batches": 0, "loader": own}
            return moved | following, False
        batches, repeated = found.place()
        if state["loader"] is not None:
            _log.warning("data: %s; the loader's own state says where it goes on", found.change)
            return state, True
        _log.warning(
            "data: %s; going on after %d batches of now%s%s",
            found.change,
            batches,
            f", so the last {repeated} samples come again" if repeated else "",
            "" if found.same_samples else ", of another order: some samples come again, and some do not come",
        )
        return {**state, "batches": batches}, True

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]], world: NewWorld) -> None:
        """Continue after what all ranks together have consumed, with another number of ranks.

        If a sampler deals one order out to the ranks (DistributedSampler), this rank goes on after its share of the
        consumed batches; batches must be of the same size as before. If every rank goes through the data in the same
        order, the place stays. Raises MismatchError if no place is the same for the new ranks.
        """
        first = states[0]
        saved, live = first.get("replicas"), self._replicas()
        # An order that is dealt out depends on seed and epoch alone, not on the ranks' own generators.
        own = ("made_of", "ahead", *(() if saved is None else ("epoch_start", "generators")))
        digests = {state_digest({key: value for key, value in state.items() if key not in own}) for state in states}
        if len(digests) > 1:
            places = [(int(state["epoch"]), int(state["batches"])) for state in states]
            raise MismatchError(
                f"data: the ranks of step {world.step} are at different places in their data or drew their orders from "
                f"different generators ((epoch, batch): {places[:8]}), so no place is right for {world.world_size} "
                "ranks; restore with as many ranks as before, or without data"
            )
        if saved is None and live is None:
            self.load_state_dict({key: value for key, value in first.items() if key != "ahead"})
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
                "ranks cannot share evenly; restore from a step at which they can, or with as many ranks as before"
            )
        self.load_state_dict(
            {
                **{key: value for key, value in first.items() if key != "ahead"},
                "batches": counts[0] // after,
                "total_batches": counts[1] // after,
                "epoch_start": self._generators(),
                "generators": [generator.get_state() for generator in self._own_generators()],
            }
        )

    def _replicas(self) -> int | None:
        """To how many ranks the loader's sampler deals out one order; None if it says nothing of it."""
        found = (getattr(sampler, "num_replicas", None) for sampler in self._samplers())
        return next((number for number in found if type(number) is int and number > 0), None)

    def _take(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.batches, self.total_batches = (
            int(state[key]) for key in ("epoch", "batches", "total_batches")
        )
        own = state["loader"]
        if own is not None:
            self._loaded, self._begun = own, False
            if own != _NOT_BEGUN:
                self.loader.load_state_dict(own)  # type: ignore[attr-defined] # it has one, as its state says

    def _replayed(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """An iterator that stands after the consumed batches; the generators stay as they are."""
        self._take(state)
        now = RngState()
        if self._resume_generators is None:
            self._resume_generators = now.state_dict()
        try:
            if state["loader"] is not None:
                return iter(self.loader)
            self._set_generators(self._epoch_start)
            batches = iter(self.loader)
            for number in range(self.batches):
                if number == self.batches - 1 and state.get("ahead"):
                    RngState().load_state_dict(state["ahead"])  # for the batch after it, which was made with it
                try:
                    next(batches)
                except StopIteration:
                    raise DataError(
                        f"the checkpoint was made after batch {self.batches} of an epoch, and the loader now ends "
                        f"after {number}; attach the data that it was made with"
                    ) from None
            return batches
        finally:
            now.load_state_dict(self._resume_generators)

    def _generators(self) -> dict[str, Any]:
        states: dict[str, Any] = {"rng": _host_generators()}
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

    def _samplers(self) -> tuple[Any, ...]:
        """Those that the loader has; None for those that it lacks."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        return getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)

    def _own_generators(self) -> list[torch.Generator]:
        """Generators that the loader or its samplers were given, each once.

        Not that of a sampler which makes it when it is begun, and seeds it for each epoch (accelerate's).
        """
        found: list[torch.Generator] = []
        for holder in (self.loader, *self._samplers()):
            generator = None if hasattr(holder, "initial_seed") else getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
                found.append(generator)
        return found
