"""Seeded schedules of loss, bursts, repetitions, disorder and damage: a mirror node never gives back a wrong state.

Real frames (Gloo's over TCP, RoCEv2's) through parser, conversation, extractor and node; what is given back over its
port is compared with the trainer's own state, after a kill at any instant and in a second life that goes on from it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mirror.support.schedules import Outcome, run_schedule, schedule_of

EVERY_DAY, ALL = 30, 1000


def check(seeds: range, folder: Path) -> Counter[str]:
    """Run them; what became of them."""
    found: Counter[str] = Counter()
    for seed in seeds:
        schedule = schedule_of(seed)
        place = folder / str(seed)
        place.mkdir()
        outcome: Outcome = run_schedule(schedule, place)
        assert outcome.wrong == [], f"schedule {seed}: {schedule}"
        for step, made, share in zip(outcome.restored, outcome.made, schedule.kills, strict=True):
            assert step <= made
            if schedule.faultless and share == 1.0:
                # Of a model with buffers the last broadcast has come too.
                assert step == made, f"schedule {seed}: nothing was lost, and {made} is not held: {outcome}"
        if schedule.faultless:
            assert outcome.blind == ["", ""], f"schedule {seed}: {outcome}"
        found["restored"] += sum(step > 0 for step in outcome.restored)
        found["blind"] += any(outcome.blind)
        found["second life went on"] += outcome.restored[-1] > outcome.restored[0] > 0
        found["healed"] += outcome.healed > 0
    return found


def test_a_few_schedules(tmp_path: Path) -> None:
    found = check(range(EVERY_DAY), tmp_path)
    # Were all of them blind from the start, or none, nothing would have been tried.
    assert all(found[what] >= EVERY_DAY // 6 for what in ("restored", "blind", "second life went on")), found
    assert found["healed"]


@pytest.mark.parametrize("seed", [51, 71, 121])
def test_a_restart_is_seen_though_a_channel_was_silent(seed: int, tmp_path: Path) -> None:
    """RoCEv2 with two channels, of which the first life used one: what opens next is no second channel."""
    schedule = schedule_of(seed)
    assert schedule.wire is not None and schedule.wire.channels == 2
    check(range(seed, seed + 1), tmp_path)


def test_what_is_cut_by_the_end_of_a_batch_of_frames_is_not_lost(tmp_path: Path) -> None:
    """RoCEv2 with two channels: the last message of a bucket goes on in the next batch, and nothing was lost."""
    assert schedule_of(191).faultless
    check(range(191, 192), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_schedules(part: int, tmp_path: Path) -> None:
    each = ALL // 10
    found = check(range(EVERY_DAY + part * each, EVERY_DAY + (part + 1) * each), tmp_path)
    assert all(found[what] >= each // 6 for what in ("restored", "blind", "second life went on")), found
