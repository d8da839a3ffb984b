"""Loops on accelerate with a checkpointer: windows of accumulation, what was prepared, what is refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lastgood.errors import ConfigError, MismatchError
from lastgood.state import state_digest
from tests.suggestions.following import advice, follows, refusal

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="lastgood[huggingface] is not installed"
)


class Drawing(Dataset):
    """Samples that draw: the loader makes the next one before it gives one."""

    def __init__(self, count: int = 14) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) + index / self.count


class Counter:
    """Something of the user's that is registered."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Run:
    """A user's script, made anew in each life."""

    def __init__(self, accumulation: int = 3, *, shuffle: bool = True, wrap=None) -> None:
        from accelerate import Accelerator

        torch.manual_seed(3)
        self.accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
        )
        model = self.network if wrap is None else wrap(self.network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        loader = DataLoader(Drawing(), batch_size=2, shuffle=shuffle)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.seen: list[tuple[int, float]] = []

    def use(self, directory, **given):
        from lastgood.integrations.accelerate import use_lastgood

        self.training = use_lastgood(self.accelerator, directory, **{"interval_steps": 1, **given})
        return self.training

    def train(self, until: int, leave: int = 0) -> list[tuple[int, float]]:
        """Up to `leave` batches after update `until`; (update, loss) of each batch."""
        training, rest = self.training, leave
        while True:
            for batch in training.data:
                with self.accelerator.accumulate(self.model):
                    loss = (self.model(batch) - batch.mean()).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.counter.value += 1
                step = training.step(loss)
                self.seen.append((step, loss.item()))
                if step == until:
                    if rest == 0:
                        training.drain()
                        return self.seen
                    rest -= 1

    def digest(self) -> str:
        return state_digest({"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()["state"]})


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_run_in_pieces_is_the_unbroken_one(accumulation, tmp_path):
    unbroken = Run(accumulation)
    unbroken.use(tmp_path / "a")
    unbroken.train(11)
    unbroken.training.close()
    broken, stops = [], [(2, 0), (4, 1 if accumulation == 3 else 0), (8, 0), (11, 0)]
    for number, (stop, leave) in enumerate(stops):
        life = Run(accumulation)
        training = life.use(tmp_path / "b")
        assert training.resumed == (stops[number - 1][0] if number else 0)
        assert life.counter.value == len(broken)
        life.train(stop, leave)
        training.close()
        # What came after the last update comes again.
        broken += life.seen[: len(life.seen) - leave]
    assert broken == unbroken.seen
    assert life.digest() == unbroken.digest()


def test_the_optimizer_that_steps_has_the_hook(tmp_path):
    run = Run(3)
    training = run.use(tmp_path)
    run.train(2)
    assert training._hooks.updates == 2
    assert "step" not in vars(run.optimizer)
    training.close()


def test_a_compiled_model_goes_on_uncompiled(tmp_path):
    def compiled(model):
        return torch.compile(model, backend="eager")

    digests = []
    for directory, wraps in (("a", [None, None]), ("b", [compiled, None]), ("c", [None, compiled])):
        for until, wrap in zip((2, 4), wraps, strict=True):
            run = Run(wrap=wrap)
            assert run.use(tmp_path / directory).resumed == until - 2
            run.train(until)
            run.training.close()
        digests.append(run.digest())
    assert len(set(digests)) == 1


@follows("accelerator.prepare(model, optimizer, loader)", "as use_lastgood(accelerator, directory, data=loader)")
def test_what_was_not_prepared(tmp_path):
    from accelerate import Accelerator

    from lastgood.integrations.accelerate import use_lastgood

    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    message = refusal(lambda: use_lastgood(accelerator, tmp_path))
    model, loader = torch.nn.Linear(1, 1), DataLoader(Drawing())
    optimizer = torch.optim.SGD(model.parameters())
    names = {"accelerator": accelerator, "model": model, "optimizer": optimizer, "loader": loader}
    names["model"], names["optimizer"], names["loader"] = eval(advice(message, r"accelerator\.prepare\([^)]*\)"), names)
    accelerator.prepare(DataLoader(Drawing()))
    names |= {"use_lastgood": use_lastgood, "directory": tmp_path}
    training = eval(advice(refusal(lambda: use_lastgood(accelerator, tmp_path)), r"as (use_lastgood\(.*\))"), names)
    assert training.data.loader is names["loader"]
    training.close()


@follows("pass what accelerator.prepare(loader) returned")
def test_a_loader_that_was_not_prepared(tmp_path):
    run = Run()
    refusal(lambda: run.use(tmp_path, data=DataLoader(Drawing())))
    run.use(tmp_path, data=run.loader).close()


@follows("are what the Accelerator holds already; give yours other names")
def test_names_that_are_taken(tmp_path):
    run = Run()
    for name in ("model", "scaler", "accumulation"):
        assert name in refusal(lambda name=name: run.use(tmp_path, parts={name: {"a": 1}}))
    run.use(tmp_path, parts={"ema": {"a": torch.zeros(2)}}).close()


def test_bad_input_is_refused(monkeypatch, tmp_path):
    from lastgood import PCcheck
    from lastgood.integrations.accelerate import use_lastgood

    with pytest.raises(ConfigError, match=r"a dict is no accelerate.Accelerator"):
        use_lastgood({}, tmp_path)
    run = Run()
    training = run.use(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"this Accelerator has a pccheck in .*/a already.*or close the first"):
        run.use(tmp_path / "b")
    training.close()
    run.use(tmp_path / "b").close()
    run = Run(2)
    run.use(tmp_path / "c")
    run.train(1)
    run.training.close()
    with pytest.raises(MismatchError, match="an update was made of 2 batches, and now it is made of 3"):
        Run(3).use(tmp_path / "c")
    model = torch.nn.Linear(1, 1)
    other = PCcheck(tmp_path / "d", interval_steps=1)
    other.attach(model=model, huggingface={"a": 1})
    other.step()
    other.close()
    with pytest.raises(MismatchError, match="it was not made under accelerate"):
        Run().use(tmp_path / "d")
    run = Run()
    monkeypatch.setattr(type(run.accelerator), "distributed_type", "TP")
    with pytest.raises(ConfigError, match=r"trains by TP, which is not kept here"):
        run.use(tmp_path / "e")
