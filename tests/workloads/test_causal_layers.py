"""A causal model cut into layers computes what transformers' whole one does, to the bit, and so do its gradients."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from lastgood.errors import ConfigError
from lastgood.workloads.base import Workload
from lastgood.workloads.causal_layers import causal_layers
from lastgood.workloads.registry import build_workload, workload_options_class
from tests.workloads.tiny_options import TINY


def built(name: str, size: int, data_dir: Path, **more: str) -> Workload:
    options = workload_options_class(name).model_validate({**TINY[name][size], **more})
    return build_workload(name, options, data_dir=data_dir, data_path=None, seed=5, device="cpu")


@pytest.mark.parametrize(
    ("name", "more"), [("opt", {}), ("opt", {"attention": "sdpa"}), ("bloom", {})], ids=["opt", "opt-sdpa", "bloom"]
)
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_one_after_another_are_the_model(
    name: str, more: dict[str, str], size: int, training: bool, data_dir: Path
) -> None:
    workload = built(name, size, data_dir, **more)
    workload.model.train(training)
    batch = workload.data.batch(3)
    torch.manual_seed(1)  # dropout
    # Before transformers 5.24 OPT draws a number for each layer that it might drop.
    with mock.patch.object(torch, "rand", lambda *_: torch.ones(())):
        loss = workload.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in workload.model.named_parameters()}
    workload.optimizer.zero_grad(set_to_none=True)

    cut = causal_layers(workload.model)
    torch.manual_seed(1)
    hidden = cut.embedding(batch["input_ids"])
    for layer in cut.layers:
        hidden = layer(hidden)
    again = cut.loss(cut.head(cut.embedding, hidden), batch["input_ids"])
    again.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(loss, again)
    for path, parameter in workload.model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, gradients[path]), path
    # All parameters are in the cut, each in one layer; what both ends share is the embedding.
    layers = [parameter for layer in cut.layers for parameter in layer.parameters()]
    assert {id(one) for one in [*layers, *cut.embedding.parameters()]} == set(map(id, workload.model.parameters()))
    assert len(layers) == len({id(one) for one in layers})


def test_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a Linear cannot be cut .* known: OPTForCausalLM, BloomForCausalLM"):
        causal_layers(torch.nn.Linear(1, 1))
