"""A kept capture of a real DDP training through all stages, without root: the node holds its state, to the bit."""

from __future__ import annotations

import contextlib
import lzma
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lastgood import FlowCheck
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.mirror.capture.files import CaptureFile
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.factory import Training
from lastgood.mirror.node.node import MirrorNode
from lastgood.mirror.node.settings import NodeSettings
from lastgood.mirror.node.stages import local_stages
from lastgood.mirror.node.status import read_status
from tests.mirror.support.training import make
from tests.support.patience import wait_until

pytestmark = pytest.mark.timeout(120)
SAMPLES = Path(__file__).parents[1] / "samples"
HELD = 3
"""Of four steps: the buffers of the last one come with a fifth."""


def truth_after(truth, steps):
    """The training's model and optimizer, made of its first weights and its reduced gradients."""
    model, optimizer, _ = make()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(torch.from_numpy(truth[f"init.{name}"]))
    for step in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(truth[f"grad.{step}.{name}"]) if parameter.requires_grad else None
        optimizer.step()
    return model, optimizer


@contextlib.contextmanager
def node_of(ranks, folder, watched="10.77.0.1"):
    (folder / "capture.pcap").write_bytes(lzma.decompress((SAMPLES / f"gloo-{ranks}.pcap.xz").read_bytes()))
    model, optimizer, _ = make()
    job = describe(Training(model, optimizer), ranks=ranks)
    settings = NodeSettings(bucket_bytes=1000)
    node = MirrorNode(
        job,
        folder / "node",
        local_stages(CaptureFile(folder / "capture.pcap"), job, [watched], settings),
        token_file=folder / "token",
        settings=settings,
        shadow=ShadowSettings(0, 1),
    )
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    try:
        yield node
    finally:
        node.stop()
        thread.join(60)
        node.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_capture_becomes_the_state_of_its_training(ranks, tmp_path):
    truth = np.load(SAMPLES / f"gloo-{ranks}.npz")
    with node_of(ranks, tmp_path) as node:
        wait_until(lambda: node.status().iteration == 4 and node.status().held == (HELD,), lambda: node.status(), 60)
        status = node.status()
        assert status.stands == "follows" and ("10.77.0.1", 0) in status.ranks
        assert status.counters["extract"].get("gone", 0) == 0
        # A stage counts what it has done when it has done it, after others see what came of that.
        stages = ("parse", "extract", "node")
        wait_until(
            lambda: all(node.status().counters[stage]["seconds"] > 0 for stage in stages),
            lambda: node.status().counters,
            60,
        )
        wait_until(lambda: node.status().counters["update"]["steps"] == HELD, lambda: node.status().counters, 60)
        assert node.status().counters["update"]["seconds"] > 0
        model, optimizer, _ = make()
        checkpointer = FlowCheck(tmp_path / "job", nodes=[node.address], token_file=str(tmp_path / "token"))
        assert checkpointer.restore({"model": model, "optimizer": optimizer}) == HELD
    wanted, stepped = truth_after(truth, HELD)
    for name, value in wanted.state_dict().items():
        if "norm.running" in name or "num_batches" in name:
            value = torch.from_numpy(truth[f"after.{HELD - 1}.{name}"])
        assert torch.equal(model.state_dict()[name], value), name
    for index, state in stepped.state_dict()["state"].items():
        assert torch.equal(optimizer.state_dict()["state"][index]["momentum_buffer"], state["momentum_buffer"])
    assert read_status(tmp_path / "node").stands == "ended"


def test_another_host_than_the_one_that_is_watched_is_said(tmp_path):
    with node_of(2, tmp_path, watched="10.77.0.9") as node:
        wait_until(lambda: node.status().blind, lambda: node.status(), 60)
        assert "10.77.0.9 is watched" in node.status().blind and node.status().held == ()
