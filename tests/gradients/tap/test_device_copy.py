"""Memory of gradients on their way from a device. No GPU is here, so none of it is page-locked."""

from __future__ import annotations

import pytest
import torch

from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.layout.spans import Span
from lastgood.gradients.link import gradient_stream as stream_module
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.tap.device_copy import DeviceMover
from lastgood.wire.records import DType
from tests.gradients.support.data_links import SETTINGS, WAIT_S, Unending, connected


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


def test_memory_that_a_thread_may_read_for_ever_is_not_given_back_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_kept_for_ever", [])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    stream = GradientStream(plan_layout([("p", (100,), "float32")], {}, ranks=1, shadows=1), [], 0, lambda: None)
    mover = DeviceMover(stream, torch.device("cpu"), limit_bytes=1000, patience_s=0.0)
    link, far = connected(SETTINGS)
    read, unread = torch.empty(4, dtype=torch.uint8), torch.empty(4, dtype=torch.uint8)
    sender = link._sender
    for memory in (read, unread):
        if memory is unread:
            link._sender = Unending(sender)
        ticket = link.put(1, Span(0, DType.float32, 0, 0, 4), memory.data_ptr(), borrowed=True)
        assert ticket is not None
        mover._lent.append((memory, [ticket]))
    assert sender.wait_returned(sender.last_ticket, WAIT_S)
    mover.close()
    mover.release()
    kept = [memory for memory, _ in stream_module._kept_for_ever]
    assert [memory is unread for memory in kept] == [True]
    assert not mover._lent and not any(mover._free.values())
    link.close()
    far.close()


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("no page-locked memory is left")
