"""What is found inside the entries of a state."""

from __future__ import annotations

import torch

from lastgood.state.held import held_in


class Application:
    """A user's own object, as of torch's recipes for distributed checkpoints, with more in it."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def state_dict(self):
        raise AssertionError("nobody asked for this")

    load_state_dict = state_dict


class Plain:
    pass


class AnswersToEverything:
    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


def test_containers_and_objects_are_looked_through():
    layer, weight = torch.nn.Linear(2, 2), torch.ones(2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    inner = Plain()
    inner.parts = {"layer": layer, "odd": AnswersToEverything()}
    found = dict(held_in([{"a": weight}, Application(inner=inner, steps=(optimizer,))], "x"))
    assert found == {
        ("x", 0, "a"): weight,
        ("x", 1, "inner", "parts", "layer"): layer,
        ("x", 1, "steps", 0): optimizer,
    }
    assert list(dict(held_in([weight, Application(layer=layer)], "x", objects=False))) == [("x", 0)]
    assert not list(held_in(inner, "x")), "an object that is no part of a state was looked into"


def test_the_search_has_an_end():
    itself: list[object] = []
    itself.append(itself)
    assert not list(held_in(itself, "x"))
    looked = []

    class Counted(list[object]):
        def __iter__(self):
            for item in super().__iter__():
                looked.append(item)
                yield item

    assert not list(held_in(Application(samples=Counted([(1, 2)] * 10**6)), "x"))
    assert len(looked) < 20_000
    assert len(list(held_in([torch.ones(1)] * 20_000, "x"))) == 20_000
