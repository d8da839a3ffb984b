"""Suggestions to trainings that shadows keep, followed to the letter: what ring, hook and optimizer need."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

from lastgood.checkpointers.checkmate.incarnation import _takes_buckets
from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.checkpointers.checkmate.ring import check_ring
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.cli import app
from lastgood.cli.train import _ask
from lastgood.gradients.shadow.launch_env import find_place
from lastgood.gradients.shadow.rendezvous import Rendezvous
from lastgood.gradients.tap.bucket import BucketTap
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.optim import trainer
from lastgood.optim.trainer import RuleMaker
from lastgood.ports import free_ports
from tests.checkpointers.support.ring_parts import TapOf, ring_options, tracked_of
from tests.gradients.support.shadow_processes import shadow_threads
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


@follows('spread over ranks (DTensor); tap="step" follows them')
def test_parameters_that_are_spread(one_rank):
    model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    tracked = TrackedParameters({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    message = refusal(lambda: _takes_buckets(CheckmateOptions(tap="bucket"), BucketTap(), tracked))
    other = eval(f"CheckmateOptions({advice(message, r'tap=.step.')})", {"CheckmateOptions": CheckmateOptions})
    assert not _takes_buckets(other, BucketTap(), tracked)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@follows("give --shadow in the shadows' order")
def test_the_order_of_shadows(tmp_path):
    with shadow_threads(tmp_path, 2) as shadows:
        first, second = (one.address for one in shadows)
        ring = f"127.0.0.1:{free_ports(1)[0]}"
        words = [
            "switch",
            "--check",
            "--link",
            f"127.0.0.1:1={ring}",
            "--token-file",
            str(tmp_path / "token"),
            "--json",
        ]

        def found(*order):
            given = [word for address in order for word in ("--shadow", address)]
            rows = json.loads(CliRunner().invoke(app, ["shadow", *words, "--timeout", "10", *given]).stdout)
            return [row for row in rows if row["what"].startswith("shadow ")]

        told = [hear(row["found"]) for row in found(second, first)]
        places = [int(advice(one, r"it is shadow (\d) of 2")) for one in told]
        assert [row["good"] for row in found(*([second, first][places.index(at)] for at in (0, 1)))] == [True, True]


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


@follows("close() the checkpointer and start it again, and shadows follow them")
def test_an_optimizer_that_got_another_parameter():
    training = Training(torch.optim.SGD, [[3], [5]], 64)
    training.optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    training.parameters[0].grad = torch.ones(3)
    advice(hear(training.notes.look().fault), r"close\(\) the checkpointer and start it again")
    anew = Training(torch.optim.SGD, [[3], [5], [2]], 64)  # what a new start tracks
    anew.parameters[2].grad = torch.ones(2)
    assert anew.notes.look().fault is None


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
