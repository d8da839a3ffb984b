"""Checkpoints of a sparse engine: exact resumes, none that is torn, and the systems that refuse."""

from __future__ import annotations

import copy
import time

import pytest
import torch

from lastgood import CheckFreq, Checkmate, FlowCheck, NoCheckpointing, PCcheck, SyncCheckpointer, TorchDCP
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.pccheck.flight import Flight
from lastgood.errors import ConfigError
from lastgood.sparse.engine import Engine
from tests.sparse.support.thread_ranks import together
from tests.sparse.support.workers import PROTOTYPE, bits, loss_of, make

STEPS, SAVED = 9, 5
SYSTEMS = {"sync": SyncCheckpointer, "checkfreq": CheckFreq, "pccheck": PCcheck, "dcp": TorchDCP}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def begin(place, directory, system, model, options):
    model, optimizer = make(options.get("adam", False), model)
    engine = Engine(model, optimizer, 0.9, options.get("compressor", "topk"), options["staleness"], ranks=place)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    engine.scheduler = scheduler
    checkpointer = system(directory / str(place.rank), interval_steps=SAVED)
    step = checkpointer.attach(model=model, optimizer=engine.optimizer, scheduler=scheduler, engine=engine)
    return model, engine, checkpointer, step


def go_on(model, engine, checkpointer, rank, first, last):
    losses = []
    for iteration in range(first, last):
        loss = loss_of(model, rank, iteration)
        engine.backward(loss)
        if engine.step():
            engine.scheduler.step()
            checkpointer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("system", "options"),
    [
        ("sync", {"staleness": 0}),
        ("sync", {"staleness": 1}),
        ("pccheck", {"staleness": 0}),
        ("pccheck", {"staleness": 1}),
        ("pccheck", {"staleness": 1, "compressor": "v16", "adam": True}),
        ("pccheck", {"staleness": 1, "compressor": "threshold"}),
        ("pccheck", {"staleness": 0, "compressor": "randomk"}),
        ("pccheck", {"staleness": 0, "compressor": "none"}),
        ("checkfreq", {"staleness": 1}),
        ("dcp", {"staleness": 1}),
    ],
    ids=str,
)
def test_a_restart_goes_on_to_the_bit(tmp_path, system, options):
    def without_end(place):
        model, engine, checkpointer, _ = begin(place, tmp_path / "one", NoCheckpointing, None, options)
        losses = go_on(model, engine, checkpointer, place.rank, 0, STEPS)
        engine.finish()
        engine.close()
        return losses, bits(model)

    def ended(place):
        model, engine, checkpointer, _ = begin(place, tmp_path / "two", SYSTEMS[system], None, options)
        go_on(model, engine, checkpointer, place.rank, 0, SAVED)
        if system == "checkfreq":  # which chooses its intervals
            checkpointer.save(SAVED)
        go_on(model, engine, checkpointer, place.rank, SAVED, SAVED + 2)  # what a restart must not see
        checkpointer.drain(60)
        assert {event.outcome for event in checkpointer.events if event.step == SAVED} == {Outcome.DURABLE}
        checkpointer.close()

    def resumed(place):
        other = copy.deepcopy(PROTOTYPE)
        with torch.no_grad():
            for one in other.parameters():
                one.zero_()
        model, engine, checkpointer, step = begin(place, tmp_path / "two", SYSTEMS[system], other, options)
        assert step == SAVED
        losses = go_on(model, engine, checkpointer, place.rank, step, STEPS)
        engine.finish()
        checkpointer.close()
        return losses, bits(model)

    expected = together(2, without_end)
    together(2, ended)
    for (losses, weights), (before, whole) in zip(together(2, resumed), expected, strict=True):
        assert losses == before[SAVED:]
        assert_same(weights, whole)


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_checkpoint_is_torn_by_a_slow_copy(tmp_path, monkeypatch, staleness):
    copied = Flight._copy
    at_save = {}

    def slow(flight):
        time.sleep(1.0)  # the next updates are due long before
        copied(flight)

    monkeypatch.setattr(Flight, "_copy", slow)

    def work(place):
        options = {"staleness": staleness}
        model, engine, checkpointer, _ = begin(place, tmp_path, PCcheck, None, options)
        for iteration in range(2 * SAVED):
            go_on(model, engine, checkpointer, place.rank, iteration, iteration + 1)
            if (iteration + 1) % SAVED == 0:
                at_save[place.rank] = bits(model)
        stalled = checkpointer.update_stall_s
        engine.close()
        checkpointer.drain(60)
        checkpointer.close()
        assert [event.outcome for event in checkpointer.events] == [Outcome.DURABLE] * 2
        return stalled

    assert min(together(2, work)) > 0.2  # it did wait for the copy

    def look(place):
        model, _, checkpointer, step = begin(place, tmp_path, PCcheck, None, {"staleness": staleness})
        assert step == 2 * SAVED
        assert_same(bits(model), at_save[place.rank])
        checkpointer.close()

    together(2, look)


