"""Hugging Face's Trainer with a checkpointer: broken off anywhere, it goes on as if it never was."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
import sys

import pytest
import torch

from lastgood.errors import ConfigError, MismatchError
from lastgood.integrations import frameworks
from lastgood.state import state_digest
from tests.suggestions.following import advice, follows, refusal
from tests.suggestions.packages import packages_of

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11)  # the Trainer that is known needs it
    or importlib.util.find_spec("accelerate") is None
    or importlib.util.find_spec("transformers") is None,
    reason="lastgood[huggingface] is not installed",
)


class Samples(torch.utils.data.Dataset):
    """Samples that draw when they are asked for, as a collator of masked language models does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(4) + index / self.count, "labels": torch.tensor([index / self.count])}


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class BrokenOff(Exception):
    """In the place of a kill: nothing of the training comes after it."""


def make(directory, folder, *, until=None, callbacks=(), lastgood=None, samples=20, **arguments):
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    from lastgood.integrations.huggingface import use_lastgood

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            if state.global_step == until:
                raise BrokenOff

    chosen = {
        "num_train_epochs": 4,
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "logging_steps": 3,
        "save_strategy": "no",
        "per_device_train_batch_size": 3,
        "learning_rate": 0.05,
        "seed": 3,
        **arguments,
    }
    stopping = [] if chosen["eval_strategy"] == "no" else [EarlyStoppingCallback(early_stopping_patience=3)]
    torch.manual_seed(7)
    trainer = Trainer(
        Small(),
        TrainingArguments(str(folder), report_to="none", disable_tqdm=True, use_cpu=True, **chosen),
        train_dataset=Samples(samples),
        eval_dataset=Samples(5),
        callbacks=[Ends(), *stopping, *callbacks],
    )
    if directory is not None:
        use_lastgood(trainer, directory, **{"interval_steps": 2, **(lastgood or {})})
    return trainer


def life(directory, folder, **given):
    """The trainer after its training, which may have been broken off."""
    trainer = make(directory, folder, **given)
    with contextlib.suppress(BrokenOff):
        trainer.train()
    if directory is not None:
        trainer._lastgood.checkpointer.close()
    return trainer


OF_TIME = ("runtime", "per_second", "train_loss", "total_flos")


def result(trainer) -> dict:
    """What must be equal: logs, weights, the optimizer's state, the best metric."""
    logs = [
        {key: value for key, value in entry.items() if not any(word in key for word in OF_TIME)}
        for entry in trainer.state.log_history
    ]
    # The learning rate's schedule was stepped by the same number of steps, or the rates in the logs would differ.
    optimizer = trainer.optimizer.state_dict()["state"]
    return {
        "logs": [entry for entry in logs if set(entry) - {"step", "epoch"}],
        "weights": state_digest({"model": trainer.model.state_dict(), "optimizer": optimizer}),
        "best": (trainer.state.best_metric, trainer.state.global_step, trainer.state.epoch),
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Results without a checkpointer, by the number of batches in an update."""
    found = {}

    def of(accumulation: int) -> dict:
        if accumulation not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            found[accumulation] = result(life(None, folder, gradient_accumulation_steps=accumulation))
        return found[accumulation]

    return of


# 7 batches an epoch, the last one smaller: 7, or 4 updates, of which the last is of one batch.
@pytest.mark.parametrize(("accumulation", "ends"), [(1, (3, 7, 8, 17)), (2, (1, 3, 4, 5, 10, 15))])
def test_a_broken_off_training_is_the_undisturbed_one(undisturbed, accumulation, ends, tmp_path):
    given = {"gradient_accumulation_steps": accumulation}
    for end in ends:
        assert life(tmp_path / "ckpt", tmp_path / "out", until=end, **given).state.global_step == end
    trainer = life(tmp_path / "ckpt", tmp_path / "out", **given)
    assert result(trainer) == undisturbed(accumulation)
    assert trainer._initial_global_step == (ends[-1] - 1) // 2 * 2
    # Once more: it is over, and stays so.
    again = life(tmp_path / "ckpt", tmp_path / "out", **given)
    assert result(again)["weights"] == result(trainer)["weights"]
    assert again.state.global_step == trainer.state.global_step == again._initial_global_step


def test_what_a_callback_stopped_stays_stopped_and_more_steps_go_on(tmp_path):
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            if state.global_step == 5:
                control.should_training_stop = True

    first = life(tmp_path / "stopped", tmp_path / "out", callbacks=[Stops()])
    assert first.state.global_step == 5
    assert life(tmp_path / "stopped", tmp_path / "out").state.global_step == 5
    # An evaluation at the end of the short one would draw.
    given = {"lr_scheduler_type": "constant", "eval_strategy": "no"}
    short = life(tmp_path / "longer", tmp_path / "out", max_steps=5, **given)
    assert short.state.global_step == 5
    longer = life(tmp_path / "longer", tmp_path / "out", max_steps=9, **given)
    straight = life(tmp_path / "straight", tmp_path / "out", max_steps=9, **given)
    assert longer.state.global_step == 9
    assert result(longer)["weights"] == result(straight)["weights"]


def test_logs_that_are_no_numbers_come_back(tmp_path):
    trainer = make(tmp_path / "ckpt", tmp_path / "out")
    state = trainer._lastgood._state
    trainer._tr_loss, trainer._globalstep_last_logged = torch.tensor(0.25), 4
    trainer.state.log_history = [{"loss": float("nan"), "norm": float("inf"), "step": 3, "note": "a", "rate": 0.1}]
    saved = state.state_dict()
    saved["loss"] = saved["loss"].clone()
    trainer.state.log_history = []
    state.load_state_dict(saved)
    assert str(trainer.state.log_history) == "[{'loss': nan, 'norm': inf, 'step': 3, 'note': 'a', 'rate': 0.1}]"
    assert trainer._total_loss_scalar == -0.25


@pytest.fixture
def own_sigterm():
    """A Trainer with enable_jit_checkpoint takes SIGTERM when it is made."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_sigterm")
