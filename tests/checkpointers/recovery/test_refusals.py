"""A rank that attach refuses ends the whole job within seconds, with its reason on every rank (3 of gloo)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lastgood.checkpointers.recovery.refusals import Refusals
from lastgood.errors import ConfigError
from tests.support.patience import PATIENCE

SCRIPT = Path(__file__).parents[1] / "support" / "refused_ranks.py"
JOBS = {
    "lock": ({"system": "sync", "cause": "held", "rank": 2, "then": "sleep"}, "LockHeld: checkpoint directory"),
    "damage": ({"system": "gpm", "cause": "damaged", "rank": 2, "then": "sleep"}, "none of which can be read"),
    "disk": ({"system": "pccheck", "cause": "full", "rank": 1, "then": "sleep"}, "No space left on device"),
    "interval": ({"system": "dcp", "cause": "options", "rank": 2, "then": "sleep"}, "attach() needs interval_steps"),
    "agreed lock": ({"system": "pccheck", "cause": "held", "rank": 2, "then": "sleep", "agree": True}, "LockHeld: "),
    "agreed disk": (
        {"system": "pccheck", "cause": "full", "rank": 2, "then": "sleep", "agree": True},
        "No space left on device",
    ),
    "has the store": ({"system": "sync", "cause": "options", "rank": 0, "then": "exit"}, "needs interval_steps"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Exit statuses, what ranks raised and what they logged, by job and rank."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = [{"job": name, **job} for name, (job, _) in JOBS.items()]
    jobs.append({"job": "tried again", "system": "sync", "cause": "options", "rank": 1, "then": "retry"})
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        input="\n".join(map(json.dumps, jobs)),
        capture_output=True,
        text=True,
        timeout=200 * PATIENCE,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])

    def of(job, rank):
        place = folder / f"{job}-{rank}"
        said = Path(f"{place}.said")
        return (
            found["ended"].get(place.name),
            said.read_text() if said.exists() else "",
            Path(f"{place}.err").read_text(),
        )

    return of


@pytest.mark.parametrize("name", JOBS)
def test_all_ranks_end_with_the_reason_of_the_refused_one(name, ended):
    job, reason = JOBS[name]
    assert reason in ended(name, job["rank"])[1], "the rank itself raises what it was refused for"
    for rank in {0, 1, 2} - {job["rank"]}:
        status, said, logged = ended(name, rank)
        assert status is not None, f"rank {rank} waits: {logged}"
        assert said != "went on"
        told = said + logged
        assert f"rank {job['rank']} " in told and reason in told, told


def test_a_rank_that_is_attached_after_all_in_time_stops_nobody(ended):
    for rank in range(3):
        assert ended("tried again", rank)[:2] == (0, "went on"), ended("tried again", rank)[2]
    assert "was refused: ConfigError" in ended("tried again", 0)[2]


def test_a_process_alone_tells_nobody():
    threads = set(threading.enumerate())
    refusals = Refusals("sync")
    refusals.raise_earlier()
    refusals.tell(ConfigError("x"))
    refusals.watch()
    refusals.raise_fault()
    assert set(threading.enumerate()) == threads, "there is nobody to watch for"
    refusals.close()
