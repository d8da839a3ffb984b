"""An unmodified DDP training is followed from mirrored frames, killed at random, and goes on: with the same losses.

Real ranks over Gloo on a testbed; the node is a process of its own that sees only what `mirror setup` copies to it.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from lastgood.cluster.testbed.testbed import why_no_testbed
from tests.mirror.support.followed_bed import STEPS, followed_bed, losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_no_testbed() is not None, reason=why_no_testbed() or ""),
]
CASES = [(2, "norm", ""), (2, "adamw", "bf16"), (3, "norm", "bf16"), (3, "adamw", "")]


@pytest.mark.parametrize(("ranks", "kind", "hook"), CASES)
def test_a_training_goes_on_from_what_its_packets_told(ranks: int, kind: str, hook: str, tmp_path: Path) -> None:
    chance = random.Random(f"{ranks} {kind} {hook}")
    with followed_bed(ranks, tmp_path, kind, hook) as bed:
        bed.train(tmp_path / "plain")
        bed.wait()
        truth = dict(losses(tmp_path / "plain"))
        bed.start_node()
        kept = tmp_path / "kept"
        begun = []
        for _ in range(2):
            before = len(losses(kept))
            bed.train(kept, flowcheck=bed.flowcheck, pause_s=0.02)
            bed.wait_steps(kept, before + 5)
            time.sleep(chance.uniform(0.0, 0.15))
            bed.kill()
            begun.append(losses(kept)[before][0])
        bed.train(kept, flowcheck=bed.flowcheck)
        before = len(losses(kept))
        bed.wait()
        begun.append(losses(kept)[before][0])
        made = losses(kept)
        assert begun[0] == 1 and begun[1] > 3 and begun[2] > begun[1] + 2, f"lives began at steps {begun}"
        assert [one for one in made if truth[one[0]] != one[1]] == []
        assert {step for step, _ in made} == set(range(1, STEPS + 1))
        bed.wait_node(lambda status: status.stands == "follows", "a node that follows to the end")
        counts = bed.bed.count_mirrored(bed.watcher)
        assert all(one.frames > 0 and one.dropped == one.link_dropped == 0 for one in counts), counts
