"""Memory of gradients on their way from a device. No GPU is here, so none of it is page-locked."""

from __future__ import annotations

import pytest
import torch

from lastgood.gradients.device_mover import DeviceMover
from lastgood.gradients.layout import plan_layout
from lastgood.gradients.stream import GradientStream


def test_memory_that_the_system_refuses_is_not_counted_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else every gradient behind it would wait for room that nobody gives back, and be left out.
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    layout = plan_layout([("p", (100,), "float32")], {}, ranks=1, shadows=1)
    stream = GradientStream(layout, [], 0, lambda: None)
    mover = DeviceMover(stream, torch.device("cpu"), limit_bytes=1000, patience_s=0.0)
    try:
        with monkeypatch.context() as refused:
            refused.setattr(torch, "empty", refuse)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="no page-locked memory"):
                    mover._acquire(400)
        plain = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *what, pin_memory, **how: plain(*what, **how))
        memory = mover._acquire(400)
        assert memory is not None and memory.numel() == 400
    finally:
        mover.close()


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("no page-locked memory is left")
