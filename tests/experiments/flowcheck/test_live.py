"""The parts of FlowCheck's figure that train on a testbed, at their smallest: iterations, and lives with a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.experiments.flowcheck.execute import execute_flowcheck
from lastgood.experiments.flowcheck.steps import read_steps
from lastgood.experiments.records.flowcheck import WATCHED, GptShape, LivesSettings, StagesSettings, TrainingSettings
from tests.experiments.support.flowcheck_records import spec_of

SHAPE = GptShape(vocabulary=256, width=32, heads=2, blocks=1, length=16, batch=1)
TRAINING = TrainingSettings(shape=SHAPE, ranks=2, rate=None, threads=1, systems=("sync",), warmup=1, steps=4, rounds=1)
ON_A_TESTBED = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.measures,
    pytest.mark.skipif(why_no_testbed() is not None, reason="no testbed here"),
]


def executed(part: str, settings: Any, folder: Path) -> Any:
    return execute_flowcheck(spec_of(part, settings=settings), folder, folder, folder / "logs", lambda _: None)


@pytest.mark.parametrize("part", [pytest.param("training", marks=ON_A_TESTBED)])
def test_a_mirror_node_holds_the_last_step_of_a_training_that_knows_nothing_of_it(part: str, tmp_path: Path) -> None:
    record = executed(part, TRAINING, tmp_path)
    blocks = {block.variant: block for block in record.result.blocks}
    assert set(blocks) == {"none", "mirror", WATCHED, "sync"}
    assert blocks[WATCHED].held_step == 5
    assert blocks["mirror"].mirrored_frames and blocks["none"].mirrored_frames is None
    assert record.marks() == []


@pytest.mark.parametrize("part", [pytest.param("stages", marks=ON_A_TESTBED)])
def test_the_clocks_of_a_mirror_node_are_read_beside_the_steps(part: str, tmp_path: Path) -> None:
    record = executed(part, StagesSettings(training=TRAINING, widths=(16, 32)), tmp_path)
    assert record.marks() == []
    assert [block.width for block in record.result.blocks] == [16, 32]
    assert record.result.blocks[0].parameters < record.result.blocks[1].parameters
    for block in record.result.blocks:
        assert len(block.iteration_s) == 4 and block.last.steps == 5
        assert all(seconds > 0 for seconds in block.step_s.values()), block.step_s
        assert max(block.step_s["parse"], block.step_s["update"]) < 30


@pytest.mark.parametrize("part", [pytest.param("lives", marks=ON_A_TESTBED)])
def test_a_killed_training_goes_on_from_the_mirror_node_with_the_losses_of_before(part: str, tmp_path: Path) -> None:
    settings = LivesSettings(
        training=TRAINING,
        window_s=10.0,
        failures_s=(5.0,),
        trace_name="made up",
        trace_sha256="0" * 64,
        trace_s=1000.0,
        trace_failures=1,
    )
    record = executed(part, settings, tmp_path)
    assert record.marks() == []
    watched = next(window for window in record.result.windows if window.variant == WATCHED)
    first, second = watched.lives
    assert second.restored_step > 0 and second.last_step > second.restored_step
    assert first.last_step - second.restored_step <= 2


def test_what_rank_0_wrote_is_read_as_far_as_it_was_written(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "none").ready is None
    path = tmp_path / "steps"
    path.write_text("ready 1.5\nrestored 3 2.5\n3 0.25 0x1.8p+1 2.75\n4 0.25 0x1.")
    life = read_steps(path)
    assert (life.ready, life.restored, life.restored_step) == (1.5, 2.5, 3)
    assert [(step.number, step.loss, step.ended) for step in life.steps] == [(3, "0x1.8p+1", 2.75)]
