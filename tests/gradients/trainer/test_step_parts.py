"""An iteration whose optimizer steps in parts, as ZeRO's does: torch steps the parts, a shadow repeats them as one."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.tap.step import StepTap
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.step_parts import OpenUpdate, Part
from lastgood.gradients.trainer.updates import Shares, UpdateNotes
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import MAX_POWERS, ClipValue, GroupRule, UpdateRule
from lastgood.optim.spec import OptimizerSpec


class Sent:
    """In a stream's place: keeps what is sent, and where it belongs."""

    def __init__(self, layout):
        self.layout = layout
        self.iteration = 1
        self.spans = []

    def send(self, iteration, spans, address, *, borrowed, keep=None):
        assert iteration == self.iteration and not borrowed
        for span in spans:
            self.spans.append((span, ctypes.string_at(address + span.source, span.nbytes)))
        return []

    def take(self):
        """The bytes of every bucket; each must have been sent once."""
        held = [bytearray(bucket.nbytes) for bucket in self.layout.buckets]
        times = [bytearray(bucket.nbytes) for bucket in self.layout.buckets]
        for span, content in self.spans:
            assert span.dtype == self.layout.buckets[span.bucket].dtype
            held[span.bucket][span.offset : span.offset + span.nbytes] = content
            for at in range(span.offset, span.offset + span.nbytes):
                times[span.bucket][at] += 1
        assert all(set(one) <= {1} for one in times)
        self.spans = []
        return held


class Moved:
    """In a device mover's place: what it is given lies one after another, in memory of its own."""

    def __init__(self, sent):
        self.sent = sent

    def move(self, iteration, tensors, spans, base):
        content = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        assert sum(span.nbytes for span in spans) == len(content)
        memory = ctypes.create_string_buffer(content, len(content))
        self.sent.send(iteration, spans, ctypes.addressof(memory) - base, borrowed=False)


@contextmanager
def reduced_to(optimizer, group, parameters, alone):
    """The optimizer as DeepSpeed makes it for one step: only one group in it, or only some parameters in the group."""
    groups = optimizer.param_groups
    whole = groups[group]["params"]
    groups[group]["params"] = parameters
    optimizer.param_groups = [groups[group]] if alone else groups
    yield
    groups[group]["params"] = whole
    optimizer.param_groups = groups


class Training:
    """`sizes` of parameters, by group; a shadow of it; and a second rank with the same parameters behind them."""

    def __init__(self, kind, sizes, bucket_bytes, moved=False):
        torch.manual_seed(1)
        groups = [[torch.randn(size).requires_grad_() for size in group] for group in sizes]
        numbers = [{"lr": 0.1 / (number + 1), "weight_decay": 0.1 * number} for number in range(len(sizes))]
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer = kind([{"params": one, **more} for one, more in zip(groups, numbers, strict=True)], **options)
        self.tracked = TrackedParameters({"optimizer": self.optimizer})
        self.parameters = self.tracked.parameters
        self.spec = OptimizerSpec.of(self.optimizer)
        count = len(self.parameters)
        self.notes = UpdateNotes({}, self.tracked, self.spec, reduced=False, shares=Shares((0, count)))
        declared = self.tracked.declared()
        layout = plan_layout(declared, self.spec.to_data(), ranks=1, shadows=1, bucket_bytes=bucket_bytes)
        self.sent = Sent(layout)
        self.tap = StepTap(self.sent, self.tracked, 0, Moved(self.sent) if moved else None)
        self.shadow = [one.detach().clone() for one in self.parameters]
        group_of = self.spec.group_of()
        self.dense = DenseOptimizer(self.spec, self.shadow, [group_of[index] for index in range(count)])

    def iterate(self, calls, early):
        """One iteration: `calls` are (group, parameters of it).

        Gradients are there all the time (`early`), or for their call only.
        """
        self.notes.begin_iteration()
        self.tap.begin()
        stepped = {}
        if early:
            for one in self.parameters:
                one.grad = torch.randn_like(one)
        for group, indices in calls:
            for index in indices:
                if not early:
                    self.parameters[index].grad = torch.randn_like(self.parameters[index])
                stepped[index] = self.parameters[index].grad
            alone = early or len(indices) == len(self.spec.groups[group].parameters)
            with reduced_to(self.optimizer, group, [self.parameters[index] for index in indices], alone):
                part = self.notes.look()
                assert part.fault is None and part.stepped == set(indices)
                assert self.notes.takes(part)
                self.notes.add(part)
                assert self.tap.send(part.stepped) == (len(stepped) == len(self.parameters))
                self.optimizer.step()
            for index in indices:
                self.parameters[index].grad = None
        self.tap.finish()
        self.optimizer.zero_grad()
        self._repeat(stepped)

    def _repeat(self, stepped):
        update = self.notes.update()
        sent = self.sent.take()
        for index, declared in enumerate(self.sent.layout.parameters):
            content = bytes(sent[declared.bucket][declared.offset : declared.offset + declared.nbytes])
            expected = stepped.get(index, torch.zeros_like(self.parameters[index]))
            assert content == expected.detach().numpy().tobytes()
        count = len(self.parameters)
        if not stepped:
            assert update.rule is None and update.absent == ()
            return
        absent = set(range(count)) - stepped.keys()
        assert set(update.absent) == absent  # the other rank says its own
        rule = UpdateRule.from_data(update.rule)
        mine = len(self.spec.groups)
        assert rule.groups[:mine] == rule.groups[mine:]  # the other rank's
        gradients = [stepped.get(index) if index not in absent else None for index in range(count)]
        self.dense.step(gradients, UpdateRule(rule.groups[:mine]))

    def assert_equal(self):
        for mine, theirs, state in zip(self.shadow, self.parameters, self.dense.state(), strict=True):
            assert torch.equal(mine, theirs.detach())
            live = {key: value for key, value in self.optimizer.state.get(theirs, {}).items() if value is not None}
            assert state.keys() == live.keys() and all(torch.equal(state[key], live[key]) for key in live)


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


def part(stepped, groups, rule):
    return Part(rule, frozenset(stepped), frozenset(groups))


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
    assert update.takes(Part(None))  # an overflow changes nothing
    update.add(Part(None))
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
