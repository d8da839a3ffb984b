"""A mirror node as a process of its own, on bad days: its link fails, it is killed, a state comes from elsewhere.

Real ranks over Gloo on a testbed, as in test_end_to_end.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.tokens import read_token
from tests.mirror.support.followed_bed import FollowedBed, followed_bed, losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_no_testbed() is not None, reason=why_no_testbed() or ""),
]
STEPS = 400
"""More than are ever made: trainings are killed."""


def go_blind(bed: FollowedBed, kept: Path) -> int:
    """The link to the node is down for some steps; returns how many were made when it is up again."""
    bed.wait_node(lambda status: bool(status.held) and status.iteration >= 5, "a node that follows")
    with bed.mirror_down():
        bed.wait_steps(kept, len(losses(kept)) + 3)
    bed.wait_node(lambda status: "blind since step" in status.blind, "a node that says that it is blind")
    made = len(losses(kept))
    assert max(bed.status().held, default=0) < made
    return made


def same_again(bed: FollowedBed, kept: Path, folder: Path, least: int, more: int = 5) -> None:
    """Kill the training, restore it, and compare some steps with those of a training that nothing disturbed."""
    bed.kill()
    before = len(losses(kept))
    bed.train(kept, steps=STEPS, flowcheck=bed.flowcheck)
    bed.wait_steps(kept, before + more)
    bed.kill()
    made = losses(kept)
    begun = made[before][0]
    assert begun > least, f"begun at step {begun} after {before} steps"
    bed.train(folder / "plain", steps=max(step for step, _ in made))
    bed.wait()
    truth = dict(losses(folder / "plain"))
    assert [one for one in made if truth[one[0]] != one[1]] == []


@pytest.mark.parametrize("way", ["agent", "folder", "asked"])
def test_a_blind_node_sees_again_from_a_state_that_comes_another_way(way: str, tmp_path: Path) -> None:
    with followed_bed(2, tmp_path, "norm" if way == "agent" else "adamw") as bed:
        options: dict[str, object] = {}
        node: list[str] = []
        saved = tmp_path / "saved"
        if way == "agent":
            port = f"{bed.bed.address(bed.watcher)}:7301"
            node = ["--agents", port]
            options["agent"] = {"node": port, "token_file": bed.flowcheck["token_file"], "digest_every": 0}
        else:
            options["save"] = str(saved)
            node = ["--resync-from", str(saved)] if way == "folder" else []
        bed.start_node(*node)
        kept = tmp_path / "kept"
        bed.train(kept, steps=STEPS, flowcheck=bed.flowcheck, pause_s=0.05, **options)
        blind = go_blind(bed, kept)
        if way == "asked":
            bed.run("resync", "--dir", str(tmp_path / "node"), "--from", str(saved))
        bed.wait_node(lambda status: status.stands == "follows" and max(status.held, default=0) > blind, "to see again")
        assert bed.status().counters["node"]["resyncs"] >= 1
        same_again(bed, kept, tmp_path, blind)


@pytest.mark.parametrize("way", ["agent", "folder"])
def test_a_node_that_is_started_in_mid_training_sees_again_from_two_states(way: str, tmp_path: Path) -> None:
    with followed_bed(2, tmp_path, "adamw") as bed:
        saved, kept = tmp_path / "saved", tmp_path / "kept"
        (tmp_path / "node").mkdir()
        read_token(tmp_path / "node" / "token", make=True)
        options: dict[str, object] = {"save": str(saved), "sync": True}
        node = ["--resync-from", str(saved)]
        if way == "agent":
            port = f"{bed.bed.address(bed.watcher)}:7301"
            node = ["--agents", port]
            options = {"agent": {"node": port, "token_file": bed.flowcheck["token_file"], "digest_every": 0}}
        bed.train(kept, steps=STEPS, pause_s=0.1, **options)
        bed.wait_steps(kept, 8)
        bed.start_node(*node)
        bed.wait_node(lambda status: "in the middle" in status.blind, "a node that says that it is blind")
        bed.wait_node(lambda status: status.stands == "follows" and len(status.held) > 0, "to see again")
        assert bed.status().counters["node"]["resyncs"] == 1
        same_again(bed, kept, tmp_path, 8)


def test_a_killed_node_gives_back_its_spill(tmp_path: Path) -> None:
    with followed_bed(2, tmp_path, "norm") as bed:
        kept = tmp_path / "kept"
        bed.start_node("--spill-every", "4")
        bed.train(kept, steps=STEPS, flowcheck=bed.flowcheck, pause_s=0.05)
        bed.wait_node(lambda status: len(status.durable) > 0 and status.iteration >= 10, "a spill")
        spilled = max(bed.status().durable)
        bed.kill_node()
        bed.wait_steps(kept, len(losses(kept)) + 3)
        bed.start_node("--spill-every", "4")
        # What was spilled is there; the training that still runs is not known.
        bed.wait_node(lambda status: "in the middle" in status.blind, "a node that says that it is blind")
        assert max(bed.status().durable) >= spilled
        same_again(bed, kept, tmp_path, spilled)
        bed.wait_node(lambda status: max(status.held, default=0) > spilled, "a node that follows again")
