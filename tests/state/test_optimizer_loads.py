"""An optimizer's state comes back to the bit, also what torch's load_state_dict would cast or cannot rebuild."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch

from lastgood.state import apply_tree, flatten, state_digest
from tests.state.support.trees import a_tree


class Nested(torch.optim.Optimizer):
    """Keeps what SOAP and Shampoo keep: lists of fp32 preconditioners, numbers, texts, arrays."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.state[parameter] = {
                    "step": torch.tensor(3.0),
                    "GG": [torch.full((2, 2), 1 / 3), [], (torch.full((1,), 1 / 7, dtype=torch.float64),)],
                    "seen": [torch.tensor([2**24 + 1 + number])],
                    "big": torch.tensor(2**53 + 1),
                    "flag": torch.tensor([True, False]),
                    "mode": "warmup",
                    "raw": b"\x00\xff",
                    "array": np.array([1.5, np.nan], dtype=np.float32),
                    "deep": {"step": torch.tensor(5), "Q": OrderedDict(a=torch.full((2,), 1 / 3))},
                    "none": None,
                    "sizes": torch.Size([2, 3]),
                    "half": torch.full((2,), 1 / 3, dtype=torch.float16),
                    "kinds": {torch.float32},
                }


class Overrides(Nested):
    """Its own load_state_dict looks at what it gets, and calls torch's."""

    def load_state_dict(self, state_dict):
        assert state_dict["state"][0]["mode"] == "warmup"
        self.looked = True
        super().load_state_dict(state_dict)


class Hooked(Nested):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.register_load_state_dict_pre_hook(lambda _, state: setattr(self, "looked", list(state["state"])))


def make(kind):
    model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    return {"model": model, "optimizer": kind(model.parameters())}


def shape_of(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return type(value), {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(item) for item in value]
    return type(value)


@pytest.mark.parametrize("kind", [Nested, Overrides, Hooked])
@pytest.mark.parametrize("stepped", [False, True])
def test_nested_state_comes_back_to_the_bit(kind, stepped):
    saved, live = make(kind), make(kind)
    saved["optimizer"].step()
    if stepped:
        live["optimizer"].step()
    apply_tree(live, *a_tree(saved)[:1], "here", a_tree(saved)[1])
    assert state_digest(live) == state_digest(saved)
    pairs = zip(live["model"].parameters(), saved["model"].parameters(), strict=True)
    for ours, theirs in pairs:
        assert shape_of(live["optimizer"].state[ours]) == shape_of(saved["optimizer"].state[theirs])
    assert kind is Nested or live["optimizer"].looked


def test_nested_tensors_of_an_optimizer_are_deferred():
    state = make(Nested)
    state["optimizer"].step()
    flat = flatten(state)
    deferred = {block.data_ptr() for block in flat.blocks[: flat.layout.deferred_blocks]}
    entry = state["optimizer"].state[state["model"].weight]
    assert {entry["GG"][0].data_ptr(), entry["GG"][2][0].data_ptr(), entry["deep"]["Q"]["a"].data_ptr()} <= deferred


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_as_if_never_stopped(name, dtype):
    kind = getattr(torch.optim, name)
    sparse, matrices = name == "SparseAdam", name == "Muon"

    def training():
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 4, sparse=True) if sparse else torch.nn.Linear(4, 4, bias=not matrices)
        model = model.to(dtype)
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.01)}

    def step(state, number):
        torch.manual_seed(number)
        inputs = torch.randint(0, 6, (3,)) if sparse else torch.randn(3, 4).to(dtype)

        def closure():
            state["optimizer"].zero_grad()
            loss = state["model"](inputs).float().square().sum()
            loss.backward()
            return loss

        return state["optimizer"].step(closure)

    if dtype is torch.bfloat16 and name in ("LBFGS", "Adafactor", "SparseAdam"):
        pytest.skip(f"{name} does not train {dtype} everywhere")
    saved, live = training(), training()
    for number in range(3):
        step(saved, number)
    tree, objects = a_tree(saved)
    apply_tree(live, tree, "here", objects)
    assert state_digest(live) == state_digest(saved)
    for number in range(3, 5):
        step(saved, number)
        step(live, number)
    assert state_digest(live) == state_digest(saved)
