"""Ranks of DeepSpeed trainings whose steps are kept by Checkmate's shadows: works of deepspeed_rank.py."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from deepspeed_training import Training

from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.errors import ConfigError
from lastgood.integrations.deepspeed_live import EngineCounters, LiveZero
from lastgood.state import state_digest

DOCUMENTED = Path(__file__).parents[2] / "docs" / "deepspeed.md"


class Shadowed:
    """A training, its live parts, and what it was behind each step."""

    def __init__(self, asked):
        self.training = Training(**asked)
        self.engine = self.training.engine
        self.live = LiveZero(self.engine) if asked["stage"] else None
        self.parts = {"scheduler": self.engine.lr_scheduler, "engine": EngineCounters(self.engine)}
        if self.live is None:
            self.parts |= {"model": self.engine.module, "optimizer": self.engine.optimizer}
        else:
            self.parts |= {"model": self.live.weights, "optimizer": self.live.optimizer}
        self.losses, self.digests = {}, {}

    def step(self):
        """One step of the optimizer; its number."""
        losses = self.training.train(1)
        if self.live is not None:
            self.live.settle()
        number = self.engine.global_steps
        self.losses[number] = losses
        self.digests[number] = self.digest()
        return number

    def digest(self):
        return state_digest({**self.parts, "derived": derived_of(self.live)})

    def found(self):
        return {"losses": self.losses, "digests": self.digests}


def derived_of(live):
    """The model's own weights; of ZeRO 3 the parts: DeepSpeed 0.17 may still be gathering what is kept whole."""
    tensors = {} if live is None else live.model_tensors()
    parts = {name: tensor for name, tensor in tensors.items() if name.endswith(" part")}
    return parts or tensors


def kept_by_shadows(rank, asked):
    """First the training without Checkmate; then another one with it, until it is killed at any instant."""
    plain = Shadowed(asked)
    for _ in range(asked["steps"]):
        plain.step()
    shadowed = Shadowed(asked)
    checkpointer = Checkmate(asked["job"], **asked["knobs"])
    checkpointer.start(shadowed.parts)
    for _ in range(asked["sure"]):
        checkpointer.save(shadowed.step())
    checkpointer.drain(120)
    yield {
        "plain": plain.found(),
        "kept": shadowed.found(),
        "outcomes": [event.outcome.value for event in checkpointer.events],
        "errors": [event.error for event in checkpointer.events if event.error],
        "facts": checkpointer.storage_facts(),
    }
    torch.distributed.barrier()
    delay_s = random.Random(1000 * asked["seed"] + rank).uniform(0.0, asked["within_s"])
    threading.Thread(target=lambda: (time.sleep(delay_s), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    with suppress(RuntimeError):  # of torch, where the other rank is gone first
        while shadowed.engine.global_steps < asked["steps"] - 3:
            checkpointer.save(shadowed.step())
    time.sleep(600)  # its own SIGKILL comes before


def restored_from_shadows(rank, asked):
    """In fresh processes: what shadows hold, and how it goes on."""
    shadowed = Shadowed(asked)
    shadowed.step()  # what it has made by itself must not matter
    checkpointer = Checkmate(asked["job"], **asked["knobs"])
    restored = checkpointer.restore(shadowed.parts)
    shadowed.losses, shadowed.digests = {}, {restored: shadowed.digest()}
    checkpointer.start(shadowed.parts)
    for _ in range(3):
        checkpointer.save(shadowed.step())
    checkpointer.drain(120)
    yield {
        "restored": restored,
        **shadowed.found(),
        "outcomes": [event.outcome.value for event in checkpointer.events],
        "errors": [event.error for event in checkpointer.events if event.error],
        "facts": checkpointer.storage_facts(),
    }
    checkpointer.close()


def as_documented(rank, asked):
    """The example of docs/deepspeed.md, word by word, but for its addresses and its end; then a kill."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENTED.read_text(), flags=re.DOTALL)
    (code,) = [block for block in blocks if "Checkmate(" in block]
    for word, other in (
        ('["10.0.0.7:7000"]', repr(asked["knobs"]["shadows"])),
        ('"token"', repr(asked["knobs"]["token_file"])),
        ('"job1"', repr(asked["job"])),
        ("1000", str(asked["steps"])),
    ):
        assert code.count(word) == 1, word
        code = code.replace(word, other)
    plain = Shadowed(asked)
    for _ in range(asked["steps"]):
        plain.step()
    training = Training(**asked)
    begun = []

    def micro_batches(step):
        begun.append(step)
        return [training.batch(2 * step), training.batch(2 * step + 1)]

    names = {"engine": training.engine, "micro_batches": micro_batches}
    exec(code, names)
    digest = state_digest({**names["parts"], "derived": derived_of(names["live"])})
    outcomes = [event.outcome.value for event in names["checkpointer"].events]
    loss = float(names["loss"].detach()).hex()
    yield {"begun": begun, "digest": digest, "loss": loss, "outcomes": outcomes, "plain": plain.found()}
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def refused_by_checkmate(rank, asked):
    """What Checkmate says of DeepSpeed's optimizers that it cannot follow."""
    said = []
    for kind in ({"stage": 2}, {"stage": 0, "precision": "bf16"}):
        engine = Training(**kind).engine
        try:
            Checkmate(asked["job"], **asked["knobs"]).start({"model": engine.module, "optimizer": engine.optimizer})
        except ConfigError as error:
            said.append(str(error))
    engine = Training(stage=2).engine
    engine.optimizer.cpu_offload = True
    try:
        LiveZero(engine)
    except ConfigError as error:
        said.append(str(error))
    yield said


SHADOWED_WORKS = {
    one.__name__: one for one in (kept_by_shadows, restored_from_shadows, as_documented, refused_by_checkmate)
}
