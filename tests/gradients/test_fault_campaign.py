"""Fault schedules of Checkmate: never a silently different model.

A schedule that fails is named by its seed: ``CHECKMATE_SEED=17 pytest tests/gradients/test_fault_campaign.py -k named``
runs it again, as far as threads and networks allow.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.gradients.support.fault_campaign import make_schedule, run_schedule
from tests.gradients.support.fault_training import Oracle

EVERYDAY = 5
LONG = 1000
BATCH = 5


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def ends() -> Iterator[Counter[str]]:
    """What became of all schedules of this module."""
    yield Counter()


def run_batch(seeds, oracle, ends, folder):
    for seed in seeds:
        schedule = make_schedule(seed)
        try:
            report = run_schedule(schedule, oracle, folder / str(seed))
        except BaseException as error:
            if hasattr(error, "add_note"):  # not on Python 3.10
                error.add_note(f"CHECKMATE_SEED={seed}: {schedule}")
            raise
        ends["not available" if report.restored is None else "restored"] += 1
        ends.update(report.counts)


@pytest.mark.parametrize("first", range(0, EVERYDAY, BATCH))
def test_everyday_schedules(first, oracle, ends, tmp_path):
    run_batch(range(first, first + BATCH), oracle, ends, tmp_path)


def test_most_of_them_gave_something_back(ends):
    if ends.total():
        print(dict(ends))
        # On a busy machine more trainers go on without a shadow that is slow, and what is lost with them is not back.
        assert ends["restored"] > ends["not available"], "a campaign in which nothing comes back shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(EVERYDAY, LONG, BATCH))
def test_many_schedules(first, oracle, ends, tmp_path):
    run_batch(range(first, first + BATCH), oracle, ends, tmp_path)


@pytest.mark.slow
def test_most_of_the_many_gave_something_back(ends):
    test_most_of_them_gave_something_back(ends)


@pytest.mark.skipif("CHECKMATE_SEED" not in os.environ, reason="names no seed")
def test_the_named_schedule(oracle, ends, tmp_path):
    run_batch([int(os.environ["CHECKMATE_SEED"])], oracle, ends, tmp_path)
