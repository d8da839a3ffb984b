"""Side records of CUDA states. No GPU is here: streams and events are noted, and what is said to them is looked at."""

from __future__ import annotations

import pytest
import torch

from lastgood.gradients.side import Arrival


class Event:
    """Stands for torch.cuda.Event; without a stream it would be recorded on the current device's."""

    made: list[Event]

    def __init__(self) -> None:
        self.recorded: list[object] = []
        self.waited = 0
        Event.made.append(self)

    def record(self, stream: object = "the current device's") -> None:
        self.recorded.append(stream)

    def synchronize(self) -> None:
        self.waited += 1


def test_a_record_is_whole_behind_the_streams_that_copy_it_not_behind_the_current_device_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    arrival = Arrival([torch.device("cuda:1"), torch.device("cuda:3")])
    assert [event.recorded for event in Event.made] == [["stream of cuda:1"], ["stream of cuda:3"]]
    arrival.synchronize()
    assert [event.waited for event in Event.made] == [1, 1]
