"""Lightning's Trainer and Fabric with a checkpointer: broken off anywhere, they go on as if they never were."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lastgood.errors import ConfigError, MismatchError
from lastgood.state import state_digest
from tests.suggestions.following import advice, follows, refusal

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lastgood[lightning] is not installed"
)


class Drawing(Dataset):
    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) + index / self.count


class Endless(IterableDataset):
    def __iter__(self):
        yield from torch.rand(9, 4)


class BrokenOff(Exception):
    """In the place of a kill."""


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
    )


def module(seen, until):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, batch, number):
            loss = (self.layers(batch) - batch.mean()).square().mean()
            seen.append((self.global_step, number, loss.item()))
            return loss

        def validation_step(self, batch, number):
            self.log("val", self.layers(batch).square().mean() + torch.rand(()) / 10)

        def on_train_batch_end(self, outputs, batch, number):
            if self.global_step == until:
                raise BrokenOff

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def trainer_of(directory, *, lastgood=None, callbacks=(), **given):
    import lightning

    from lastgood.integrations.lightning import Lastgood

    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[Lastgood(directory, **{"interval_steps": 2, **(lastgood or {})}), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 4, "enable_checkpointing": False, **given},
    )


def life(directory, *, until=None, data=None, **given) -> dict:
    """What a training that may be broken off has seen, and what it ended with."""
    seen: list[tuple[int, int, float]] = []
    torch.manual_seed(3)
    model = module(seen, until)
    trainer = trainer_of(directory, **given)
    loader = DataLoader(Drawing(), batch_size=3, shuffle=True) if data is None else data
    with contextlib.suppress(BrokenOff):
        trainer.fit(model, loader, DataLoader(Drawing(4), batch_size=2))
    trainer.callbacks[0].checkpointer.close()
    optimizers = [one.state_dict()["state"] for one in trainer.optimizers]
    return {
        "seen": seen,
        "digest": state_digest({"model": model.layers.state_dict(), "optimizers": optimizers}),
        "ended": (trainer.global_step, trainer.current_epoch),
        "trainer": trainer,
    }


# 7 batches an epoch: 7 or 4 updates. Validation at its end, or in its middle.
@pytest.mark.parametrize(
    ("accumulation", "validation", "ends"), [(1, 1.0, (3, 7, 8, 17)), (2, 0.5, (3, 4, 5, 10)), (2, 1.0, (1, 6, 9))]
)
def test_a_broken_off_fit_is_the_undisturbed_one(accumulation, validation, ends, tmp_path):
    given = {"accumulate_grad_batches": accumulation, "val_check_interval": validation}
    straight = life(tmp_path / "straight", **given)
    seen = {}
    for end in ends:
        seen |= {step[:2]: step[2] for step in life(tmp_path / "broken", until=end, **given)["seen"]}
    last = life(tmp_path / "broken", **given)
    seen |= {step[:2]: step[2] for step in last["seen"]}
    assert seen == {step[:2]: step[2] for step in straight["seen"]}
    assert len(last["seen"]) < len(straight["seen"])
    assert (last["digest"], last["ended"]) == (straight["digest"], straight["ended"])
    again = life(tmp_path / "broken", **given)
    assert (again["seen"], again["digest"], again["ended"]) == ([], straight["digest"], straight["ended"])


def test_what_stopped_early_stays_stopped_and_more_steps_go_on(tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping

    def stopped():
        return life(tmp_path / "a", callbacks=[EarlyStopping("val", patience=1, min_delta=10.0)])

    first = stopped()
    assert first["ended"][1] < 4
    again = stopped()
    assert (again["seen"], again["ended"][0]) == ([], first["ended"][0])
    life(tmp_path / "b", max_steps=7, max_epochs=-1)
    longer = life(tmp_path / "b", max_steps=12, max_epochs=-1)
    straight = life(tmp_path / "c", max_steps=12, max_epochs=-1)
    assert (len(longer["seen"]), longer["digest"]) == (5, straight["digest"])


@follows("call fit() without it", "Trainer(reload_dataloaders_every_n_epochs=...)")
def test_what_lightning_would_do_otherwise(tmp_path):
    straight = life(tmp_path / "a", max_steps=2)
    straight["trainer"].save_checkpoint(tmp_path / "own.ckpt")
    trainer = trainer_of(tmp_path / "b", max_steps=4)
    loader = DataLoader(Drawing(), batch_size=2)
    refusal(lambda: trainer.fit(module([], None), loader, ckpt_path=tmp_path / "own.ckpt", weights_only=False))
    message = refusal(lambda: life(tmp_path / "b", reload_dataloaders_every_n_epochs=1))
    assert advice(message, r"Trainer\((\w+)=") == "reload_dataloaders_every_n_epochs"
    assert life(tmp_path / "b", max_steps=2)["ended"][0] == 2


def test_bad_input_is_refused(monkeypatch, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lastgood.integrations import lightning as ours

    with pytest.raises(ConfigError, match="goes through 2 loaders at once"):
        life(tmp_path / "a", data=[DataLoader(Drawing()), DataLoader(Drawing())])
    with pytest.raises(ConfigError, match="a loader without a length Lightning takes a batch ahead"):
        life(tmp_path / "a", data=DataLoader(Endless()))
    own = ModelCheckpoint(dirpath=tmp_path / "a")
    with pytest.raises(ConfigError, match="a ModelCheckpoint's dirpath, where the framework keeps"):
        life(tmp_path / "a", callbacks=[own], enable_checkpointing=True)
    life(tmp_path / "b", until=3, accumulate_grad_batches=2)
    with pytest.raises(MismatchError, match="an update was made of 2 batches, and now it is made of 1"):
        life(tmp_path / "b")
    with monkeypatch.context() as other:
        other.setattr(ours, "_WAYS", ("Others",))
        with pytest.raises(ConfigError, match="goes by SingleDeviceStrategy, whose state is not kept here"):
            life(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"a dict is no lightning\.Fabric"):
        ours.use_lastgood({}, tmp_path, parts={})


# -- Fabric --------------------------------------------------------------------------------------------------------


def on_fabric(directory, until: int) -> tuple[int, list[tuple[int, float]], str]:
    import lightning

    from lastgood.integrations.lightning import use_lastgood

    torch.manual_seed(3)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    layers = network()
    model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(Drawing(), batch_size=3, shuffle=True))
    steps = {"done": 0}
    parts = {"model": model, "optimizer": optimizer, "steps": steps}
    ckpt = use_lastgood(fabric, directory, interval_steps=1, parts=parts, data=loader)
    with pytest.raises(ConfigError, match="this Fabric has a pccheck in"):
        use_lastgood(fabric, directory, parts=parts)
    began, seen = steps["done"], []
    while steps["done"] < until:
        for batch in ckpt.data:
            loss = (model(batch) - batch.mean()).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps["done"] += 1
            seen.append((ckpt.step(loss), loss.item()))
            if steps["done"] == until:
                break
    assert ckpt._hooks.updates == until - began and "step" not in vars(optimizer)
    passes = loader._num_iter_calls
    ckpt.drain()
    ckpt.close()
    assert passes == (until - 1) // 7 + 1
    return began, seen, state_digest({"model": layers.state_dict()})


def test_a_loop_on_fabric_goes_on(tmp_path):
    _, straight, digest = on_fabric(tmp_path / "a", 17)
    _, first, _ = on_fabric(tmp_path / "b", 4)
    began, second, _ = on_fabric(tmp_path / "b", 10)
    assert began == 4
    began, third, again = on_fabric(tmp_path / "b", 17)
    assert (began, first + second + third, again) == (10, straight, digest)
