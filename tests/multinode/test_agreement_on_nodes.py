"""PCcheck's ranks on nodes: links are cut, nodes are lost, stopped or full; all ranks come back at one step."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastgood.checkpointers.rank_directory import rank_directories, rank_directory
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.storage import SlotStore
from tests.checkpointers.support.job_of_ranks import Refused
from tests.multinode.support.jobs_on_nodes import JobOnNodes, Nodes

sys.path.insert(0, str(Path(__file__).parents[1] / "storage" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash" / "support"))

from replay import build_shim

from tests.support.patience import wait_until

pytestmark = pytest.mark.root

TOUCH_S = 2.0
"""The agreement's timeout in tests that lose touch."""
BOUND_S = 1.5 * TOUCH_S + 27.0
"""For a checkpoint to fail that waits for a lost rank: what docs/pccheck.md says, and a very busy machine."""
STALL_S = 1.5 * TOUCH_S + 27.0
"""For a save to return, however its checkpoint ends: at most until a place is free again, and a very busy machine."""

MakeJob = Callable[[], JobOnNodes]


@pytest.fixture(scope="session")
def all_nodes(shared_bed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(shared_bed, build_shim("faulty_disk.c", tmp_path_factory.mktemp("shim")))
    yield nodes
    nodes.end()


@pytest.fixture
def make_job(bed: Testbed, all_nodes: Nodes, tmp_path: Path) -> Iterator[MakeJob]:
    made: list[JobOnNodes] = []

    def make() -> JobOnNodes:
        made.append(JobOnNodes(all_nodes, tmp_path / "job"))
        return made[-1]

    yield make
    for job in made:
        job.kill()


def wait_for(true: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    wait_until(true, what, seconds, every_s=0.02)


def marks(job: JobOnNodes) -> dict[int, tuple[int, int]]:
    found = {rank: SlotStore.peek(folder).global_commit() for rank, folder in rank_directories(job.directory).items()}
    return {rank: (mark.incarnation, mark.step) for rank, mark in found.items() if mark is not None}


def refused(job: JobOnNodes, rank: int) -> str:
    with pytest.raises(Refused) as why:
        job.ranks[rank].result("attach")
    return str(why.value)


@pytest.mark.slow
def test_a_node_lost_between_the_commits_and_all_come_back_at_one_step(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    job.start(agreement_timeout_s=20.0)
    job.save_durably()
    # Committed on both, agreed on by none, when the node is lost.
    job.bed.cut("vm2")
    job.save()
    for rank in job.ranks:
        wait_for(lambda rank=rank: (1, 2) in rank("committed"), "the local commit of step 2")
    assert job.each("latest") == [1, 1]
    job.lose(1)
    job.kill()
    assert marks(job) == {0: (1, 1), 1: (1, 1)}
    job.bed.restart("vm2")
    # `start` compares digests: each rank has its own state back, to the bit.
    assert job.start() == 2
    # Committed on rank 0 only: nobody has it.
    job.ranks[1]("hang_disk", str(tmp_path / "release"))
    job.save()
    wait_for(lambda: (2, 3) in job.ranks[0]("committed"), "the local commit of step 3")
    job.lose(1)
    job.kill()
    job.bed.restart("vm2")
    assert job.start() == 2
    # Step 3 of the next life is on rank 1 only: with the dead life's on rank 0 it makes no checkpoint.
    assert job.ranks[1].save() == 3
    wait_for(lambda: (3, 3) in job.ranks[1]("committed"), "the local commit of step 3 in the new life")
    job.kill()
    newest = [SlotStore.peek(rank_directory(job.directory, rank)).committed()[0] for rank in range(2)]
    assert [(info.incarnation, info.step) for info in newest] == [(2, 3), (3, 3)]
    assert job.start() == 2
    assert job.save_durably() == 3


def test_a_cut_link_fails_saves_in_time_and_heals(make_job: MakeJob) -> None:
    job = make_job()
    job.start(agreement_timeout_s=TOUCH_S)
    first = job.save_durably()
    job.bed.cut("vm2")
    began = time.monotonic()
    step = job.save()
    errors = [rank("wait_for_event", step, "failed", BOUND_S) for rank in job.ranks]
    assert time.monotonic() - began < BOUND_S
    assert "rank 1 on vm2 is missing" in errors[0], errors
    assert job.control in errors[1], errors
    assert job.each("latest") == [first, first]
    # Training goes on, on both sides.
    for _ in range(2):
        for rank in job.ranks:
            _, _, save_s = rank("save")
            assert save_s < STALL_S
    job.bed.heal("vm2")
    wait_for(lambda: job.each("trouble") == ["", ""], "the ranks to find each other again")
    wait_for(lambda: min(job.each("latest")) >= step, "what was kept meanwhile to count")
    durable = job.save_durably()
    job.kill()
    # A restart while the link is cut ends in time, and says who is missing.
    job.bed.cut("vm2")
    began = time.monotonic()
    job.attach(join_timeout_s=2.0)
    assert re.search(r"WaitTimeout: rank 0 of 2 waited 2 s.*rank 1 did not come", refused(job, 0))
    assert re.search(rf"WaitTimeout: rank 1 of 2 waited 2 s.*{job.control}", refused(job, 1))
    assert time.monotonic() - began < 60
    job.kill()
    job.bed.heal("vm2")
    assert job.start() == durable


@pytest.mark.slow
def test_the_node_of_rank_0_is_lost(make_job: MakeJob) -> None:
    job = make_job()
    job.start(agreement_timeout_s=TOUCH_S)
    durable = job.save_durably()
    job.lose(0)
    other = job.ranks[1]
    began = time.monotonic()
    step = other.save()
    error = other("wait_for_event", step, "failed", BOUND_S)
    assert time.monotonic() - began < BOUND_S
    assert job.control in error, error
    for _ in range(4):
        _, _, save_s = other("save")
        assert save_s < STALL_S
    other("drain")
    assert other("committed")[-1] == (1, durable), "the newest of all ranks stays"
    job.kill()
    job.bed.restart("vm1")
    assert job.start() == durable
    assert job.save_durably() == durable + 1


@pytest.mark.slow
def test_a_paused_node_stalls_nobody(make_job: MakeJob) -> None:
    job = make_job()
    job.start(agreement_timeout_s=TOUCH_S)
    durable = job.save_durably()
    job.bed.pause("vm2")
    error = ""
    for number in range(4):
        step, _, save_s = job.ranks[0]("save")
        assert save_s < STALL_S
        if number == 0:
            error = job.ranks[0]("wait_for_event", step, "failed", BOUND_S)
    assert re.search(r"rank 1 on vm2 is missing \(nothing was heard from it for 1 s\)", error), error
    assert job.ranks[0]("latest") == durable
    job.bed.resume("vm2")
    # Its queue was longer, that is all: it takes the same steps, and those that rank 0 has kept count.
    for _ in range(4):
        job.ranks[1].save()
    wait_for(lambda: job.each("trouble") == ["", ""], "the ranks to find each other again")
    wait_for(lambda: len(set(job.each("latest"))) == 1 and job.each("latest")[0] > durable, "the ranks to agree again")
    durable = job.save_durably()
    job.kill()
    assert job.start() == durable


@pytest.mark.slow
def test_a_disk_that_is_full_on_one_node_fails_the_step_on_all(make_job: MakeJob, bed: Testbed) -> None:
    job = make_job()
    disk = rank_directory(job.directory, 1)
    disk.mkdir(parents=True)

    def mount(options: str) -> None:
        done = bed.remote().run("vm2", ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], 20)
        assert done.rc == 0, done.stderr

    # Seen by vm2 alone. Four slots of some 1.1 MiB fit, four with 8 MiB more do not.
    mount("size=9m")
    job.start()
    first = job.save_durably()
    job.each("grow", 8 << 20)
    full = job.save()
    told = [rank("wait_for_event", full, "failed") for rank in job.ranks]
    assert re.search(r"rank 1 on vm2: StorageError.*No space left", told[0]), told
    assert "No space left" in told[1], told
    assert job.each("latest") == [first, first]
    mount("remount,size=128m")
    assert job.save_durably() == full + 1
    job.each("shrink")
    durable = job.save_durably()
    job.kill()
    assert job.start() == durable
    job.kill()
    bed.remote().run("vm2", ["umount", "-l", str(disk)], 20)


@pytest.mark.slow
def test_a_second_job_and_a_taken_port_are_refused_by_name(make_job: MakeJob, bed: Testbed) -> None:
    job = make_job()
    job.start()
    durable = job.save_durably()
    second = make_job()
    assert second.port != job.port
    second.attach(join_timeout_s=3.0)
    for rank in range(2):
        why = refused(second, rank)
        assert str(rank_directory(job.directory, rank)) in why and "another process writes here" in why, why
    second.kill()
    assert job.save_durably() == durable + 1, "the first goes on"
    job.kill()
    code = f"import socket, time; s = socket.create_server(('', {job.port})); print('on', flush=True); time.sleep(60)"
    with bed.remote().start("vm1", [sys.executable, "-c", code], stdout=subprocess.PIPE, grace_s=0) as taken:
        assert taken.stdout is not None
        assert taken.stdout.readline() == b"on\n"
        began = time.monotonic()
        job.attach(join_timeout_s=3.0)
        assert re.search(rf"rank 0 cannot listen on {job.control}.*in use.*use a free port", refused(job, 0))
        assert job.control in refused(job, 1)
        assert time.monotonic() - began < 60
    job.kill()
    assert job.start() == durable + 1
