"""What optimizers train: in which order, whether a part holds it, and gradients that no checkpoint has."""

from __future__ import annotations

import pytest
import torch

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import ConfigError, MismatchError, StateError
from tests.checkpointers.support.wrapped_optimizers import Forwarding

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck", "dcp"]


def modules() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({name: torch.nn.Linear(4, 3, bias=False) for name in "xy"})


def trained(directory, parameters, system="pccheck", wrap=lambda optimizer: optimizer, model=None, **parts):
    """One step, from a fresh life; returns the model, its optimizer, and where it began."""
    model = modules() if model is None else model
    optimizer = wrap(torch.optim.AdamW(parameters(model)))
    checkpointer = checkpointer_class(system)(directory, interval_steps=1)
    try:
        began = checkpointer.attach(model=model, optimizer=optimizer, **parts)
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
        checkpointer.step()
    finally:
        checkpointer.close()
    return model, optimizer, began


def in_order(model):
    return list(model.parameters())


def reversed_order(model):
    return list(model.parameters())[::-1]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("wrap", [lambda one: one, Forwarding], ids=["plain", "wrapped"])
def test_parameters_in_another_order_are_refused_before_anything_changes(system, wrap, tmp_path):
    trained(tmp_path, in_order, system, wrap)
    model = modules()
    before = model["x"].weight.detach().clone()
    words = r"number 0 on the checkpoint has model\.x\.weight \(3, 4\), .*the optimizer has model\.y\.weight \(3, 4\)"
    with pytest.raises(MismatchError, match=words):
        trained(tmp_path, reversed_order, system, wrap, model)
    assert torch.equal(model["x"].weight, before)
    assert trained(tmp_path, in_order, system, wrap)[2] == 1


def test_names_that_the_optimizer_knows_are_compared_without_an_attachment(tmp_path):
    """Also in a checkpoint of a loop that calls save() itself, or of before parameters were kept."""

    def parts(order):
        model = modules()
        return {"model": model, "optimizer": torch.optim.AdamW(order(list(model.named_parameters())))}

    first = checkpointer_class("sync")(tmp_path)
    first.start(parts(list))
    first.save(1)
    first.close()
    checkpointer_class("sync")(tmp_path).restore(parts(list))
    with pytest.raises(MismatchError, match=r"checkpoint has x\.weight, y\.weight, and the optimizer has y\.weight"):
        checkpointer_class("sync")(tmp_path).restore(parts(lambda named: named[::-1]))


def test_shapes_tell_parameters_apart_that_have_no_names(tmp_path):
    def parts(shapes):
        loose = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        return {"loose": {str(shape): one for shape, one in zip(shapes, loose, strict=True)}}, loose

    def attach(shapes):
        held, loose = parts(shapes)
        checkpointer = checkpointer_class("pccheck")(tmp_path, interval_steps=1)
        began = checkpointer.attach(optimizer=torch.optim.SGD(loose, 0.1), **held)
        checkpointer.step()
        checkpointer.close()
        return began

    attach([2, 3])
    with pytest.raises(MismatchError, match=r"loose\.2 \(2,\), .*the optimizer has loose\.3 \(3,\)"):
        attach([3, 2])
    assert attach([2, 3]) == 1


def test_a_checkpoint_that_says_nothing_of_parameters_is_taken(tmp_path, monkeypatch):
    from lastgood.checkpointers.attach.trained import Trained

    with monkeypatch.context() as older:
        older.setattr(Trained, "order", lambda self: {})
        trained(tmp_path, in_order)
    assert trained(tmp_path, in_order)[2] == 1


def test_wrappers_of_modules_change_no_order(tmp_path):
    class Ddp(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def state_dict(self, *args, **kwargs):
            return self.module.state_dict(*args, **kwargs)

        def load_state_dict(self, state, **kwargs):
            return self.module.load_state_dict(state, **kwargs)

    trained(tmp_path, in_order)
    assert trained(tmp_path, in_order, model=Ddp(modules()))[2] == 1


class Trainer:
    """A user's own object: its state_dict shows copies, of modules and weights that lie deep in it."""

    def __init__(self, net, attribute="net"):
        self.deep = type("Deep", (), {})()
        self.deep.nets = {attribute: [net]}
        self.temperature = torch.ones((), requires_grad=True)
        self.get = lambda: (net, self.temperature)

    def state_dict(self):
        net, temperature = self.get()
        return {"net": {key: value.clone() for key, value in net.state_dict().items()}, "t": temperature.item()}

    def load_state_dict(self, state):
        net, temperature = self.get()
        net.load_state_dict(state["net"])
        temperature.data.fill_(state["t"])


def attach_trainer(directory, attribute="net", order=list):
    net = modules()
    trainer = Trainer(net, attribute)
    optimizer = torch.optim.AdamW(order([*net.parameters(), trainer.temperature]))
    checkpointer = checkpointer_class("pccheck")(directory, interval_steps=1)
    try:
        began = checkpointer.attach(trainer=trainer, optimizer=optimizer)
        checkpointer.step()
    finally:
        checkpointer.close()
    return began


def test_an_attribute_of_a_users_object_may_have_another_name(tmp_path):
    attach_trainer(tmp_path)
    assert attach_trainer(tmp_path, "network") == 1
    with pytest.raises(MismatchError, match="another order"):
        attach_trainer(tmp_path, "network", lambda found: [found[1], found[0], found[2]])


def test_what_parts_share_has_one_name_in_whatever_order_they_are_given(tmp_path):
    def attach(*names):
        shared = torch.nn.Linear(2, 2)
        parts = {name: torch.nn.Sequential(shared, torch.nn.Linear(2, 1)) for name in "ab"}
        optimizer = torch.optim.SGD([*parts["a"].parameters(), *parts["b"][1].parameters()], 0.1)
        checkpointer = checkpointer_class("sync")(tmp_path, interval_steps=1)
        try:
            began = checkpointer.attach(optimizer=optimizer, **{name: parts[name] for name in names})
            checkpointer.step()
        finally:
            checkpointer.close()
        return began

    attach("a", "b")
    assert attach("b", "a") == 1


def test_optimizers_in_containers_are_compared_and_looked_through_as_well(tmp_path):
    def several(optimizer):
        return {"one": [optimizer]}

    trained_in(tmp_path / "a", in_order, several)
    assert trained_in(tmp_path / "a", in_order, several) == 1
    with pytest.raises(MismatchError, match=r"optimizers\.one\.0: .*another order"):
        trained_in(tmp_path / "a", reversed_order, several)
    loose = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError) as error:
        trained_in(tmp_path / "b", lambda model: [*model.parameters(), loose], several)
    assert """more=[optimizers['one'][0].param_groups[0]["params"][2]]""" in str(error.value)


