"""Back to the newest good checkpoint in the running process: exact, with the batches since then again or skipped."""

from __future__ import annotations

import logging

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import CheckpointError, CorruptCheckpoint, NoCheckpoint
from tests.support.patience import wait_until

BATCHES = 8


class Training:
    """A small one, attached: shuffled data, dropout, momentum."""

    def __init__(self, folder, system="pccheck", every=2, **options):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        samples = torch.arange(BATCHES * 2 * 3, dtype=torch.float32).reshape(-1, 3) / 20
        self.loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
        self.checkpointer = checkpointer_class(system)(folder, interval_steps=every, **options)
        self.checkpointer.attach(model=self.model, optimizer=self.optimizer, data=self.loader)
        self.seen = []
        """Of each step: its number, its batch, its loss."""

    def run(self, until, at=None, then=None):
        """Train up to step `until`; after step `at`, once, do `then`."""
        checkpointer = self.checkpointer
        while True:
            for batch in checkpointer.data:
                loss = self.model(batch).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                step = checkpointer.step()
                checkpointer.drain()
                self.seen.append((step, batch.flatten().tolist(), loss.item()))
                if at is not None and step == at:
                    at = None
                    then()
                elif step >= until:
                    return


@pytest.fixture
def make(tmp_path):
    made = []

    def training(name="job", **options):
        made.append(Training(tmp_path / name, **options))
        return made[-1]

    yield training
    for one in made:
        one.checkpointer.close()


def straight(make, until):
    """What a training sees that is never stopped."""
    training = make("straight", every=1000)
    training.run(until)
    return training.seen


@pytest.mark.parametrize("system", ["sync", "checkfreq", "gpm", "dcp", "pccheck"])
def test_it_goes_on_as_if_nothing_had_been(system, make):
    """In the middle of an epoch, from within its loop: the same batches, the same losses to the bit."""
    training = make(system=system)
    back = []
    training.run(12, at=7, then=lambda: back.append(training.checkpointer.rollback()))
    assert back == [6]
    expected = straight(make, 12)
    assert training.seen == expected[:7] + expected[6:]


@pytest.mark.parametrize(("every", "at", "back"), [(3, 10, 9), (6, 10, 6), (8, 11, 8)])
def test_over_the_end_of_an_epoch(every, at, back, make):
    """An epoch has eight batches. What leads back into the epoch before ends it first."""
    training = make(every=every)
    training.run(20, at=at, then=training.checkpointer.rollback)
    expected = straight(make, 20)
    assert training.seen == expected[:at] + expected[back:]
    assert (training.checkpointer.data.epoch, training.checkpointer.data.batches) == (2, 4)


def test_the_batches_since_then_are_skipped_if_asked(make):
    training = make(every=4)
    training.run(11, at=6, then=lambda: training.checkpointer.rollback(skip_batches=True))
    expected = straight(make, 8)
    steps, batches = [one[0] for one in training.seen], [one[1] for one in training.seen]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11]
    assert batches[:8] == [one[1] for one in expected], "none comes twice, none is left out"
    assert training.seen[4][2] != training.seen[6][2]
    # A restart goes on from there as well.
    training.checkpointer.close()
    again = make(every=4)
    assert again.checkpointer.data.total_batches == 10, "step 8 was trained on the tenth batch"


def test_what_was_judged_bad_is_passed_over(make):
    training = make()

    def then():
        assert training.checkpointer.verdict(6, False, "as it looks")
        assert training.checkpointer.rollback() == 4

    training.run(9, at=7, then=then)
    expected = straight(make, 9)
    assert training.seen == expected[:7] + expected[4:]
    assert training.checkpointer.latest() == 8


def test_gradients_of_before_are_gone_and_listeners_stay(make):
    training = make()
    heard = []
    training.checkpointer.on_event(lambda event: heard.append((event.step, event.outcome.value)))

    def then():
        training.model(torch.ones(1, 3)).sum().backward()
        training.checkpointer.rollback()
        assert all(parameter.grad is None for parameter in training.model.parameters())

    training.run(6, at=3, then=then)
    wait_until(lambda: len(heard) == 3, "three events", 30)
    assert heard == [(2, "durable"), (4, "durable"), (6, "durable")]


def test_without_a_good_checkpoint_the_training_stays_as_it_is(make):
    training = make(every=100)
    with pytest.raises(NoCheckpoint, match=r"there is no good checkpoint in .* to go back to"):
        training.checkpointer.rollback()
    training.run(5)
    assert training.seen == straight(make, 5)


def test_a_damaged_checkpoint_leads_to_the_one_before_and_none_to_an_end(make, tmp_path, caplog):
    training = make()
    training.run(5)
    slots = {info.step: info for info in training.checkpointer._store.committed()}

    def damage(step):
        with slots[step].path.open("r+b") as slot:
            slot.seek(slots[step].record.data_offset)
            slot.write(b"\xff" * 64)

    damage(4)
    with caplog.at_level(logging.WARNING, "lastgood"):
        assert training.checkpointer.rollback() == 2
    damage(2)
    with pytest.raises(CorruptCheckpoint):
        training.checkpointer.rollback()
    with pytest.raises(CheckpointError, match="attach"):
        training.checkpointer.step()


def test_it_is_for_attached_trainings(tmp_path):
    with pytest.raises(CheckpointError, match="attach"):
        PCcheck(tmp_path).rollback()
