"""Generators of a state."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import MismatchError
from lastgood.state import RngState, state_digest


class Cuda:
    """torch.cuda of a new process: a seed waits until it is in use. Its devices' generators are the CPU's kind."""

    def __init__(self, patch, devices=2, seed=5, current=0):
        self.generators = ()
        self.devices = devices
        self.current = current
        self.patch = patch
        for name in ("is_initialized", "device_count", "init", "manual_seed_all", "set_rng_state", "current_device"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "default_generators", ())
        torch.manual_seed(seed)

    def is_initialized(self):
        return self.generators != ()

    def device_count(self):
        return self.devices

    def init(self):
        if not self.generators:
            self.generators = tuple(torch.Generator().manual_seed(self.waiting) for _ in range(self.devices))
            self.patch.setattr(torch.cuda, "default_generators", self.generators)

    def manual_seed_all(self, seed):
        self.waiting = seed
        for generator in self.generators:
            generator.manual_seed(seed)

    def set_rng_state(self, state, device):
        assert self.generators, "torch would only note it for later"
        self.generators[self.current if device == "cuda" else device].set_state(state)

    def current_device(self):
        return self.current

    def draw(self, device):
        self.init()
        return torch.rand(1, generator=self.generators[device]).item()


def digest():
    return state_digest({"rng": RngState()})


def test_the_first_use_of_cuda_changes_no_state(monkeypatch):
    cuda = Cuda(monkeypatch)
    before = digest()
    assert not cuda.is_initialized(), "looking at it is no use of it"
    cuda.init()
    assert digest() == before
    cuda.draw(1)
    assert digest() != before
    torch.manual_seed(5)
    assert digest() == before


def test_only_devices_that_were_drawn_on_must_be_there(monkeypatch):
    Cuda(monkeypatch).draw(0)
    saved = RngState().state_dict()
    Cuda(monkeypatch, devices=1)
    RngState().load_state_dict(saved)
    Cuda(monkeypatch).draw(1)
    saved = RngState().state_dict()
    Cuda(monkeypatch, devices=1)
    with pytest.raises(MismatchError, match="generators of 2 CUDA devices, this machine has 1"):
        RngState().load_state_dict(saved)


def test_a_rank_keeps_the_generator_of_its_own_device(monkeypatch):
    """Ranks on one host draw on a device each, in the same order: their states are equal, and go on anywhere."""
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    states, following = [], []
    for device in (0, 1):
        cuda = Cuda(monkeypatch, current=device)
        cuda.draw(device)
        states.append((digest(), RngState().state_dict()))
        following.append(cuda.draw(device))
    assert states[0][0] == states[1][0]
    assert following[0] == following[1]
    cuda = Cuda(monkeypatch, devices=4, current=3)
    cuda.draw(0)
    RngState().load_state_dict(states[1][1])
    assert digest() == states[1][0]
    assert cuda.draw(3) == following[0]


ACTIONS = st.lists(
    st.sampled_from(["begin", "seed 6", "seed 7", "seed cuda", "draw on cpu", "draw on 0", "draw on 1"]), max_size=6
)


def act(cuda, actions):
    for action in actions:
        if action == "begin":
            cuda.init()
        elif action == "seed cuda":
            cuda.init()
            cuda.manual_seed_all(9)
        elif action.startswith("seed"):
            torch.manual_seed(int(action[-1]))
        elif action == "draw on cpu":
            torch.rand(1)
        else:
            cuda.draw(int(action[-1]))


@settings(max_examples=100, deadline=None)
@given(before=ACTIONS, there=ACTIONS)
def test_generators_go_on_whatever_both_processes_did_with_cuda(before, there):
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda(patch)
        act(cuda, before)
        saved, digest_saved = RngState().state_dict(), digest()
        expected = [cuda.draw(0), cuda.draw(1), torch.rand(1).item()]
        cuda = Cuda(patch, seed=8)
        act(cuda, there)
        RngState().load_state_dict(saved)
        assert digest() == digest_saved
        assert [cuda.draw(0), cuda.draw(1), torch.rand(1).item()] == expected


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
    torch.manual_seed(3)
    torch.cuda.init()
    torch.cuda.manual_seed_all(7)
    torch.rand(1, device="cuda")
    torch.save(RngState().state_dict(), tmp_path / "rng")
    command = [sys.executable, "-c", _IN_A_NEW_PROCESS, str(tmp_path / "rng")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


_FIRST_USE = """
import torch
from lastgood.state import RngState, state_digest

def digest():
    return state_digest({"rng": RngState()})

torch.manual_seed(5)
saved, before = RngState().state_dict(), digest()
assert not torch.cuda.is_initialized()
torch.cuda.current_stream()  # as DCP's writer of files does
assert torch.cuda.is_initialized()
assert digest() == before, (saved["cuda"], RngState().state_dict()["cuda"])
expected = torch.rand(3, device="cuda")
assert digest() != before
torch.manual_seed(6)
torch.rand(1, device="cuda")
RngState().load_state_dict(saved)
assert digest() == before
assert torch.equal(torch.rand(3, device="cuda"), expected)
"""


@pytest.mark.gpu
def test_the_first_use_of_a_real_device_changes_no_state():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    done = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
