"""States on a CUDA device: through the page-locked pool, and back into tensors on the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lastgood.checkpointers.ranks import box_reader
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def state_of(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    weights = torch.randn(3000, 2001, device="cuda", generator=generator)
    return {
        "weights": weights,
        "slice": weights[5:900, ::7],
        "half": weights[:37].bfloat16(),
        "host": torch.arange(100_003),
        "scalar": torch.tensor(2.5, device="cuda"),
        "empty": torch.zeros(0, 3, device="cuda"),
        "step": seed,
    }


def emptied(state):
    return {name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for name, one in state.items()}


def same(first, second):
    return all(
        torch.equal(one, second[name]) if isinstance(one, torch.Tensor) else one == second[name]
        for name, one in first.items()
    )


@pytest.mark.parametrize("layout", ["lastgood", "dcp"])
@pytest.mark.parametrize("pool_bytes", [1 << 20, 256 << 20])
def test_a_state_on_a_device_comes_back_to_the_bit(tmp_path, layout, pool_bytes):
    state = state_of(3)
    dcp.save(state, storage_writer=LastgoodWriter(tmp_path / "step-1", layout=layout, pool_bytes=pool_bytes))
    into = emptied(state)
    dcp.load(into, storage_reader=LastgoodReader(tmp_path / "step-1"))
    assert into["weights"].is_cuda
    assert same(state, into)
    assert not same(state, emptied(state) | {"step": 3})


def test_what_the_device_has_queued_before_a_save_is_saved(tmp_path):
    """The copies run after what is on the stream on which the training runs."""
    state = {"weights": torch.zeros(4000, 4000, device="cuda")}
    for _ in range(200):
        state["weights"].add_(torch.ones_like(state["weights"]) @ torch.full((4000, 1), 1 / 4000, device="cuda"))
    dcp.save(state, storage_writer=LastgoodWriter(tmp_path / "step-1"))
    into = {"weights": torch.zeros(4000, 4000)}
    dcp.load(into, storage_reader=LastgoodReader(tmp_path / "step-1"))
    assert torch.equal(into["weights"], state["weights"].cpu())


def test_async_save_takes_a_state_on_a_device(tmp_path):
    state = state_of(4)
    dcp.async_save(state, storage_writer=LastgoodWriter(tmp_path / "step-1")).result(60)
    into = emptied(state)
    dcp.load(into, storage_reader=LastgoodReader(tmp_path / "step-1"))
    assert same(state, into)


def test_a_state_of_many_windows_comes_back_to_the_device(tmp_path, monkeypatch):
    """The next window is read while one is copied to the device."""
    monkeypatch.setattr(box_reader, "_WINDOW_BYTES", 5 << 20)
    state = state_of(4)
    dcp.save(state, storage_writer=LastgoodWriter(tmp_path / "step-1"))
    into = emptied(state)
    dcp.load(into, storage_reader=LastgoodReader(tmp_path / "step-1"))
    assert same(state, into)
