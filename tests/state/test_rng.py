"""Generators of a state."""

from __future__ import annotations

import subprocess
import sys

import pytest
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


_IN_A_NEW_PROCESS = """
import sys, torch
from lastgood.state import RngState
saved = torch.load(sys.argv[1])
assert not torch.cuda.is_initialized()
RngState().load_state_dict(saved)
again = RngState().state_dict()["cuda"]
assert len(again) == len(saved["cuda"]) and all(map(torch.equal, again, saved["cuda"])), again
"""


@pytest.mark.gpu
def test_generators_of_devices_are_there_before_anything_else_uses_cuda(tmp_path):
    torch.cuda.init()
    torch.cuda.manual_seed_all(7)
    torch.save(RngState().state_dict(), tmp_path / "rng")
    command = [sys.executable, "-c", _IN_A_NEW_PROCESS, str(tmp_path / "rng")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
