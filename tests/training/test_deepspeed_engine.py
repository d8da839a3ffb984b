"""When an update begins inside another library's step. Runs: experiments/multirank/test_partitioned.py."""

from __future__ import annotations

import pytest
import torch

from lastgood.errors import ConfigError, LastgoodError
from lastgood.training.deepspeed_engine import _Update, cut_into_stages
from lastgood.workloads.base import Batch, BatchStream, Workload


class Points(BatchStream):
    def batch(self, index: int) -> Batch:
        return {"x": torch.full((1, 1), float(index))}


def test_an_update_is_told_once_before_any_weight_changes() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    update = _Update(optimizer)
    seen: list[float] = []
    for number in range(2):
        weight.grad = torch.ones(1)
        with update.expected(lambda: seen.append(float(weight.detach()))):
            optimizer.step()
            optimizer.step()  # as with several groups of parameters
        assert seen == [0.0, -2.0][: number + 1]
    optimizer.step()  # outside a step nobody is told
    assert len(seen) == 2


def test_an_update_that_is_left_out_is_an_error() -> None:
    update = _Update(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    with pytest.raises(LastgoodError, match="left an update out"), update.expected(lambda: None):
        pass
    with pytest.raises(ValueError, match="its own"), update.expected(lambda: None):
        raise ValueError("its own")


def test_a_pipeline_refuses_a_model_that_casts() -> None:
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    workload = Workload("opt", layer, optimizer, Points(), lambda batch: layer(batch["x"]), {}, precision="bfloat16")
    with pytest.raises(ConfigError, match=r"^opt: a pipeline trains in float32; leave the option precision out$"):
        cut_into_stages(workload, 2, 1, "cpu")
