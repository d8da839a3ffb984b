"""Gradients that are changed behind the tap: what shadows make of them is never given back, whoever dies when.

Two ranks in threads of this process; everything from DDP's hook on is real.
"""

from __future__ import annotations

import pytest
import torch

from lastgood.errors import CorruptCheckpoint, NoCheckpoint
from tests.gradients.support.fault_training import Life, on_all_ranks, raise_first, ranks_in_threads, reduce_gradients
from tests.gradients.support.fault_training import restore_afresh as restore
from tests.gradients.support.shadow_processes import shadow_threads


def train(life: Life, steps: list[bool], digests: dict[int, list[str]]) -> None:
    """A step for each entry of `steps`; True: what was reduced is changed before the update."""

    def run(rank: int) -> None:
        training, checkpointer = life.trainings[rank], life.checkpointers[rank]
        for meddle in steps:
            training.backward(life.data)
            reduce_gradients(training, checkpointer)
            if meddle:
                with torch.no_grad():
                    for parameter in training.parameters:
                        assert parameter.grad is not None
                        parameter.grad.mul_(0.5)
            training.update(checkpointer.clip_grad_norm_)
            checkpointer.save(training.plain["step"])
            digests.setdefault(training.plain["step"], ["", ""])[rank] = training.digest()

    raise_first(on_all_ranks(run, life.meeting))


@pytest.mark.parametrize("spill_every", [0, 1])
def test_a_state_made_of_other_gradients_than_the_training_s_is_never_given_back(tmp_path, spill_every):
    with ranks_in_threads(), shadow_threads(tmp_path, 2, spill_directory=tmp_path / "spills") as shadows:
        knobs = {
            "shadows": [one.address for one in shadows],
            "token_file": str(tmp_path / "token"),
            "bucket_bytes": 256,
            "verify_every": 0,
            "spill_every": spill_every,
        }
        life = Life("sgd", 0, [knobs, knobs], tmp_path / "job")
        life.start(restore=False)
        digests: dict[int, list[str]] = {}
        train(life, [False, False], digests)
        for checkpointer in life.checkpointers:
            checkpointer.drain(60)
        # The second one in a row is not healed at once, and trainers die behind steps that look good.
        train(life, [True, True, False, False], digests)
        life.bury()
        assert [event.outcome.value for event in life.checkpointers[0].events[-2:]] == ["failed"] * 2
        try:
            step, found = restore("sgd", knobs, tmp_path / "job")
        except (CorruptCheckpoint, NoCheckpoint):
            return
        assert found == digests[step], f"step {step} is not what the training had"