def test_weights_written_outside_the_optimizers_step_would_be_seen(tmp_path, monkeypatch):
    """The twin with the fault: the engine of before writes while the checkpoint is copied."""
    copied = Flight._copy
    monkeypatch.setattr(Flight, "_copy", lambda flight: (time.sleep(0.3), copied(flight)))

    def write_at_once(self, write):
        with torch.no_grad():
            write()
        return 0.0, 0.0

    monkeypatch.setattr(Engine, "_update", write_at_once)

    def work(place):
        model, engine, checkpointer, _ = begin(place, tmp_path, PCcheck, None, {"staleness": 0})
        go_on(model, engine, checkpointer, place.rank, 0, SAVED + 2)
        checkpointer.drain(60)
        checkpointer.close()
        return [event.outcome for event in checkpointer.events]

    assert together(1, work) == [[Outcome.FAILED]]


@pytest.mark.parametrize("system", [Checkmate, FlowCheck])
def test_a_system_that_takes_gradients_refuses(tmp_path, system):
    model, optimizer = make()
    engine = Engine(model, optimizer, staleness=0)
    given = {"shadows": ["127.0.0.1:1"]} if system is Checkmate else {"nodes": ["127.0.0.1:1"]}
    checkpointer = system(tmp_path, **given)
    with pytest.raises(ConfigError, match=f"{system.name}.*repeats steps from dense gradients.*PCcheck"):
        checkpointer.start({"model": model, "optimizer": engine.optimizer, "engine": engine})
    engine.close()


def test_engine_and_optimizer_are_kept_together(tmp_path):
    model, optimizer = make()
    engine = Engine(model, optimizer, staleness=0)
    for given, lost in (({"optimizer": optimizer}, "engine=engine"), ({"engine": engine}, "engine.optimizer")):
        with pytest.raises(ConfigError, match=lost):
            PCcheck(tmp_path, interval_steps=1).attach(model=model, **given)
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    checkpointer.attach(model=model, both=[optimizer, engine])
    checkpointer.close()
    engine.close()


def test_the_loop_of_the_documentation_goes_on_in_the_middle_of_an_epoch(tmp_path):
    """A loader that shuffles, batches in parts, and saves that are asked for in the middle of a batch."""
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(23, 4, generator=generator), torch.randn(23, 1, generator=generator)
    )

    def run(directory, batches):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(4, 40), torch.nn.Dropout(0.5), torch.nn.Linear(40, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine = Engine(model, optimizer, compression=0.8, accumulate=3)
        checkpointer = PCcheck(directory, interval_steps=3)
        loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
        step = checkpointer.attach(model=model, optimizer=engine.optimizer, engine=engine, data=loader)
        losses = []
        while step < batches:
            for given, wanted in engine.batches(checkpointer.data):
                loss = torch.nn.functional.mse_loss(model(given), wanted)
                engine.backward(loss)
                losses.append(float(loss.detach()))
                if engine.step():
                    step = checkpointer.step()
                elif step == 4:
                    checkpointer.save(step)
                if step == batches:
                    break
        checkpointer.drain(60)
        failed = [event.error for event in checkpointer.events if event.outcome is Outcome.FAILED]
        checkpointer.close()
        engine.close()
        return losses, failed

    expected, failed = run(tmp_path / "one", 12)
    assert failed == [failed[0]] * 2
    assert "save only if step() returned True" in failed[0]
    run(tmp_path / "two", 8)
    losses, _ = run(tmp_path / "two", 12)
    assert losses == expected[6 * 3 :]
