"""Durable means restorable: what a system takes comes back to the bit, what could not is refused at the start."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import StateError
from lastgood.state import Layout, flatten, state_digest, try_layout
from tests.checkpointers.support.kinds_of_values import ARRAYS, REFUSED, TENSORS, VALUES, as_two_dtypes, make_state
from tests.checkpointers.support.peer_processes import peers_end_with_the_test

SYSTEMS = ["pccheck", "gpm", "checkfreq", "sync", "dcp", "gemini", "torchsnapshot", "nvrx"]


@pytest.fixture(params=SYSTEMS)
def system(request, tmp_path):
    kind = checkpointer_class(request.param)
    if kind.unavailable() is not None:
        pytest.skip(kind.unavailable())
    with peers_end_with_the_test(tmp_path):
        yield kind


def types_of(value):
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.dtype, tuple(value.shape))
    if isinstance(value, np.ndarray):
        return (np.ndarray, value.dtype, value.shape)
    if isinstance(value, dict):
        return (type(value), [(repr(key), types_of(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [types_of(item) for item in value])
    if callable(getattr(value, "state_dict", None)):
        return types_of(value.state_dict())
    return (type(value), repr(value) if not isinstance(value, (set, frozenset)) else sorted(map(repr, value)))


def with_plain_bools(state):
    """DCP's own copies make each bool 0 or 1, whatever its byte was."""
    entries = [state, state["model"].state_dict(), state["tensors"], *state["optimizer"].state.values()]
    for entry in [*entries, *(entry["tensors"] for entry in state["optimizer"].state.values())]:
        for tensor in entry.values():
            make_plain(tensor)


def make_plain(tensor):
    if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool and tensor.numel():
        raw = tensor.view(torch.uint8)
        raw.as_strided((int(raw.untyped_storage().nbytes()),), (1,), 0).clamp_(max=1)


def test_everything_that_a_state_may_hold_comes_back_to_the_bit(system, tmp_path):
    saved = make_state(0)
    if system.name == "dcp":
        with_plain_bools(saved)
    torch_save = system.name in ("sync", "checkfreq")
    if not torch_save:
        saved["two dtypes"] = as_two_dtypes(0)
    checkpointer = system(tmp_path / "job")
    checkpointer.start(saved)
    checkpointer.save(1)
    checkpointer.close()
    assert [event.outcome for event in checkpointer.events] == [Outcome.DURABLE], checkpointer.events[0].error
    fresh = make_state(1) | ({} if torch_save else {"two dtypes": as_two_dtypes(1)})
    assert system(tmp_path / "job").restore(fresh) == 1
    other = [name for name in saved if state_digest({"x": fresh[name]}) != state_digest({"x": saved[name]})]
    assert other == []
    assert [name for name in saved if types_of(fresh[name]) != types_of(saved[name])] == []
    assert fresh["model"].one.weight is fresh["model"].two.weight
    assert fresh["model"].extra.tolist() == [0, 0]
    assert fresh["extra"].extra.tolist() == [0, 0]


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_come_back_is_refused_at_the_start_by_its_path(what, tmp_path):
    state = {"outer": {"inner": [0, REFUSED[what]()]}}
    for name in ("pccheck", "sync"):
        checkpointer = checkpointer_class(name)(tmp_path / name)
        with pytest.raises(StateError, match=r"outer|limit \(4300") as caught:
            checkpointer.start(state)
        assert len(str(caught.value)) < 2000
        checkpointer.close()


@pytest.mark.parametrize("name", ["sync", "checkfreq"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: as_two_dtypes(0), "as two dtypes"),
        (lambda: {np.int64(3)}, "set of numpy|int64"),
        (lambda: {"lastgood.numpy": 1}, "lastgood.numpy"),
    ],
)
def test_what_a_file_of_torch_save_cannot_hold_is_refused_at_the_start(name, value, words, tmp_path):
    checkpointer = checkpointer_class(name)(tmp_path)
    with pytest.raises(StateError, match=words):
        checkpointer.start({"outer": {"inner": value()}})
    checkpointer.close()


def test_a_value_that_turns_up_later_fails_each_save_and_never_a_restore(system, tmp_path):
    training = {"model": torch.nn.Linear(2, 2), "plain": {"x": 1}}
    checkpointer = system(tmp_path / "job")
    checkpointer.start(training)
    checkpointer.save(1)
    checkpointer.drain()
    for step, what in enumerate(("function", "set of tensors", "masked", "nan key", "failing"), 2):
        training["plain"]["x"] = REFUSED[what]()
        checkpointer.save(step)
        checkpointer.drain()
        assert checkpointer.events[-1].outcome is Outcome.FAILED, what
    training["plain"]["x"] = 2
    checkpointer.save(9)
    checkpointer.close()
    fresh = {"model": torch.nn.Linear(2, 2), "plain": {}}
    assert system(tmp_path / "job").restore(fresh) == 9
    assert fresh["plain"] == {"x": 2}


def test_a_layout_is_tried_when_it_is_new_and_not_in_every_save(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(
        "lastgood.checkpointers.base.try_layout", lambda state, flat: tried.append(flat.layout.digest())
    )
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "plain": {"x": 1}}
    checkpointer = checkpointer_class("pccheck")(tmp_path)
    checkpointer.start(state)
    assert len(tried) == 1
    for step in (1, 2, 3):
        model(torch.ones(2)).sum().backward()
        state["optimizer"].step()
        state["plain"]["x"] += 1
        checkpointer.save(step)
    checkpointer.close()
    assert len(tried) == len(set(tried)) == 2, "momentum made a second layout"


def test_a_trial_touches_no_tensor(monkeypatch):
    state = make_state(0)
    before, versions = state_digest(state), [tensor._version for tensor in state["model"].parameters()]
    flat = flatten(state)
    try_layout(state, flat)
    assert state_digest(state) == before
    assert versions == [tensor._version for tensor in state["model"].parameters()]
    read = Layout.from_json
    monkeypatch.setattr(
        Layout, "from_json", classmethod(lambda kind, text, where: read(text.replace(b"[3,5]", b"[5,3]"), where))
    )
    with pytest.raises(StateError, match=r"could not be restored.*"):
        try_layout(state, flat)


def test_the_matrix_holds_all_kinds():
    flat = flatten(make_state(0))
    tags = {tag for tag in "nbifcsyYltSeEdoCmDVTAN" if f'["{tag}"' in flat.layout.to_json().decode()}
    assert tags == set("nbifcsyYltSeEdoCmDVTAN")
    assert len(TENSORS) > 30
    assert len(VALUES) + len(ARRAYS) > 40
