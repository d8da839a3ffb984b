"""What every workload promises, as tests. docs/conformance.md lists them.

Whoever collects this class gives the fixture `build`, which makes a new workload for a seed, and `device`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch

from lastgood.checkpointers.baselines.sync import SyncCheckpointer
from lastgood.state import flatten
from lastgood.training.loop import TrainingLoop
from lastgood.workloads.base import Batch, Workload

__all__ = ["Build", "TestWorkload"]

Build = Callable[[int], Workload]
"""Makes a workload of a seed, on the device of the test."""


def _loop(build: Build, folder: Path, device: str, seed: int = 3) -> TrainingLoop:
    """A training that has not begun; `folder` is of its checkpoints alone."""
    return TrainingLoop(build(seed), SyncCheckpointer(folder), 0, device)


def _losses(build: Build, folder: Path, device: str, steps: int, seed: int = 3) -> list[float]:
    loop = _loop(build, folder, device, seed)
    loop.start()
    losses = loop.train(steps).losses
    loop.checkpointer.close()
    return losses


def _equal(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class TestWorkload:
    """One factory gives a model, its optimizer and an endless stream of batches, and all of it can be saved."""

    def test_it_trains(self, build: Build, device: str, tmp_path: Path) -> None:
        """Losses are finite numbers, and the weights change."""
        loop = _loop(build, tmp_path, device)
        before = [part.detach().clone() for part in loop.workload.model.parameters()]
        loop.start()
        losses = loop.train(3).losses
        loop.checkpointer.close()
        assert all(map(math.isfinite, losses)), f"losses that are no finite numbers: {losses}"
        after = list(loop.workload.model.parameters())
        assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True)), "no weight has changed"

    def test_it_says_what_its_data_is(self, build: Build) -> None:
        """For the run record: name, source, and a sum over the data."""
        facts = build(3).data_facts
        assert {"name", "source", "sha256"} <= facts.keys(), f"data_facts has {sorted(facts)}"
        assert re.fullmatch(r"[0-9a-f]{64}", facts["sha256"]), "data_facts: sha256 is none"

    def test_a_seed_gives_one_training_and_another_seed_another(
        self, build: Build, device: str, tmp_path: Path
    ) -> None:
        """Whatever was drawn before: weights, order of batches and dropout follow from the seed alone."""
        torch.manual_seed(99)
        first = _losses(build, tmp_path / "first", device, 3)
        torch.rand(5)
        assert _losses(build, tmp_path / "second", device, 3) == first, "two trainings of one seed differ"
        assert _losses(build, tmp_path / "other", device, 3, seed=4) != first, "another seed changes nothing"

    def test_a_batch_depends_on_its_number_alone(self, build: Build) -> None:
        """Never on what was drawn before it: a place that is restored gives the batches of a run never stopped."""
        data = build(3).data
        taken = [next(data) for _ in range(4)]
        assert all(part.device.type == "cpu" for part in taken[0].values()), "batches are made on the CPU"
        fresh = build(3).data
        for number in (3, 0, 2, 3, 1):
            assert _equal(fresh.batch(number), taken[number]), f"batch {number} is another one if it is asked for alone"
        fresh.load_state_dict({**fresh.state_dict(), "consumed": 2})
        assert _equal(next(fresh), taken[2]), "a restored place gives another batch"

    def test_losses_after_a_restore_are_those_of_the_unbroken_run(
        self, build: Build, device: str, tmp_path: Path
    ) -> None:
        """All that changes in a training is in its state."""
        unbroken = _loop(build, tmp_path / "job", device)
        unbroken.start()
        unbroken.train(3)
        unbroken.save()
        expected = unbroken.train(3).losses
        digest = unbroken.digest()
        unbroken.checkpointer.close()
        used = build(3)
        loop = TrainingLoop(used, SyncCheckpointer(tmp_path / "other"), 0, device)
        loop.start()
        loop.train(2)  # its optimizer and memories hold something that must not survive
        loop.checkpointer.close()
        resumed = TrainingLoop(used, SyncCheckpointer(tmp_path / "job"), 0, device)
        assert resumed.restore() == 3
        resumed.start()
        assert resumed.train(3).losses == expected, "something that changes in training is not in the state"
        assert resumed.digest() == digest
        resumed.checkpointer.close()

    def test_every_checkpoint_has_one_layout(self, build: Build, device: str, tmp_path: Path) -> None:
        """What grows from step to step has its full size from the start, or no slot could be made for it."""
        loop = _loop(build, tmp_path, device)
        loop.start()
        loop.train(1)
        first = flatten(loop.state).layout
        loop.train(3)
        later = flatten(loop.state).layout
        loop.checkpointer.close()
        assert first.digest() == later.digest(), "a part of the state has another shape or size after some steps"
