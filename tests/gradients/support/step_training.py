"""A training whose optimizer steps in parts, with what is sent of it kept."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

import torch

from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.tap.step import StepTap
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.step_parts import StepPart
from lastgood.gradients.trainer.updates import Shares, UpdateNotes
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import UpdateRule
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


def part(stepped, groups, rule):
    return StepPart(rule, frozenset(stepped), frozenset(groups))
