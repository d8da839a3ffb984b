"""What a training has for a checkpoint's tensors, whose names may be anybody's."""

from __future__ import annotations

import pytest
import torch

from lastgood.checkpointers.slots.live_tensors import parameter_beside


@pytest.mark.parametrize("number", ["²", "٣", "1", "9" * 5000, "-1", "", "0x0", "00000000000"])
def test_a_number_that_is_no_parameters_finds_none(number):
    optimizer = torch.optim.SGD([torch.zeros(3)])
    assert parameter_beside(optimizer, "optimizer", f"optimizer.state.{number}.exp_avg", (3,)) is None


def test_the_parameter_that_a_state_tensor_belongs_to():
    parameters = [torch.zeros(3), torch.zeros(2, 2)]
    optimizer = torch.optim.SGD(parameters)
    assert parameter_beside(optimizer, "a.b", "a.b.state.1.exp_avg", (2, 2)) is parameters[1]
    assert parameter_beside(optimizer, "a.b", "a.b.state.1.exp_avg", (4,)) is None
    assert parameter_beside(optimizer, "a.b", "a.b.state.1", (2, 2)) is None
    assert parameter_beside(None, "a.b", "a.b.state.1.exp_avg", (2, 2)) is None
