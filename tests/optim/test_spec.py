"""What an optimizer is, taken from live ones, and as data."""

import copy
import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import ConfigError, CorruptCheckpoint
from lastgood.optim.spec import GroupSpec, OptimizerSpec


def tensors(count=3, dtype=torch.float32):
    return [torch.zeros(2, dtype=dtype, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize(
    "make, kind, implementation",
    [
        (lambda p: torch.optim.SGD(p), "sgd", "single"),
        (lambda p: torch.optim.SGD(p, foreach=True), "sgd", "foreach"),
        (lambda p: torch.optim.SGD(p, fused=True), "sgd", "fused"),
        (lambda p: torch.optim.Adam(p), "adam", "single"),
        (lambda p: torch.optim.Adam(p, fused=False), "adam", "single"),
        (lambda p: torch.optim.Adam(p, foreach=True), "adam", "foreach"),
        (lambda p: torch.optim.AdamW(p, fused=True), "adamw", "fused"),
        (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), "adamw", "single"),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), "adamw", "single"),
    ],
)
def test_kind_and_implementation_are_those_that_torch_takes(make, kind, implementation, monkeypatch):
    parameters = tensors()
    optimizer = make(parameters)
    spec = OptimizerSpec.of(optimizer)
    assert (spec.kind, spec.implementation, spec.arithmetic) == (kind, implementation, "cpu")
    # torch itself says which of its three functions it calls.
    called = []
    for name in ("fused", "multi_tensor", "single_tensor"):
        family = "sgd" if kind == "sgd" else "adam"
        module = sys.modules[f"torch.optim.{family}"]
        monkeypatch.setattr(module, f"_{name}_{family}", lambda *args, _name=name, **more: called.append(_name))
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert called == [{"fused": "fused", "foreach": "multi_tensor", "single": "single_tensor"}[implementation]]


def test_groups_count_places_in_the_models_list():
    parameters = tensors(5)
    groups = [
        {"params": [parameters[4], parameters[0]], "amsgrad": True},
        {"params": parameters[1:3], "maximize": True},
    ]
    spec = OptimizerSpec.of(torch.optim.AdamW(groups), parameters)
    assert spec.groups == (GroupSpec((4, 0), amsgrad=True), GroupSpec((1, 2), maximize=True))
    assert spec.group_of() == {4: 0, 0: 0, 1: 1, 2: 1}
    with pytest.raises(ConfigError, match=r"parameter 0 of the optimizer is not in the list"):
        OptimizerSpec.of(torch.optim.AdamW(groups), parameters[:2])


