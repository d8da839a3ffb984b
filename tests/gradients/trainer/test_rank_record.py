"""Side records: what was remembered of a module against a new description, and those of CUDA states.

No GPU is here: streams and events are noted, and what is said to them is looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.trainer import record_sections
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.rank_record import Arrival, SideRecords, open_side, restored_tree
from lastgood.state import check_tree, flatten


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


class Extra(torch.nn.Module):
    """Tells something of itself that is no tensor, and of which only it knows when it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"count": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


class Casting(torch.nn.Module):
    """Tells a copy of its buffer, unless asked for the live one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coarse", torch.zeros(3))

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "coarse"] = self.coarse if keep_vars else self.coarse.half()


class Adding(torch.nn.Module):
    """Tells more than there is, unless asked for the live ones."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            destination[prefix + "count"] = torch.tensor(self.count)


OPTIMIZER = {"kind": "sgd"}  # of no meaning here


def a_model() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    model.register_buffer("mask", torch.arange(24.0).reshape(4, 6)[:, ::2])
    model.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
    model[2].bias.requires_grad_(False)
    return model


def records_of(state: dict[str, object]) -> SideRecords:
    tracked = TrackedParameters(state)
    return SideRecords(state, tracked, plan_layout(tracked.declared(), OPTIMIZER, shadows=1, ranks=1), rank=0)


def as_bits(value: object) -> object:
    """Comparable, to the bit."""
    if isinstance(value, torch.Tensor):
        shape, dtype = tuple(value.shape), value.dtype
        return shape, dtype, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: as_bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_bits(item) for item in value]
    return value


def taken(records: SideRecords) -> object:
    record, arrives = records.take()
    assert arrives is None
    return as_bits(open_side(bytearray(record), "here"))


def added_in_place(model: torch.nn.Sequential) -> None:
    model[1].running_mean += 1.5
    model.mask[1, 1] += 1
    model.phase += 1j


def replaced(model: torch.nn.Sequential) -> None:
    model.mask = model.mask + 1


def moved(model: torch.nn.Sequential) -> None:
    model.phase.data = model.phase.data + 1j


def seen_otherwise(model: torch.nn.Sequential) -> None:
    model.mask.t_()


def resized(model: torch.nn.Sequential) -> None:
    model.phase.resize_(model.phase.numel() + 1).fill_(2)


def conjugated(model: torch.nn.Sequential) -> None:
    model.phase = model.phase.conj()


def added(model: torch.nn.Sequential) -> None:
    model.register_buffer(f"more{sum(1 for _ in model.buffers())}", torch.ones(2))


def removed(model: torch.nn.Sequential) -> None:
    for name in [name for name, _ in model.named_buffers() if name.startswith("more")][:1]:
        delattr(model, name)


def parameter_moved(model: torch.nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data + 1


def _of_kind(model: torch.nn.Sequential, kind: type[torch.nn.Module]) -> torch.nn.Module:
    for module in model:
        if isinstance(module, kind):
            return module
    return model.append(kind())[-1]


def with_extra_state(model: torch.nn.Sequential) -> None:
    _of_kind(model, Extra).seen["count"] += 1


def casting(model: torch.nn.Sequential) -> None:
    _of_kind(model, Casting).coarse += 0.1


def adding(model: torch.nn.Sequential) -> None:
    model[3].count += 1


def tied(model: torch.nn.Sequential) -> None:
    """A buffer that is the parameter, until that moves away."""
    model.register_buffer("tie", model[0].weight.detach())


def learned(model: torch.nn.Sequential) -> None:
    model.rate = getattr(model, "rate", 0.0) + 0.25


CHANGES = [
    added_in_place,
    replaced,
    moved,
    seen_otherwise,
    resized,
    conjugated,
    added,
    removed,
    parameter_moved,
    with_extra_state,
    casting,
    adding,
    tied,
    learned,
]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(CHANGES), max_size=8))
@example([tied, parameter_moved, parameter_moved])
@example([casting, casting])
@example([adding, adding])
@example([conjugated, added_in_place])
def test_a_record_is_as_one_taken_for_the_first_time_whatever_changed(changes: list[Callable[..., None]]) -> None:
    model = a_model()
    if adding in changes:
        model.append(Adding())
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    state = {"model": model, "other": torch.nn.BatchNorm1d(2), "optimizer": optimizer, "note": {"at": 1.5}}
    records = records_of(state)
    for change in changes:
        assert taken(records) == taken(records_of(state))
        change(model)
        optimizer.param_groups[0]["lr"] = 0.1 + getattr(model, "rate", 0.0)
        assert taken(records) == taken(records_of(state))


def test_an_unchanged_module_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    records = records_of({"model": model, "optimizer": optimizer})
    described: list[str] = []

    def noted(parts: dict[str, object]) -> object:
        described.extend(parts)
        return flatten(parts)

    monkeypatch.setattr(record_sections, "flatten", noted)
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        records.take()
    assert described.count("model") == 1
    assert described.count("optimizer") == 3
    model.mask = model.mask + 1
    records.take()
    assert described.count("model") == 2


def test_all_parts_come_back_without_what_is_updated() -> None:
    model = a_model()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    record, _ = records_of({"model": model, "optimizer": optimizer, "note": {"at": 1.5}}).take()
    opened = open_side(bytearray(record), "here")
    assert opened["note"] == {"at": 1.5}
    assert opened["optimizer"][0]["lr"] == 0.1
    assert "params" not in opened["optimizer"][0]
    whole = model.state_dict()
    updated = {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight"}
    assert opened["model"].keys() == whole.keys() - updated
    assert all(torch.equal(value, whole[key]) for key, value in opened["model"].items())


def test_a_record_of_one_piece_as_version_1_wrote_it_is_read() -> None:
    flat = flatten({"model": {"mask": torch.arange(5)}, "note": 3})
    text = flat.layout.to_json()
    record = bytearray(len(text).to_bytes(8, "little") + text + bytes(flat.layout.stream_bytes))
    assert as_bits(open_side(record, "here")) == as_bits(
        {"model": {"mask": torch.zeros(5, dtype=torch.int64)}, "note": 3}
    )


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda record: record[:0], "holds no part"),
        (lambda record: record[:5], "declares a layout"),
        (lambda record: record[:-1], "its layout needs"),
        (lambda record: record + record, "twice"),
        (lambda record: record + bytes(3), "declares a layout"),
        (lambda record: record + (1 << 40).to_bytes(8, "little"), "declares a layout"),
    ],
)
def test_a_torn_record_is_refused(harm: Callable[[bytes], bytes], words: str) -> None:
    model = torch.nn.BatchNorm1d(2)
    record, _ = records_of({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}).take()
    with pytest.raises(CorruptCheckpoint, match=f"here: .*{words}"):
        open_side(bytearray(harm(bytes(record))), "here")


@pytest.mark.parametrize("other", [5, None, [1], "x"])
def test_a_record_with_something_else_than_a_module_is_refused_by_name(other: object) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    tracked = TrackedParameters(state)
    tensors = {(index, "parameter"): torch.zeros_like(one) for index, one in enumerate(tracked.parameters)}
    groups = [{key: value for key, value in tracked.optimizer.param_groups[0].items() if key != "params"}]
    tree = restored_tree(state, tracked, {"model": other, "optimizer": groups}, tensors, "here")
    with pytest.raises(MismatchError, match="here: model"):
        check_tree(state, tree, "here")
    with pytest.raises(MismatchError, match="other groups"):
        restored_tree(state, tracked, {"model": {}, "optimizer": [other]}, tensors, "here")
