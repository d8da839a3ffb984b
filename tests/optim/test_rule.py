"""The numbers of one update, as data, to the bit."""

import copy
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import ConfigError, CorruptCheckpoint
from lastgood.optim.rule import ClipNorm, ClipValue, GroupRule, UpdateRule

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
GROUPS = st.builds(
    GroupRule,
    lr=NUMBERS,
    tensor_lr=st.sampled_from(["", "float32", "float64"]),
    betas=st.tuples(NUMBERS, NUMBERS),
    eps=NUMBERS,
    weight_decay=NUMBERS,
    momentum=NUMBERS,
    dampening=NUMBERS,
    powers=st.lists(st.tuples(st.integers(1, 1 << 24), NUMBERS, NUMBERS), max_size=3).map(tuple),
)
RULES = st.builds(
    UpdateRule,
    groups=st.lists(GROUPS, max_size=3).map(tuple),
    inverse_scale=st.none() | NUMBERS,
    grad_scale=st.none() | NUMBERS.filter(bool),
    clip=st.none()
    | st.builds(ClipNorm, coefficient=NUMBERS, dtype=st.sampled_from(["float32", "bfloat16"]))
    | st.builds(ClipValue, limit=st.floats(0, 1e300)),
    unaligned=st.sets(st.integers(0, 1000), max_size=4).map(lambda some: tuple(sorted(some))),
)


@given(RULES)
def test_data_comes_back_to_the_bit(rule):
    again = UpdateRule.from_data(json.loads(json.dumps(rule.to_data())))
    assert again == rule
    for one, two in zip(rule.groups, again.groups, strict=True):
        assert one.lr.hex() == two.lr.hex()  # -0.0 == 0.0, and is another number


def test_hyperparameters_are_those_of_the_step():
    parameters = [torch.zeros(2), torch.zeros(2)]
    groups = [
        {"params": parameters[:1], "lr": 0.1},
        {"params": parameters[1:], "weight_decay": 0.2, "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-7)
    optimizer.param_groups[0]["lr"] *= 0.9
    rule = UpdateRule.of(optimizer, clip=ClipValue(1.0))
    assert rule.groups[0] == GroupRule(lr=0.1 * 0.9, betas=(0.9, 0.999), eps=1e-7, weight_decay=1e-2)
    assert rule.groups[1] == GroupRule(lr=1e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2)
    sgd = UpdateRule.of(torch.optim.SGD(parameters, lr=torch.tensor(0.3), momentum=0.5, dampening=0.25))
    assert sgd.groups[0] == GroupRule(lr=float(torch.tensor(0.3)), tensor_lr="float32", momentum=0.5, dampening=0.25)


@pytest.mark.parametrize("key, value", [("lr", math.nan), ("weight_decay", math.inf), ("lr", torch.tensor(math.inf))])
def test_numbers_that_no_training_survives_are_refused(key, value):
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ConfigError, match=f"{key} of a parameter group is"):
        UpdateRule.of(optimizer)


GOOD = UpdateRule((GroupRule(0.1, powers=((1, 0.9, 0.99),)),), clip=ClipNorm(0.5)).to_data()


def changed(**change):
    return {**copy.deepcopy(GOOD), **change}


def group(**change):
    return changed(groups=[{**GOOD["groups"][0], **change}])


@pytest.mark.parametrize(
    "data, message",
    [
        ("x", "an update: not a JSON object"),
        (changed(groups=[1]), "an update's group: not a JSON object"),
        (changed(clip_value="0x1p0"), "clip_value is not allowed beside clip_norm"),
        (changed(clip_norm=["0x1p0"]), "clip_norm is not a number and a dtype"),
        (changed(clip_norm=["0x1p0", "int8"]), "dtype is not one of"),
        ({"groups": [], "clip_value": "-0x1p0"}, "clip_value is not a number from 0"),
        (changed(grad_scale="0x0p0"), "grad_scale is not a number other than 0"),
        (changed(grad_scale="inf"), "grad_scale is not a finite number"),
        (changed(inverse_scale="x"), "inverse_scale is not a number in hexadecimal"),
        (changed(inverse_scale="0x1p99999"), "inverse_scale is not a number in hexadecimal"),
        (changed(unaligned=[2, 1]), "unaligned is not a rising list"),
        (changed(unaligned=[-1]), "unaligned is not an integer from 0"),
        (group(lr=0.1), "lr is not a number in hexadecimal"),
        (group(lr="0x" + "1" * 50 + "p0"), "lr is not a number in hexadecimal"),
        (group(betas=["0x1p0"]), "betas is not 2 numbers"),
        (group(powers=[[0, "0x1p0", "0x1p0"]]), "powers is not an integer from 1"),
        (group(powers=[[1, "0x1p0", "0x1p0"]] * 65), "powers is not a list of at most 64"),
        (group(powers=[[1]]), "powers is not rows"),
        (group(tensor_lr="int8"), "tensor_lr is not one of"),
    ],
)
def test_bad_data_is_refused_and_the_key_named(data, message):
    with pytest.raises(CorruptCheckpoint, match=message):
        UpdateRule.from_data(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["0x1p0", "nan", "float32", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["groups", "inverse_scale", "grad_scale", "clip_norm", "clip_value", "unaligned"]


@given(key=st.sampled_from(KEYS), inner=st.sampled_from(["lr", "betas", "powers", "tensor_lr", "eps"]), value=JSON)
def test_no_data_makes_another_error(key, inner, value):
    for data in (changed(**{key: value}), group(**{inner: value}), value):
        try:
            rule = UpdateRule.from_data(data)
        except CorruptCheckpoint:
            continue
        assert UpdateRule.from_data(rule.to_data()).to_data() == rule.to_data()
