"""Suggestions to trainings that shadows keep, followed to the letter: what ring, hook and optimizer need."""

from __future__ import annotations

import torch

from lastgood.checkpointers.checkmate.incarnation import _takes_buckets
from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.checkpointers.checkmate.ring import check_ring
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.cli.train import _ask
from lastgood.gradients.shadow.launch_env import find_place
from lastgood.gradients.shadow.rendezvous import Rendezvous
from lastgood.gradients.tap.bucket import BucketTap
from lastgood.optim import trainer
from lastgood.optim.trainer import RuleMaker
from lastgood.ports import free_ports
from tests.checkpointers.support.ring_parts import TapOf, ring_options, tracked_of
from tests.gradients.support.step_training import Training
from tests.optim.cuda_spec import as_cuda
from tests.suggestions.following import advice, follows, hear, refusal

Checkmate = checkpointer_class("checkmate")


@follows(
    "needs two ranks or more; a single one has nothing to reduce",
    "reduces over {} ranks, and the ring has {}",
    "the ring reduces {} on the CPU",
)
def test_what_the_ring_reduces():
    advice(refusal(lambda: check_ring(ring_options(), tracked_of(), TapOf(1), 1)), "two ranks or more")
    advice(refusal(lambda: check_ring(ring_options(), tracked_of(), TapOf(1), 2)), "its process group is all ranks")
    check_ring(ring_options(), tracked_of(), TapOf(2), 2)
    message = refusal(lambda: check_ring(ring_options(), tracked_of(dtype=torch.complex64), TapOf(2), 2))
    other = eval(f"CheckmateOptions({advice(message, r'use (tap=.bucket.)')})", {"CheckmateOptions": CheckmateOptions})
    assert _takes_buckets(other, BucketTap(), tracked_of(dtype=torch.complex64))


@follows(
    "and no hook is registered: call checkpointer.watch(model)", 'spread over ranks (DTensor); tap="step" follows them'
)
def test_hooks_that_the_tap_needs(tmp_path):
    tracked = tracked_of()
    message = refusal(lambda: _takes_buckets(CheckmateOptions(tap="bucket"), None, tracked))
    checkpointer, model = Checkmate(tmp_path, tap="bucket"), Watched()
    eval(advice(message, r"call (checkpointer\.watch\(model\))"), {"checkpointer": checkpointer, "model": model})
    assert _takes_buckets(CheckmateOptions(tap="bucket"), checkpointer._tap, tracked)
    tracked.spread = True
    message = refusal(lambda: _takes_buckets(CheckmateOptions(tap="bucket"), BucketTap(), tracked))
    other = eval(f"CheckmateOptions({advice(message, r'tap=.step.')})", {"CheckmateOptions": CheckmateOptions})
    assert not _takes_buckets(other, BucketTap(), tracked)


class Watched:
    """What `watch` asks of DistributedDataParallel."""

    process_group = None
    gradient_as_bucket_view = False

    def register_comm_hook(self, state, hook):
        pass

    def register_forward_hook(self, hook):
        pass


@follows("different numbers of steps, and an update tells at most")
def test_parameters_that_step_seldom(monkeypatch):
    monkeypatch.setattr(trainer, "MAX_POWERS", 2)

    def rules(*group_sizes, **options):
        groups = [{"params": [torch.ones(4, requires_grad=True) for _ in range(size)]} for size in group_sizes]
        optimizer = torch.optim.AdamW(groups, **options)
        parameters = [one for group in groups for one in group["params"]]
        for done in (1, 2, 3):
            for i, p in enumerate(parameters):
                p.grad = torch.ones(4) if i < done else None
            optimizer.step()
        for p in parameters:
            p.grad = torch.ones(4)
        if "foreach" in options:  # its arithmetic is told without the counts
            return RuleMaker(optimizer, trainer.OptimizerSpec.of(optimizer)).make()
        return RuleMaker(optimizer, as_cuda(optimizer)).make()

    message = refusal(lambda: rules(3, fused=True))
    assert rules(3, **eval(f"dict({advice(message, r'foreach=True')})"))
    advice(message, "give those that seldom have gradients a group of their own")
    assert rules(2, 1, fused=True)


@follows("or in other groups; close() the checkpointer, and start it again after such a change")
def test_parameters_in_other_groups():
    optimizer = torch.optim.SGD([{"params": [torch.ones(4, requires_grad=True)]}], lr=0.1)
    rules = RuleMaker(optimizer, trainer.OptimizerSpec.of(optimizer))
    optimizer.param_groups[0]["params"].append(torch.ones(4, requires_grad=True))
    advice(refusal(rules.make), r"close\(\) the checkpointer, and start it again")
    assert RuleMaker(optimizer, trainer.OptimizerSpec.of(optimizer)).make()


@follows("close() the checkpointer and start it anew, and shadows follow them")
def test_an_optimizer_that_got_another_parameter():
    training = Training(torch.optim.SGD, [[3], [5]], 64)
    training.optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    training.parameters[0].grad = torch.ones(3)
    advice(hear(training.notes.look().fault), r"close\(\) the checkpointer and start it anew")
    anew = Training(torch.optim.SGD, [[3], [5], [2]], 64)  # what a new start tracks
    anew.parameters[2].grad = torch.ones(2)
    assert anew.notes.look().fault is None


@follows("checkmate: start(state) or attach(...) must be called first")
def test_clipping_before_the_start(tmp_path):
    refusal(lambda: Checkmate(tmp_path).clip_grad_norm_([], 1.0))


@follows("{} is no HOST:PORT of shadows' store; give --shadow, --shadows-at")
def test_where_shadows_are(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    message = refusal(lambda: _ask(None, 1, 5.0))
    advice(message, "give --shadow, --shadows-at, or MASTER_ADDR and MASTER_PORT")
    port = free_ports(1)[0]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with_store = Rendezvous(place, find_place(None, 1, None, {}), 5.0)
    with_store.exchange(0, "127.0.0.1:29400")
    assert _ask(f"127.0.0.1:{port}", 1, 5.0) == ["127.0.0.1:29400"]
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert _ask(None, 1, 5.0) == ["127.0.0.1:29400"]
