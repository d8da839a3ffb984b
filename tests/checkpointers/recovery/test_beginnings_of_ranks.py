"""No rank begins anew while others resume: real ranks over gloo, of systems that do not agree on a step."""

from __future__ import annotations

import shutil

import pytest

from tests.checkpointers.support.rank_pool import RankPool
from tests.suggestions.following import advice, follows, hear

SYSTEMS = ["sync", "checkfreq", "dcp", "gpm", "pccheck"]
LAYOUTS = {"disk of its own": "disk-{rank}/job", "directory of the job": "job/rank-0000{rank}"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = RankPool(2, tmp_path_factory.mktemp("pool"))
    yield made
    made.end()


def trained(pool, folder, system, **more):
    return pool.run(2, "train", system=system, folder=str(folder), **{"steps": 2, **more})


def lying(folder):
    return sorted(path for path in folder.rglob("*-*") if path.name.startswith(("slot-", "checkpoint-")))


@pytest.mark.parametrize(
    ("system", "lost"),
    [(system, 1) for system in SYSTEMS]
    + [pytest.param(system, 0, marks=() if system == "pccheck" else pytest.mark.slow) for system in SYSTEMS],
)
def test_a_rank_whose_own_disk_is_empty_stops_all_at_the_first_step(system, lost, pool, tmp_path):
    places = tmp_path / LAYOUTS["disk of its own"]
    assert [one["began"] for one in trained(pool, places, system)] == [0, 0]
    shutil.rmtree(str(places).format(rank=lost))
    before = lying(tmp_path / f"disk-{1 - lost}")
    for _ in range(2):  # also if they are simply started again
        found = trained(pool, places, system)
        assert [one["began"] for one in found] == ([0, 2] if lost == 0 else [2, 0])
        empty, full = (f"({tmp_path}/disk-{rank}/job)" for rank in (lost, 1 - lost))
        for one in found:
            assert one["error"].startswith(
                f"MismatchError: {system}: rank {lost} {empty} found no checkpoint and began"
            )
            assert f"rank {1 - lost} at step 2 {full}" in one["error"]
    assert lying(tmp_path / f"disk-{1 - lost}") == before, "nothing was saved of that"
    shutil.rmtree(str(places).format(rank=1 - lost))
    assert [(one["began"], one["error"]) for one in trained(pool, places, system)] == [(0, None)] * 2


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_rank_that_sees_the_others_directories_is_refused_at_once(system, pool, tmp_path):
    places = tmp_path / LAYOUTS["directory of the job"]
    assert [one["began"] for one in trained(pool, places, system)] == [0, 0]
    shutil.rmtree(tmp_path / "job" / "rank-00001")
    first, second = trained(pool, places, system)
    assert second["began"] is None
    reason = f"{tmp_path}/job/rank-00001 holds no checkpoint, and {tmp_path}/"
    assert second["error"].startswith(f"MismatchError: {reason}")
    # The other hears of it in its own attach, in a later step, or not at all if it was done before.
    assert first["began"] in (None, 2)
    assert first["error"] is None or ("rank 1" in first["error"] and reason in first["error"])
    assert first["error"] is not None or first["began"] == 2


@follows("%s: ranks resumed at different steps: %s; with attach(resume_step=...) all take the same one, while")
def test_ranks_that_resume_at_different_steps_are_told(pool, tmp_path):
    places = tmp_path / LAYOUTS["disk of its own"]
    trained(pool, places, "sync")
    (newest,) = (tmp_path / "disk-1" / "job").glob("checkpoint-*step-2*")
    newest.unlink()
    found = trained(pool, places, "sync", interval_steps=0)  # nothing is saved over what each still has
    assert [(one["began"], one["error"]) for one in found] == [(2, None), (1, None)]
    for path in pool.errors:
        message = hear(path.read_text())
        assert "ranks resumed at different steps: rank 0 at step 2" in message
    said = [path.stat().st_size for path in pool.errors]
    step = advice(message, r"rank 1 at step (\d+)")
    given = eval(f"dict({advice(message, r'attach[(](resume_step=)')}{step})")
    assert [(one["began"], one["error"]) for one in trained(pool, places, "sync", **given)] == [(1, None)] * 2
    assert not any(b"different steps" in path.read_bytes()[size:] for path, size in zip(pool.errors, said, strict=True))


def test_a_rank_that_attaches_alone_waits_for_nobody(pool, tmp_path):
    places = tmp_path / LAYOUTS["disk of its own"]
    for began in (0, 2):
        first, second = trained(pool, places, "sync", attached=[0])
        assert (first["began"], first["error"]) == (began, None)
        assert second["began"] is None


def test_ranks_go_back_together(pool, tmp_path):
    """In the running processes. The checkpoint of step 3 is judged bad on one rank alone."""
    for one in pool.run(2, "rolled_back", job=str(tmp_path / "job")):
        assert one["steps"] == [2, 4]
        assert one["again"] == one["first"][2:], "as if nothing had been"
        assert one["restored"] == 4
