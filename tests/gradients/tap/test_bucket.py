"""DDP's hook, on one rank: when the memory of reduced buckets is lent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.tap.bucket import BucketTap, TapContext
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.updates import UpdateNotes
from lastgood.optim.spec import OptimizerSpec
from tests.gradients.support.data_links import SETTINGS, connected
from tests.gradients.support.ddp_bucket import Bucket


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("forward", [True, False], ids=["the model was called", "its forward() was called"])
def test_memory_that_may_have_been_overwritten_while_it_was_sent_is_not_trusted(
    forward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    link, far = connected(SETTINGS)
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state = {"optimizer": optimizer}
    spec = OptimizerSpec.of(optimizer)
    layout = plan_layout([("p", (100,), "float32")], spec.to_data(), ranks=1, shadows=1)
    stream = GradientStream(layout, [link], 0, lambda: None)
    tracked = TrackedParameters(state)
    notes = UpdateNotes(state, tracked, spec, reduced=True)
    context = TapContext(stream, tracked, notes, 0, 1, "balanced", True, 100, None)
    tap = BucketTap()
    tap.open(context)
    faults = []
    try:
        for _ in range(3):
            tap.reduce(Bucket(0, [parameter], last=True)).wait()
            faults.append(stream.fault)
            stream.phase = "closed"
            if forward:
                tap.settle()
    finally:
        link.close()
        far.close()
    if forward:
        assert faults == [None] * 3 and context.borrow
    else:
        assert faults[0] is None and faults[1] is not None and faults[2] is None, "once: they are copied from then on"
        assert "call the model itself" in faults[1] and "call the model itself" in caplog.text
