"""A tree against the live objects it is for: everything is compared before anything changes."""

from __future__ import annotations

import itertools
from types import MappingProxyType

import numpy as np
import pytest
import torch

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import CheckpointError, MismatchError
from lastgood.state import apply_tree, flatten, holds_its_values, state_digest, stateful_paths, unflatten
from tests.state.support.trees import a_tree


class Counted:
    """An object of the user's own."""

    def __init__(self):
        self.count = 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


KINDS = {
    "tensor": lambda: torch.ones(3),
    "array": lambda: np.ones(3),
    "int": lambda: 5,
    "none": lambda: None,
    "str": lambda: "x",
    "list": lambda: [1, 2],
    "list of tensors": lambda: [torch.ones(2)],
    "dict": lambda: {"a": 1},
    "mixed key dict": lambda: {1: 2, "b": 3},
    "module": lambda: torch.nn.Linear(2, 2),
    "optimizer": optimizer,
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(optimizer(), 1),
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "own object": Counted,
}
VALUES = {"int", "none", "str"}
OF_ONE_KIND = [VALUES, *({"array", value} for value in VALUES), {"list", "list of tensors"}, {"dict", "mixed key dict"}]
"""Plain values may become each other (a loss that is None at first), and entries of a plain dict come and go."""
OBJECTS = {"module", "optimizer", "scheduler", "scaler"}
"""Whether an object of the user's own takes what another kind of object returned, only its load_state_dict knows."""
PAIRS = [
    pair
    for pair in itertools.permutations(KINDS, 2)
    if not any(set(pair) <= group for group in OF_ONE_KIND) and not (pair[1] == "own object" and pair[0] in OBJECTS)
] + [("list", "list of tensors"), *((value, "array") for value in sorted(VALUES))]


@pytest.mark.parametrize(("saved", "live"), PAIRS)
def test_an_entry_of_another_kind_is_refused_before_anything_changes(saved, live):
    tree, objects = a_tree({"first": torch.nn.Linear(2, 2), "outer": {"x": KINDS[saved]()}, "x": KINDS[saved]()})
    state = {"first": torch.nn.Linear(2, 2), "outer": {"x": KINDS[saved]()}, "x": KINDS[live]()}
    before = state_digest({"first": state["first"], "x": state["x"]})
    with pytest.raises(MismatchError, match="here: x"):
        apply_tree(state, tree, "here", objects)
    assert state_digest({"first": state["first"], "x": state["x"]}) == before


@pytest.mark.parametrize("system", ["pccheck", "gpm", "sync", "checkfreq"])
def test_every_system_refuses_it_alike(system, tmp_path):
    kind = checkpointer_class(system)
    wrong = []
    for saved in ("int", "dict", "module", "own object"):
        checkpointer = kind(tmp_path / saved.replace(" ", "-"))
        checkpointer.start({"first": torch.nn.Linear(2, 2), "x": KINDS[saved]()})
        checkpointer.save(1)
        checkpointer.close()
        for live in KINDS:
            if (saved, live) not in PAIRS:
                continue
            state = {"first": torch.nn.Linear(2, 2), "x": KINDS[live]()}
            before = state_digest(state)
            try:
                checkpointer.restore(state)
                wrong.append((saved, live, "restored"))
            except MismatchError as error:
                if ": x" not in str(error) or state_digest(state) != before:
                    wrong.append((saved, live, error))
    assert wrong == []


def test_plain_values_in_a_dict_may_change_their_kind():
    tree, objects = a_tree({"plain": {"loss": 0.5, "seen": [1], "at": {"a": 1}}})
    state = {"plain": {"loss": None, "seen": None, "at": []}}
    apply_tree(state, tree, "here", objects)
    assert state == {"plain": {"loss": 0.5, "seen": [1], "at": {"a": 1}}}


def test_what_an_objects_own_loading_raises_names_it_and_what_was_loaded_before():
    class Refuses(Counted):
        def load_state_dict(self, state):
            raise KeyError("count")

    tree, objects = a_tree({"model": torch.nn.Linear(2, 2), "own": Counted()})
    with pytest.raises(CheckpointError, match=r"here: own: Refuses .*KeyError: 'count'; model: loaded before"):
        apply_tree({"model": torch.nn.Linear(2, 2), "own": Refuses()}, tree, "here", objects)


def test_a_tuple_comes_back_with_its_plain_values_and_its_own_tensors():
    tensor = torch.zeros(2)
    state = {"outer": {"pair": (tensor, 3, np.zeros(2), float("nan"))}}
    tree, objects = a_tree({"outer": {"pair": (torch.ones(2), 4, np.ones(2), float("nan"))}})
    apply_tree(state, tree, "here", objects)
    pair = state["outer"]["pair"]
    assert pair[0] is tensor
    assert pair[0].eq(1).all()
    assert pair[1] == 4
    assert pair[2].tolist() == [1, 1]
    assert not holds_its_values((torch.zeros(2), 4)), "attach could not give the 4 back"
    assert holds_its_values((torch.zeros(2), [4]))
    assert not holds_its_values(([4],)), "a tuple without live parts is replaced"


def test_the_order_of_a_mapping_comes_back():
    tree, objects = a_tree({"recent": {"b": 1, "a": torch.ones(1)}})
    tensor = torch.zeros(1)
    state = {"recent": {"a": tensor, "b": 0}}
    apply_tree(state, tree, "here", objects)
    assert list(state["recent"].items()) == [("b", 1), ("a", tensor)]


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        ([1, 2], (1, 2)),
        (([1],), ([2],)),
        ((torch.zeros(2), [1]), (torch.ones(2), (1,))),
        ((torch.zeros(2), {}), (torch.ones(2), 5)),
        ((torch.zeros(2), np.zeros(3)), (torch.ones(2), np.zeros(4))),
    ],
)
def test_what_would_have_to_be_replaced_in_a_mapping_that_cannot_be_changed_is_refused_first(live, saved):
    flat = flatten({"model": torch.nn.Linear(2, 2), "x": saved})
    tree = unflatten(flat.layout, flat.blocks, "here")
    model = torch.nn.Linear(2, 2)
    before = state_digest({"model": model})
    with pytest.raises(MismatchError, match="here: x"):
        apply_tree(MappingProxyType({"model": model, "x": live}), tree, "here", stateful_paths(flat.layout))
    assert state_digest({"model": model}) == before
    state = {"model": model, "x": live}
    apply_tree(state, tree, "here", stateful_paths(flat.layout))
    assert state_digest(state) == state_digest({"model": model, "x": saved})