def adam_whose_groups_differ():
    first, second = tensors(2)
    return torch.optim.Adam([{"params": [first], "fused": True}, {"params": [second], "fused": None}])


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Own(tensors()), r"cannot repeat .*Own: use torch.optim.SGD"),
        (lambda: torch.optim.RMSprop(tensors()), "cannot repeat torch.optim.rmsprop.RMSprop"),
        (lambda: torch.optim.SGD(tensors(), differentiable=True), "differentiable=True"),
        (lambda: torch.optim.Adam(tensors(), capturable=True), "capturable=True: its bias corrections"),
        (lambda: torch.optim.SGD(tensors(dtype=torch.complex64)), "parameter 0 of the optimizer is complex64"),
        (lambda: torch.optim.SGD([torch.zeros(2, device="meta")]), "not of meta"),
        (adam_whose_groups_differ, "one kind of step for all groups.*fused; single"),
        (lambda: torch.optim.Adam(tensors(), betas=(torch.tensor(0.9), torch.tensor(0.99))), "betas .* as numbers"),
    ],
)
def test_what_cannot_be_repeated_is_refused_and_named(make, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerSpec.of(make())


LANES = st.integers(0, 255)


@st.composite
def specs(draw):
    kind = draw(st.sampled_from(["sgd", "adam", "adamw"]))
    places = draw(st.permutations(range(12)))
    cuts = sorted(draw(st.lists(st.integers(0, 12), max_size=3)))
    groups = tuple(
        GroupSpec(
            tuple(places[a:b]),
            amsgrad=kind != "sgd" and draw(st.booleans()),
            maximize=draw(st.booleans()),
            nesterov=kind == "sgd" and draw(st.booleans()),
            lanes=draw(LANES),
            scaled_lanes=draw(LANES),
        )
        for a, b in zip([0, *cuts], [*cuts, 12], strict=True)
    )
    implementation = draw(st.sampled_from(["fused", "foreach", "single"]))
    return OptimizerSpec(kind, implementation, draw(st.sampled_from(["cpu", "cuda"])), groups, 3, "2.11.0+cu130")


@given(specs())
def test_data_comes_back_as_it_went(spec):
    assert OptimizerSpec.from_data(json.loads(json.dumps(spec.to_data()))) == spec


def test_a_large_model_is_a_short_message():
    spec = OptimizerSpec("adamw", "fused", "cpu", (GroupSpec(tuple(range(200_000))),), 1, "2.14")
    assert len(json.dumps(spec.to_data())) < 400
    assert OptimizerSpec.from_data(spec.to_data()) == spec


GOOD = OptimizerSpec("adamw", "fused", "cpu", (GroupSpec((0, 1)), GroupSpec((2,))), 1, "2.14").to_data()


def changed(**change):
    return {**copy.deepcopy(GOOD), **change}


def group(**change):
    return changed(groups=[{**GOOD["groups"][0], **change}])


@pytest.mark.parametrize(
    "data, message",
    [
        (None, "not a JSON object"),
        ([], "not a JSON object"),
        (changed(kind="lion"), "kind is not one of sgd, adam, adamw"),
        (changed(kind=["sgd"]), "kind is not one of"),
        (changed(arithmetic="tpu"), "arithmetic is not one of"),
        (changed(threads=0), "threads is not an integer from 1"),
        (changed(threads=True), "threads is not an integer"),
        (changed(torch="x" * 65), "torch is not a text"),
        (changed(surprise=1), "unknown key 'surprise'"),
        (changed(groups={}), "groups is not a list"),
        (changed(groups=[{}] * 5000), "groups is not a list of at most 4096"),
        (group(runs=[[0, 1 << 40]]), "more than 1048576 parameters"),
        (group(runs=[[-1, 2]]), "more than 1048576 parameters"),
        (group(runs=[[0]]), "runs is not pairs"),
        (group(runs=[[0, 2], [1, 1]]), "each in one group"),
        (group(lanes=[1, 256]), "lanes is not two integers"),
        (group(amsgrad=1), "amsgrad is not true or false"),
        (changed(kind="sgd", groups=[{**GOOD["groups"][0], "amsgrad": True}]), "without amsgrad"),
        (group(nesterov=True), "without nesterov"),
    ],
)
def test_bad_data_is_refused_and_the_key_named(data, message):
    with pytest.raises(CorruptCheckpoint, match=message):
        OptimizerSpec.from_data(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(sorted(GOOD)), inner=st.sampled_from(sorted(GOOD["groups"][0])), value=JSON)
def test_no_data_makes_another_error(key, inner, value):
    for data in (changed(**{key: value}), group(**{inner: value}), value):
        try:
            spec = OptimizerSpec.from_data(data)
        except CorruptCheckpoint:
            continue
        assert OptimizerSpec.from_data(spec.to_data()) == spec


def test_what_rules_must_carry():
    lanes = GroupSpec((0,), lanes=0xEE)
    assert OptimizerSpec("adam", "fused", "cuda", (lanes,), 1, "").needs_alignment
    assert not OptimizerSpec("adam", "fused", "cuda", (GroupSpec((0,), lanes=0),), 1, "").needs_alignment
    for kind, implementation, arithmetic, needed in (
        ("adam", "fused", "cuda", True),
        ("adamw", "foreach", "cuda", False),
        ("adamw", "fused", "cpu", False),
        ("sgd", "fused", "cuda", False),
    ):
        assert OptimizerSpec(kind, implementation, arithmetic, (GroupSpec((0,)),), 1, "").needs_powers is needed