def trained_in(directory, parameters, wrap):
    model = modules()
    checkpointer = checkpointer_class("sync")(directory, interval_steps=1)
    try:
        began = checkpointer.attach(model=model, optimizers=wrap(torch.optim.AdamW(parameters(model))))
        checkpointer.step()
    finally:
        checkpointer.close()
    return began


def test_a_list_that_holds_itself_is_refused_as_what_it_is(tmp_path):
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(StateError, match="itself"):
        checkpointer_class("sync")(tmp_path, interval_steps=1).attach(model=modules(), more=itself)


# -- what no part holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_trained_and_lies_in_no_part_is_refused_by_name(system, tmp_path):
    loss_weight = torch.nn.Parameter(torch.tensor(1.0))
    model = modules()
    optimizer = torch.optim.AdamW([*model.parameters(), loss_weight])
    with pytest.raises(ConfigError, match=r"optimizer: parameter 2 of group 0, of shape \(\): trained, and in no"):
        checkpointer_class(system)(tmp_path, interval_steps=1).attach(model=model, optimizer=optimizer)
    named = torch.optim.AdamW([*model.named_parameters(), ("log_var", loss_weight)])
    with pytest.raises(ConfigError, match=r"of shape \(\) \(log_var\)"):
        checkpointer_class(system)(tmp_path, interval_steps=1).attach(model=model, optimizer=named)
    for parts in ({"weight": loss_weight}, {"more": [loss_weight]}, {"more": {"deep": (loss_weight,)}}):
        checkpointer = checkpointer_class(system)(tmp_path, interval_steps=0)
        checkpointer.attach(model=model, optimizer=optimizer, **parts)
        checkpointer.close()
    checkpointer = checkpointer_class(system)(tmp_path, interval_steps=0)
    checkpointer.attach(model=model, optimizer=optimizer, unattached="allow")
    checkpointer.close()


def test_what_is_held_in_another_way_counts_as_attached(tmp_path):
    class Own:
        """Shows its tensor in its state_dict, and nowhere else."""

        def __init__(self, weight):
            self.get = lambda: weight

        def state_dict(self):
            return {"weight": self.get()}

        def load_state_dict(self, state):
            self.get().data.copy_(state["weight"])

    class Holds:
        """Its state_dict is a copy, but it holds the module."""

        def __init__(self, module):
            self.module = module

        def state_dict(self):
            return {key: value.clone() for key, value in self.module.state_dict().items()}

        def load_state_dict(self, state):
            self.module.load_state_dict(state)

    weight, layer, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Linear(2, 2), torch.ones(3)
    empty = torch.nn.Parameter(torch.empty(0))
    optimizer = torch.optim.SGD([weight, *layer.parameters(), frozen, empty], 0.1)
    checkpointer = checkpointer_class("pccheck")(tmp_path, interval_steps=0)
    checkpointer.attach(own=Own(weight), holds=Holds(layer), optimizer=optimizer)
    checkpointer.close()
    assert attach_trainer(tmp_path / "trainer") == 0


# -- gradients ---------------------------------------------------------------------------------------------------------


def accumulate(directory, every: int, steps: int, *, per_update: bool, **parts) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpointer = checkpointer_class("sync")(directory, interval_steps=1)
    checkpointer.attach(model=model, optimizer=optimizer, **parts)
    for number in range(1, steps + 1):
        model(torch.ones(1, 2)).sum().backward()
        if number % every == 0:
            optimizer.step()
            if per_update:
                checkpointer.step()
            optimizer.zero_grad()
        if not per_update:
            checkpointer.step()
    checkpointer.close()


def test_gradients_of_a_window_are_told_once(tmp_path, caplog):
    accumulate(tmp_path, 4, 14, per_update=False)
    told = [one.getMessage() for one in caplog.records if "between two optimizer steps" in one.getMessage()]
    assert len(told) == 1 and "the checkpoint of step 5 lies" in told[0] and "after each optimizer.step()" in told[0]


def test_gradients_that_an_update_has_used_are_none_of_a_window(tmp_path, caplog):
    accumulate(tmp_path / "a", 4, 14, per_update=True)
    accumulate(tmp_path / "b", 1, 4, per_update=False)
    # A loss scaler leaves a step out now and then.
    accumulate(tmp_path / "c", 2, 5, per_update=False, scaler=torch.amp.GradScaler("cpu"))
    assert "between two optimizer steps" not in caplog.text
