"""Trainings of other kinds than module and optimizer alone, ended after any step: they go on as if never stopped."""

from __future__ import annotations

import pytest
import torch

from lastgood import PCcheck

STEPS = 7


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))


class Plain:
    """One optimizer; `make` takes its parameters."""

    def __init__(self, make, frozen=False, closure=False, averaged=None):
        self.model = model()
        if frozen:  # as with adapters: what is trained is little, and the rest is there all the same
            self.model[0].requires_grad_(False)
        self.optimizer = make([one for one in self.model.parameters() if one.requires_grad])
        self.closure = closure
        self.averaged = None if averaged is None else torch.optim.swa_utils.AveragedModel(self.model, **averaged)

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "averaged": self.averaged}

    def step(self, number):
        batch = torch.rand(5, 3, generator=torch.Generator().manual_seed(number))

        def loss_of():
            self.optimizer.zero_grad()
            loss = (self.model(batch) - batch.mean()).square().mean()
            loss.backward()
            return loss

        if self.closure:
            loss = self.optimizer.step(loss_of)
        else:
            loss = loss_of()
            self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
            return float(loss), float(self.averaged(batch).sum())
        return float(loss), 0.0


def adam(**more):
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.05, **more)


def ema(averaged, current, count):
    return 0.9 * averaged + 0.1 * current


KINDS = {
    "closure of LBFGS": lambda: Plain(
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, history_size=3), closure=True
    ),
    "line search of LBFGS": lambda: Plain(
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe"), closure=True
    ),
    "average": lambda: Plain(adam(), averaged={"use_buffers": True}),
    "exponential average": lambda: Plain(adam(), averaged={"avg_fn": ema}),
    "foreach": lambda: Plain(adam(foreach=True)),
    "fused": lambda: Plain(adam(fused=True)),
    "frozen weights": lambda: Plain(adam(), frozen=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_never_stopped(kind, tmp_path):
    """A life for each two steps; what one begins with is made for it."""
    torch.manual_seed(1)
    training = KINDS[kind]()
    straight = [training.step(number) for number in range(STEPS)]
    seen = []
    for _ in range(0, STEPS, 2):
        torch.manual_seed(1)
        training = KINDS[kind]()
        checkpointer = PCcheck(tmp_path, interval_steps=1, chunk_bytes=4096)
        try:
            began = checkpointer.attach(**training.parts())
            assert began == len(seen)
            for number in range(began, min(began + 2, STEPS)):
                seen.append(training.step(number))
                checkpointer.step()
                checkpointer.drain()
            assert {event.outcome.value for event in checkpointer.events} == {"durable"}, checkpointer.events
        finally:
            checkpointer.close()
    assert seen == straight
