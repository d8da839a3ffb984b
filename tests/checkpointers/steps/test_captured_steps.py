"""Optimizer steps in a CUDA graph, whose replays run no hooks."""

from __future__ import annotations

import pytest
import torch

from lastgood import PCcheck
from lastgood.errors import CheckpointError
from tests.suggestions.following import advice, follows, hear


@pytest.mark.gpu
@follows("capture before start(), and call before_update() yourself before each replay")
def test_steps_that_are_captured_and_replayed(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), 0.1, capturable=True)
    inputs = torch.ones(8, 512, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)

    checkpointer = PCcheck(tmp_path / "late", interval_steps=0)
    checkpointer.attach(model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError) as error, torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
    message = hear(str(error.value))
    checkpointer.close()

    advice(message, r"capture before start\(\)")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    checkpointer = PCcheck(tmp_path / "early", interval_steps=1)
    checkpointer.attach(model=model, optimizer=optimizer)
    call = advice(message, r"call (before_update\(\)) yourself")
    for _ in range(5):
        eval(f"checkpointer.{call}", {"checkpointer": checkpointer})
        graph.replay()
        checkpointer.step()
        inputs.mul_(1.1)
    kept = model.weight.detach().clone()
    eval(f"checkpointer.{call}", {"checkpointer": checkpointer})
    graph.replay()
    checkpointer.drain()
    assert checkpointer.latest() == 5
    checkpointer.close()
    assert not torch.equal(model.weight, kept)
    again = PCcheck(tmp_path / "early", interval_steps=1)
    assert again.attach(model=model, optimizer=optimizer) == 5
    assert torch.equal(model.weight, kept)
    again.close()
