"""What a loader is made of, as far as it can be read cheaply, and what a change of it in mid-epoch means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lastgood._lazy import torch

__all__ = ["DataChanged", "Difference", "describe_data", "difference", "epoch_of", "set_epoch"]

DataChanged = Literal["refuse", "samples", "epoch"]
"""What to do if the data changed within an epoch: raise MismatchError; go on after the same number of samples;
begin the next epoch."""

_COMPARED = {"batch_size": "batch size", "samples": "samples", "sampler": "sampler"}


def describe_data(loader: Any) -> dict[str, Any]:
    """Batch size, number of samples, kind of sampler, batches of an epoch: what places depend on; None is unknown."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sizes = (getattr(loader, "batch_size", None), getattr(batch_sampler, "batch_size", None))
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    dataset = getattr(loader, "dataset", None)
    samples = _length(dataset)
    return {
        "batch_size": next((size for size in sizes if type(size) is int), None),
        "samples": samples,
        "sampler": None if sampler is None else type(sampler).__name__,
        # A DataLoader that was asked for the length of an IterableDataset holds that against it later.
        "batches": None
        if samples is None or isinstance(dataset, torch.utils.data.IterableDataset)
        else _length(loader),
    }


@dataclass(frozen=True)
class Difference:
    """Between the data of a checkpoint and that of now."""

    before: Mapping[str, Any]
    now: Mapping[str, Any]
    batches: int
    """Consumed of the epoch, when the checkpoint was made."""

    @property
    def same_samples(self) -> bool:
        """Whether the order of samples is the same, so that only its division into batches changed."""
        return all(self.before.get(key) == self.now.get(key) for key in ("samples", "sampler"))

    @property
    def change(self) -> str:
        """Both sides in words."""
        changed = [key for key in _COMPARED if _differ(self.before, self.now, key)]
        return "; ".join(f"{_COMPARED[key]} {self.before[key]} before, {self.now[key]} now" for key in changed)

    @property
    def complete(self) -> bool:
        """Whether the epoch had been consumed to its end, so that nothing is skipped or repeated."""
        return self.before.get("batches") == self.batches

    @property
    def refusal(self) -> str:
        """What would happen, and what can be done instead."""
        return (
            f"the data changed in the middle of an epoch ({self.change}), of which {self.batches} batches were "
            f"consumed: going on after {self.batches} batches {self._effect()}; attach the data as it was, or choose: "
            "attach(..., data_changed='samples') goes on after the same number of samples, "
            "attach(..., data_changed='epoch') leaves the rest of this epoch out and begins the next"
        )

    def place(self) -> tuple[int, int]:
        """Batches of now that hold no more samples than were consumed, and how many consumed samples come again."""
        sizes = self.before.get("batch_size"), self.now.get("batch_size")
        if not (sizes[0] and sizes[1]):
            return self.batches, 0
        return divmod(self.batches * int(sizes[0]), int(sizes[1]))

    def _effect(self) -> str:
        sizes = self.before.get("batch_size"), self.now.get("batch_size")
        if not self.same_samples:
            return "would be a place in another order: some samples would come again, and some would not come"
        if sizes[0] and sizes[1] and sizes[0] != sizes[1]:
            samples = abs(sizes[1] - sizes[0]) * self.batches
            return f"would skip {samples} samples" if sizes[1] > sizes[0] else f"would repeat {samples} samples"
        return "would be another place"


def difference(before: Mapping[str, Any] | None, now: Mapping[str, Any], batches: int) -> Difference | None:
    """What is known of both sides and differs; None if nothing does, or if the checkpoint does not say."""
    if before is None or not any(_differ(before, now, key) for key in _COMPARED):
        return None
    return Difference(before, now, batches)


_PASSES_BEGUN = "_num_iter_calls"
"""Where Fabric's loaders count the passes that were begun."""


def epoch_of(loader: Any, *, midway: bool = False) -> int | None:
    """The pass that a loader counts by itself and gives to its samplers, as accelerate's and Fabric's do.

    `midway` says whether one is in progress. None for a loader that counts none.
    """
    begun = getattr(loader, "__dict__", {}).get(_PASSES_BEGUN)
    if type(begun) is int:
        return begun - midway
    number = getattr(loader, "iteration", None)
    return number if type(number) is int and callable(getattr(loader, "set_epoch", None)) else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Let such a loader count on from `epoch`."""
    if type(getattr(loader, "__dict__", {}).get(_PASSES_BEGUN)) is int:
        setattr(loader, _PASSES_BEGUN, epoch)
    elif epoch_of(loader) is not None:
        loader.set_epoch(epoch)


def _differ(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    return None not in (before.get(key), now.get(key)) and before[key] != now[key]


def _length(dataset: Any) -> int | None:
    if dataset is None or not hasattr(type(dataset), "__len__"):
        return None
    try:
        return len(dataset)
    except Exception:  # whatever a user's own __len__ raises: the length is not known then
        return None
