"""What messages about mirrors, job descriptions and conversations suggest, followed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cluster.testbed.monitor import remove_monitor
from lastgood.cluster.testbed.testbed import Testbed, why_no_testbed
from lastgood.mirror.conversation.gloo import GlooConversation
from lastgood.mirror.job.description import read_job
from lastgood.mirror.job.factory import Training
from lastgood.mirror.setup.switches import switch_commands
from tests.mirror.support.ddp_life import Life
from tests.mirror.support.gloo_sends import heads
from tests.mirror.support.small_job import small_job
from tests.mirror.support.watcher import Watcher
from tests.suggestions.following import advice, follows, hear, refusal
from tests.suggestions.source_texts import ROOT


def small_training() -> Training:
    """A factory, as a training script has one."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Training(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100))


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")


def lastgood(line: str) -> str:
    """What a call says that must succeed."""
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, (done.output, done.exception)
    return hear(done.output)


def refused(line: str) -> str:
    """What an unsuccessful call says."""
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code != 0, done.output
    return hear(str(done.exception))


@follows(
    "`lastgood mirror describe` makes one",
    "the job description tells hyperparameters of {} steps, and step {} comes: make it again with a larger --steps",
)
def test_a_job_description_and_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    command = advice(refusal(lambda: read_job(path)), r"`lastgood (mirror describe)` makes one")
    path.write_text("{}")  # nor of something else
    assert command == advice(refusal(lambda: read_job(path)), r"`lastgood (mirror describe)` makes one")
    command += f" --ranks 2 --factory tests.suggestions.test_mirrors:small_training --out {path}"
    lastgood(f"{command} --steps 3")
    assert read_job(path).rules.rule(2)
    option = advice(refusal(lambda: read_job(path).rules.rule(3)), r"with a larger (--steps)")
    lastgood(f"{command} {option} 4")
    assert read_job(path).rules.rule(3)


@follows("name at least one port of a watched rank with --watch")
def test_a_switch_mirrors_at_least_one_port() -> None:
    option = advice(refusal(lambda: switch_commands("arista", [], "Ethernet1/9")), "with (--watch)")
    assert "source Ethernet1/1 both" in lastgood(
        f"mirror commands --switch arista --to Ethernet1/9 {option} Ethernet1/1"
    )


@follows("the training's traffic is that of {}, and {} is watched: compare --watch with where the mirror is")
def test_another_rank_is_mirrored_than_is_said_to_be_watched() -> None:
    life = Life(small_job(), steps=2, seed=1)

    def watch(address: str) -> Watcher:
        found = Watcher(GlooConversation(life.job, [address]), life, [0])
        found.batch(heads(life, 1))
        found.finish()
        return found

    (message,) = watch("10.0.0.99").contradictions
    where = advice(hear(message), r"traffic is that of (\S+?),")
    right = watch(where)
    assert right.contradictions == [] and right.whole_steps() == {0, 1}


@pytest.fixture
def bed() -> Iterator[Testbed]:
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    with Testbed.up(2, name=f"f{os.getpid()}", guarded=True) as made:
        yield made


@pytest.mark.slow  # every day tests/mirror/setup has real mirrors
@pytest.mark.root
@follows(
    "testbed {} mirrors nothing to {}; `lastgood mirror setup` makes a mirror",
    "testbed {} mirrors to {}: name one with --to, or make it with mirror setup",
    "a monitor watches other nodes than itself, and at least one: give --watch, not {}",
    "--undo removes all that is mirrored to a node; it takes no --watch and no --split",
    "testbed {}: {}, both ways, to {} of {}; try it: lastgood mirror check --testbed {}",
    "testbed {}: what {} {} is not mirrored to {} now; restart what was killed, or run `lastgood mirror setup` again",
)
def test_the_life_of_a_mirror(bed: Testbed) -> None:
    at = f"--testbed {bed.name}"
    setup = advice(refusal(lambda: bed.count_mirrored("vm2")), r"`lastgood (mirror setup)`")
    assert advice(refused(f"mirror check {at}"), r"or make it with (mirror setup)") == setup
    option = advice(refused(f"{setup} {at} --to vm2"), r"give (--watch)")
    said = lastgood(f"{setup} {at} --to vm2 {option} vm1")
    lastgood(advice(said, r"try it: lastgood (mirror check --testbed \w+)"))
    # Several.
    lastgood(f"{setup} {at} --to vm1 --watch vm2")
    option = advice(refused(f"mirror check {at}"), r"name one with (--to)")
    lastgood(f"mirror check {at} {option} vm2")
    # A node is killed, and what mirrors is lost.
    counters = f"mirror check {at} --to vm2 --counters"
    bed.kill("vm1")
    advice(refused(counters), "restart what was killed")
    bed.restart("vm1")
    lastgood(counters)
    remove_monitor(bed.settings, "vm2")
    lastgood(advice(refused(counters), r"run `lastgood (mirror setup)` again") + f" {at} --to vm2 --watch vm1")
    lastgood(counters)
    # The end.
    advice(refused(f"{setup} {at} --to vm2 --watch vm1 --undo"), "takes no --watch and no --split")
    lastgood(f"{setup} {at} --to vm2 --undo")
    assert [one.node for one in bed.monitors()] == ["vm1"]
