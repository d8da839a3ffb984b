"""An iteration whose optimizer steps in parts, as ZeRO's does: torch steps the parts, a shadow repeats them as one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.gradients.trainer.step_parts import OpenUpdate, StepPart
from lastgood.gradients.trainer.updates import Shares, UpdateNotes
from lastgood.optim.rule import MAX_POWERS, ClipValue, GroupRule, UpdateRule
from tests.gradients.support.step_training import Training, part, reduced_to


@st.composite
def iterations(draw):
    """Groups of parameters, and for some iterations the parts in which they are stepped; some are left out."""
    sizes = draw(st.lists(st.lists(st.sampled_from([1, 3, 8, 17]), min_size=1, max_size=4), min_size=1, max_size=3))
    firsts = [sum(map(len, sizes[:number])) for number in range(len(sizes))]
    found = []
    for _ in range(draw(st.integers(1, 4))):
        calls = []
        for group, members in enumerate(sizes):
            rest = list(range(firsts[group], firsts[group] + len(members)))
            while rest and draw(st.integers(0, 5)):
                cut = draw(st.integers(1, len(rest)))
                calls.append((group, rest[:cut]))
                rest = rest[cut:]
        found.append(draw(st.permutations(calls)))
    return draw(st.sampled_from([torch.optim.AdamW, torch.optim.SGD])), sizes, found


@settings(deadline=None, max_examples=60)
@given(iterations(), st.sampled_from([16, 64, 4096]), st.booleans(), st.booleans())
def test_a_shadow_repeats_parts_as_one_update(made, bucket_bytes, early, moved):
    kind, sizes, found = made
    training = Training(kind, sizes, bucket_bytes, moved)
    for number, calls in enumerate(found):
        for group in training.optimizer.param_groups:  # a schedule
            group["lr"] *= 0.9
        training.sent.iteration = number + 1
        training.iterate(calls, early)
    training.assert_equal()


def rule_of(*groups, **more):
    return UpdateRule(tuple(GroupRule(lr=lr, powers=powers) for lr, powers in groups), **more)


def test_what_steps_a_parameter_again_or_by_other_numbers_is_another_update():
    first = rule_of((0.1, ()), (0.5, ()))
    update = OpenUpdate()
    update.add(part([0, 1], [0], first))
    assert not update.takes(part([1], [0], first))
    with pytest.raises(ValueError, match="stepped twice"):
        update.add(part([1], [0], first))
    assert not update.takes(part([2], [0], rule_of((0.2, ()), (0.5, ()))))
    assert not update.takes(part([2], [0], rule_of((0.1, ()), (0.5, ()), clip=ClipValue(1.0))))
    assert not update.takes(part([2], [0], rule_of((0.1, ()), (0.5, ()), grad_scale=2.0)))
    assert update.takes(part([2], [0], first))
    # The numbers of a group that was not stepped may have changed since.
    update.add(part([3], [1], rule_of((0.9, ()), (0.6, ()))))
    assert update.rule == rule_of((0.1, ()), (0.6, ())) and update.stepped == {0, 1, 3}
    assert not update.takes(part([4], [1], first))
    assert update.takes(StepPart(None))  # an overflow changes nothing
    update.add(StepPart(None))
    assert update.rule == rule_of((0.1, ()), (0.6, ()))


def test_counts_of_steps_and_places_off_the_vectors_are_told_of_all_parts():
    update = OpenUpdate()
    update.add(part([0], [0], rule_of((0.1, ((3, 0.3, 0.4),)), unaligned=(0,))))
    update.add(part([1], [0], rule_of((0.1, ((2, 0.1, 0.2), (3, 0.3, 0.4))), unaligned=(1,))))
    assert update.rule == rule_of((0.1, ((2, 0.1, 0.2), (3, 0.3, 0.4))), unaligned=(0, 1))
    many = tuple((10 + step, 0.5, 0.5) for step in range(MAX_POWERS - 1))
    assert not update.takes(part([2], [0], rule_of((0.1, many))))
    assert update.takes(part([2], [0], rule_of((0.1, many[1:]))))


def test_an_optimizer_that_got_another_parameter_fails_its_steps():
    training = Training(torch.optim.SGD, [[3], [5]], 64)
    training.optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    training.parameters[0].grad = torch.ones(3)
    found = training.notes.look()
    assert found.rule is None and "parameters that it had not when checkpointing began" in found.fault


def test_a_rank_names_its_own_parameters_that_were_left_alone():
    training = Training(torch.optim.SGD, [[3], [5]], 64)
    notes = UpdateNotes({}, training.tracked, training.spec, reduced=False, shares=Shares((0, 2), alike=False, rank=1))
    training.parameters[1].grad = torch.ones(5)
    notes.add(notes.look())
    update = notes.update()
    assert update.absent == (0,) and len(update.rule["groups"]) == 4


def test_a_step_that_cannot_be_told_is_counted_once_the_optimizer_is_whole_again():
    training = Training(torch.optim.AdamW, [[3], [5]], 64)
    notes, optimizer = training.notes, training.optimizer
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], float("nan")
    for one in training.parameters:
        one.grad = torch.ones_like(one)
    notes.begin_iteration()
    assert "lr of a parameter group is nan" in notes.look().fault
    optimizer.param_groups[0]["lr"] = rate
    with reduced_to(optimizer, 1, training.parameters[1:], True):  # ZeRO, in the midst of its parts
        assert "could not be told" in notes.look().fault
        assert notes.update().rule is None
        assert "could not be told" in notes.look().fault
    assert notes.update().rule is None
    notes.begin_iteration()
    part = notes.look()
    assert part.fault is None and part.stepped == {0, 1}
