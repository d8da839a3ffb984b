"""When an update begins inside another library's step. Runs: experiments/multirank/test_partitioned.py."""

from __future__ import annotations

import pytest
import torch

from lastgood.errors import LastgoodError
from lastgood.training.deepspeed_engine import _Update


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
