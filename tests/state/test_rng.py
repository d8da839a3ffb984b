"""Generators of a state."""

from __future__ import annotations

import torch

from lastgood.state import RngState


def test_a_generator_s_state_may_lie_anywhere_in_a_larger_piece_of_memory():
    torch.manual_seed(5)
    saved = RngState().state_dict()
    expected = torch.rand(3)
    memory = torch.full((256 + saved["torch"].numel(),), 255, dtype=torch.uint8)
    place = memory[128 : 128 + saved["torch"].numel()]
    place.copy_(saved["torch"])
    RngState().load_state_dict({**saved, "torch": place})
    assert torch.equal(torch.rand(3), expected)
