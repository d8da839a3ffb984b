"""When ranks are killed, and how what they lost becomes a record's failures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lastgood.errors import LastgoodError
from lastgood.experiments.multirank.order import kill_moments
from lastgood.experiments.multirank.results import AfterKill, merge_kills
from tests.experiments.support.specs import make_spec


def killed(interval: int, kills: int, seed: int = 0, **more: Any) -> Any:
    return make_spec(ranks=2, parallel="ddp", interval_steps=interval, kills=kills, seed=seed, **more)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**31))
def test_kills_fall_behind_a_whole_interval_and_within_as_many_more(interval: int, kills: int, seed: int) -> None:
    moments = kill_moments(killed(interval, kills, seed))
    assert len(moments) == kills
    span = next(steps for steps in range(interval, 5 * interval, interval) if steps >= 4)
    assert all(span <= moment < 2 * span for moment in moments)


def test_kills_are_anywhere_in_an_interval() -> None:
    phases = [moment % 10 / 10 for moment in kill_moments(killed(10, 1000))]
    for tenth in range(10):
        # 100 are expected; fewer than 60 has a chance below one in 100,000.
        assert 60 < sum(tenth <= 10 * phase < tenth + 1 for phase in phases) < 140


def test_all_systems_are_killed_at_the_same_moments_and_repetitions_at_others() -> None:
    first = kill_moments(killed(10, 3))
    assert first == kill_moments(killed(10, 3, system="checkfreq", system_options={}))
    assert first == kill_moments(killed(10, 5))[:3]
    assert first != kill_moments(killed(10, 3, seed=1))


def test_without_kills_there_is_none() -> None:
    assert kill_moments(make_spec()) == []


@pytest.mark.parametrize("change", [{"ranks": 1, "parallel": "none"}, {"interval_steps": 0}, {"kills": 1001}])
def test_kills_need_ranks_and_checkpoints(change: dict[str, Any]) -> None:
    values = {"ranks": 2, "parallel": "ddp", "interval_steps": 5, "kills": 1, **change}
    with pytest.raises(ValidationError):
        make_spec(**values)


def lived(rank: int, reached: int, restored: int, **more: Any) -> AfterKill:
    values = {"restore_s": 0.1 + rank, "losses_checked": 2, "losses_equal": True, "live": None, **more}
    return AfterKill(
        token="t", rank=rank, host=f"vm{rank}", boot_id="k", reached_step=reached, restored_step=restored, **values
    )


def test_lost_is_what_the_rank_that_had_come_furthest_does_again() -> None:
    (first, second) = merge_kills(
        [5.5, 6.5],
        [
            [lived(0, 17, 12, losses_checked=1), lived(1, 18, 12)],
            [lived(0, 30, 30), lived(1, 29, 30, losses_equal=False)],
        ],
    )
    assert (first.reached_step, first.restored_step, first.lost_steps) == (18, 12, 6)
    assert (first.kill_after_steps, first.restore_s, first.losses_checked, first.losses_equal) == (5.5, 1.1, 1, True)
    assert second.lost_steps == 0 and not second.losses_equal


def test_a_restore_beyond_the_last_finished_step_loses_nothing() -> None:
    """A kill may come between a step's save and the note that the step is finished."""
    (only,) = merge_kills([4.0], [[lived(0, 7, 8), lived(1, 7, 8)]])
    assert only.lost_steps == 0


def test_ranks_that_restore_unlike_steps_are_refused() -> None:
    with pytest.raises(LastgoodError, match=r"different steps after one kill \(rank 0: 4, rank 1: 5\)"):
        merge_kills([4.0], [[lived(0, 9, 4), lived(1, 9, 5)]])