@follows("TrainingArguments({}=True)")
def test_arguments_whose_meaning_would_be_lost(tmp_path):
    for name in ("auto_find_batch_size", "enable_jit_checkpoint", "ignore_data_skip"):
        message = refusal(lambda name=name: make(tmp_path / "a", tmp_path / "out", **{name: True}))
        assert advice(message, r"TrainingArguments\((\w+)=True\)") == name
    make(tmp_path / "a", tmp_path / "out")


@follows("call train() without it", "leave use_lastgood out of a search")
def test_another_resume_is_refused(tmp_path):
    trainer = make(tmp_path / "a", tmp_path / "out", max_steps=2)
    for given in (True, "checkpoint-3"):
        message = refusal(lambda given=given: trainer.train(resume_from_checkpoint=given))
        assert str(tmp_path / "a") in message
    refusal(lambda: trainer.train(trial={"a": 1}))
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == 2


def test_folders_and_second_calls_are_refused(tmp_path):
    from accelerate import Accelerator

    from lastgood.integrations.huggingface import use_lastgood

    with pytest.raises(ConfigError, match=r"out is the Trainer's output_dir.*a folder of its own, as .*out/lastgood"):
        make(tmp_path / "out", tmp_path / "out")
    trainer = make(tmp_path / "out" / "lastgood", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"this Trainer has a checkpointer in .*out/lastgood already"):
        use_lastgood(trainer, tmp_path / "b")
    with pytest.raises(ConfigError, match=r"a Accelerator is no transformers.Trainer; .*integrations.accelerate"):
        use_lastgood(Accelerator(cpu=True), tmp_path / "c")
    with pytest.raises(ConfigError, match="interval_steps must not be negative"):
        make(tmp_path / "d", tmp_path / "out", lastgood={"interval_steps": -1})


@follows("choose data_changed='samples' to go on from this place all the same")
def test_changes_in_the_middle_of_an_epoch(tmp_path):
    life(tmp_path / "a", tmp_path / "out", until=3, gradient_accumulation_steps=2)
    changed = {"gradient_accumulation_steps": 1, "max_steps": 4}
    message = refusal(lambda: life(tmp_path / "a", tmp_path / "out", **changed))
    assert "an update was made of 2 batches, and now it is made of 1" in message
    choice = advice(message, r"data_changed='(\w+)'")
    life(tmp_path / "a", tmp_path / "out", lastgood={"data_changed": choice}, **changed)
    with pytest.raises(MismatchError, match="batch size 3 before, 4 now"):
        life(tmp_path / "b", tmp_path / "out", until=3)
        life(tmp_path / "b", tmp_path / "out", per_device_train_batch_size=4)


def test_a_checkpoint_of_another_framework_is_told(tmp_path):
    from lastgood import PCcheck

    model = Small()
    other = PCcheck(tmp_path / "a", interval_steps=1)
    other.attach(model=model, optimizer=torch.optim.AdamW(model.parameters()), accelerate={"step": 3})
    other.step()
    other.close()
    with pytest.raises(MismatchError, match="it was not made under huggingface, whose counts and callbacks it lacks"):
        life(tmp_path / "a", tmp_path / "out")


@follows("cannot be imported ({}); pip install 'lastgood[{}]'")
@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_package_that_is_missing(package, monkeypatch, tmp_path):
    trainer = make(None, tmp_path / "out")
    from lastgood.integrations.huggingface import use_lastgood

    with monkeypatch.context() as without:
        without.setitem(sys.modules, package, None)
        message = refusal(lambda: use_lastgood(trainer, tmp_path / "a"))
    assert package in packages_of(advice(message, r"pip install 'lastgood\[(\w+)\]'"))


def test_another_version_is_told_once_and_another_interface_refused(monkeypatch, caplog):
    monkeypatch.setattr(frameworks, "_warned", set())
    with caplog.at_level(logging.WARNING, "lastgood"):
        for version in ("5.24.3", "5.25.0", "6.0.0"):
            frameworks.warn_if_untried("transformers", version, ("5.20", "5.24"))
    assert len(caplog.records) == 1
    assert "transformers 5.25.0 is installed" in caplog.text and "tried: 5.20 to 5.24" in caplog.text

    class Other:
        def train(self, resume):
            """Of another interface."""

    with pytest.raises(ConfigError, match=r"9.0 is installed, and Other.train has no resume_from_checkpoint: .*5.20"):
        frameworks.check_methods(Other, {"train": ["resume_from_checkpoint"]}, "9.0", ("5.20", "5.24"))
    with pytest.raises(ConfigError, match=r"Other\.evaluate is missing"):
        frameworks.check_methods(Other, {"evaluate": []}, "9.0", ("5.20", "5.24"))
