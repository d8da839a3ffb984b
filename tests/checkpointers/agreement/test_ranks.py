"""Real ranks of small trainings on loopback: killed, cut off, with bad disks, in every case back at one step."""

from __future__ import annotations

import ast
import errno
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

import lastgood.checkpointers.agreement as agreement
from lastgood.checkpointers.rank_directory import rank_directories, rank_directory
from lastgood.storage import SlotStore
from tests.checkpointers.support.job_of_ranks import Refused
from tests.suggestions.following import advice, follows, hear
from tests.support.patience import wait_until

PATIENCE_S = 2.0
"""An agreement's timeout where a rank is to be lost."""


def damage_newest(directory):
    """Flip a byte of the data of the newest checkpoint; returns its step."""
    info = SlotStore.peek(directory).committed()[0]
    with info.path.open("r+b") as file:
        file.seek((1 << 20) + 5000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    return info.step


def marks(job):
    found = {rank: SlotStore.peek(folder).global_commit() for rank, folder in rank_directories(job.directory).items()}
    return {rank: None if mark is None else (mark.incarnation, mark.step) for rank, mark in found.items()}


def refusal_of(rank, directory, number, **knobs):
    with pytest.raises(Refused) as error:
        rank("attach", str(directory), number, **knobs)
    return hear(str(error.value))


@follows(
    "or the token is not the same on all ranks (LASTGOOD_JOB_TOKEN)", "; a rank that saves alone needs world_size=1"
)
def test_a_rank_whom_the_others_do_not_know(make_job):
    job = make_job()
    first, second = job.fork()
    soon = job.options(0, join_timeout_s=1.5)
    first.begin("attach", str(job.directory), 0, **soon)
    second("use_token", "a token of another job's")
    told = refusal_of(second, job.directory, 1, **soon)
    assert advice(told, r"not the same on all ranks \((\w+)\)") == "LASTGOOD_JOB_TOKEN"
    with pytest.raises(Refused) as error:
        first.result("attach")
    alone = eval(f"dict({advice(hear(str(error.value)), r'needs (world_size=1)')})")
    assert first("attach", str(job.directory) + "-alone", 0, **soon | alone) == (0, "")
    first("close")
    second("use_token", "a token of the tests")
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, **job.options(number))
    assert [rank.result("attach") for rank in job.ranks] == [(0, "")] * 2


def test_three_ranks_agree_and_come_back_together(make_job, capsys):
    from typer.testing import CliRunner

    from lastgood.cli import app

    job = make_job(3)
    assert job.start() == 0
    for expected in (1, 2, 3):
        assert job.save_durably() == expected
    assert job.each("latest") == [3, 3, 3]
    assert job.each("everywhere") == [[(1, 3), (1, 2), (1, 1)]] * 3
    assert marks(job) == dict.fromkeys(range(3), (1, 3))
    job.kill()
    shown = CliRunner().invoke(app, ["inspect", "--json", str(job.directory)])
    found = json.loads(shown.stdout)
    assert [one["global"]["step"] for one in found["ranks"]] == [3, 3, 3]
    assert [[slot["step"] for slot in one["slots"] if slot["global"]] for one in found["ranks"]] == [[3]] * 3
    table = " ".join(CliRunner().invoke(app, ["inspect", str(job.directory)]).stdout.split())
    assert table.count("all ranks hold step 3 of incarnation 1") == 3 and table.count("newest, on all ranks") == 3
    assert CliRunner().invoke(app, ["verify", str(job.directory)]).exit_code == 0
    damage_newest(rank_directory(job.directory, 2))
    assert CliRunner().invoke(app, ["verify", str(job.directory)]).exit_code == 1
    # Its data is damaged: all go back, and go on in a new life.
    assert job.start() == 2
    assert job.save_durably() == 3
    assert job.each("everywhere") == [[(2, 3), (1, 2), (1, 1)]] * 3
    job.each("close")
    job.kill()
    assert job.start(resume_step=2) == 2
    job.kill()
    job.fork()
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, resume_step=7, **job.options(number))
    for rank in job.ranks:
        with pytest.raises(Refused, match=r"NoCheckpoint: no checkpoint of step 7.*\[3, 2, 1\]"):
            rank.result("attach")


def test_kills_around_the_agreement_leave_one_step_for_all(make_job, make_proxy, tmp_path):
    """Between the commits of two ranks, between commit and agreement, and in two lives that reach the same step."""
    job = make_job()
    proxy = make_proxy(job.port)
    job.start(ports={1: proxy.port})
    job.save_durably()
    # Committed on both, agreed on by none.
    proxy.cut()
    job.save()
    for rank in job.ranks:
        wait_for(lambda rank=rank: (1, 2) in rank("committed"), "the local commit of step 2")
    assert job.each("latest") == [1, 1]
    job.ranks[1].kill()
    job.kill()
    proxy.heal()
    assert marks(job) == {0: (1, 1), 1: (1, 1)}
    assert job.start(ports={1: proxy.port}) == 2
    # Committed on one: nobody has it.
    job.ranks[1]("hang_disk", str(tmp_path / "release"))
    job.save()
    wait_for(lambda: (2, 3) in job.ranks[0]("committed"), "the local commit of step 3")
    job.kill()
    assert job.start() == 2
    # The next life reaches step 3 as well, on the other rank only: the two do not join.
    assert job.ranks[1].save() == 3
    wait_for(lambda: (3, 3) in job.ranks[1]("committed"), "the local commit of step 3 in the new life")
    job.kill()
    newest = [SlotStore.peek(rank_directory(job.directory, rank)).committed()[0] for rank in range(2)]
    assert [(info.incarnation, info.step) for info in newest] == [(2, 3), (3, 3)]
    assert job.start() == 2
    assert job.each("committed") == [[(1, 2), (1, 1)]] * 2
    assert job.save_durably() == 3


def wait_for(true, what, seconds=60.0):
    wait_until(true, what, seconds, every_s=0.02)


@pytest.mark.parametrize("lost", [0, 1], ids=["rank 0", "rank 1"])
def test_a_killed_rank_is_named_and_training_goes_on(make_job, lost):
    job = make_job()
    job.start()
    job.save_durably()
    other = job.ranks[1 - lost]
    job.each("lose_patience", PATIENCE_S)
    job.ranks[lost].kill()
    step = other.save()
    error = other("wait_for_event", step, "failed")
    assert ("rank 1 on" if lost else "coordinator of rank 0 at 127.0.0.1") in error, error
    # Slots of unknown fate stay, so that soon no save can begin: then it fails at once.
    for _ in range(4):
        other("save")
        other("drain")
    events = other("events")
    assert [outcome for _, outcome, _ in events] == ["durable"] + ["failed"] * 5
    assert re.search(r"waited 0.2 s for a free slot.*4 kept.*(rank 1|coordinator)", events[-1][2]), events[-1]
    assert other("committed")[-1] == (1, 1), "the newest of all ranks stays"
    job.kill()
    assert job.start() == 1
    assert job.save_durably() == 2


def test_a_skip_and_a_failure_on_one_rank_are_those_of_all(make_job, tmp_path):
    job = make_job()
    job.start(of_rank={0: {"max_in_flight": 3}, 1: {"max_in_flight": 1, "pressure": "skip"}})
    job.save_durably()
    release = tmp_path / "release"
    job.ranks[1]("hang_disk", str(release))
    slow = job.save()
    skipped = job.save()
    why, _ = job.each("wait_for_event", skipped, "skipped")
    assert re.search("rank 1 on .*1 checkpoints were in progress", why), why
    release.touch()
    job.each("wait_for_event", slow, "durable")
    job.each("drain")  # what is durable may still have its place, and rank 1 would skip the next
    job.ranks[1]("mend_disk")
    # A disk that fails, then one that is full, on one rank only.
    for error, words in ((errno.EIO, "Input/output error"), (errno.ENOSPC, "No space left")):
        job.ranks[1]("break_disk", error)
        failed = job.save()
        told = [rank("wait_for_event", failed, "failed") for rank in job.ranks]
        assert re.search(rf"rank 1 on .*StorageError.*{words}", told[0]), told
        assert words in told[1]
        job.each("drain")
        job.ranks[1]("mend_disk")
        assert job.each("latest") == [slow, slow]
    durable = job.save_durably()
    job.kill()
    assert job.start() == durable


def test_a_slow_rank_only_makes_the_others_wait(make_job, tmp_path):
    """Its queue is longer; nothing counts before it has it, and older ones are not lost meanwhile."""
    job = make_job()
    job.start()
    first = job.save_durably()
    release = tmp_path / "release"
    job.ranks[1]("hang_disk", str(release))
    later = [job.save()]
    job.ranks[1]("wait_for_hang")
    job.ranks[1]("hang_disk", str(release))
    later.append(job.save())
    wait_for(lambda: (1, later[1]) in job.ranks[0]("committed"), "rank 0's commits")
    assert job.each("latest") == [first, first]
    assert (1, first) in job.ranks[0]("committed")
    release.touch()
    job.each("drain")
    assert job.each("latest") == [later[1]] * 2
    outcomes = job.each("events")
    assert [event[:2] for event in outcomes[0]] == [event[:2] for event in outcomes[1]], "decided once for all"
    job.kill()
    assert job.start() == later[1]


def test_a_stopped_rank_is_missing_until_it_goes_on(make_job):
    job = make_job()
    job.start()
    job.save_durably()
    job.each("lose_patience", PATIENCE_S)
    job.ranks[1].stop()
    step = job.ranks[0].save()
    error = job.ranks[0]("wait_for_event", step, "failed")
    job.ranks[0]("lose_patience", 60.0)
    assert re.search(r"rank 1 on .* is missing \(nothing was heard from it for 1 s\)", error), error
    job.ranks[1].go_on()
    job.ranks[1]("lose_patience", 60.0)
    assert job.ranks[1].save() == step
    # What had failed here is found to be whole after all.
    wait_for(lambda: job.each("latest") == [step, step], "the ranks to agree again")
    assert job.save_durably() == step + 1
    job.kill()
    assert job.start() == step + 1


def test_a_partition_heals(make_job, make_proxy):
    job = make_job()
    proxy = make_proxy(job.port)
    job.start(ports={1: proxy.port})
    first = job.save_durably()
    job.each("lose_patience", PATIENCE_S)
    proxy.cut()
    cut = job.save()
    errors = [rank("wait_for_event", cut, "failed") for rank in job.ranks]
    assert "rank 1 on" in errors[0] and f"127.0.0.1:{proxy.port}" in errors[1], errors
    assert job.each("latest") == [first, first]
    for _ in range(3):
        job.save()
        job.each("drain")
    job.each("lose_patience", 60.0)
    proxy.heal()
    wait_for(lambda: job.each("latest") != [first, first], "the ranks to agree again")
    wait_for(lambda: job.each("trouble") == ["", ""], "the trouble to end")
    durable = job.save_durably()
    assert job.each("latest") == [durable, durable]
    job.kill()
    assert job.start() == durable


def test_verdicts_and_failed_restarts_count_for_all_ranks(make_job):
    job = make_job()
    job.start(max_failed_restarts=2)
    job.save_durably()
    second = job.save_durably()
    assert job.ranks[1]("verdict", second, False, "a spike on rank 1")
    wait_for(lambda: job.ranks[0]("is_bad", second), "the verdict on rank 0")
    assert job.each("latest") == [1, 1]
    job.kill()
    for _ in range(2):
        assert job.start(max_failed_restarts=2) == 1
        job.kill()
    job.fork()
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, **job.options(number, max_failed_restarts=2))
    for rank in job.ranks:
        with pytest.raises(Refused, match=r"NoGoodCheckpoint: step 2 is judged bad .*a spike on rank 1\).*2 restarts"):
            rank.result("attach")
    job.kill()
    assert job.start(max_failed_restarts=3) == 1
    job.save_durably()  # the job got on
    job.kill()
    assert job.start(max_failed_restarts=2) == 2


def test_what_one_rank_takes_back_the_others_still_hold(make_job):
    """A level of the loss that stays is no spike any more; what another rank found is another thing."""
    job = make_job()
    job.start()
    first, second = job.save_durably(), job.save_durably()
    zero, one = job.ranks
    for step in (first, second):
        zero("losses_say", step, False, "high on rank 0")
        wait_for(lambda step=step: one("is_bad", step), "the verdict on rank 1")
    one("verdict", second, False, "an evaluation fell on rank 1")
    for step in (first, second):
        zero("losses_say", step, True, "high on rank 0")
    wait_for(lambda: not one("is_bad", first), "the verdict to be taken back on rank 1")
    wait_for(lambda: job.each("is_bad", second) == [True, True], "the verdict of rank 1 on all ranks")
    job.kill()
    assert job.start() == first


@pytest.mark.slow  # every day pccheck/test_verdicts has such a training of one rank, and the test above a job's count
def test_ranks_that_fail_whatever_they_begin_with_end_together(make_job):
    """A step that was reached before and is written anew is no progress, on no rank."""
    job = make_job()
    job.start()
    for _ in range(2):
        job.save_durably()
    job.kill()
    begun = []
    for _ in range(4):
        begun.append(job.start(max_failed_restarts=2))
        if begun[-1] == 1:
            job.save_durably()
        job.kill()
    assert begun == [2, 2, 1, 1]
    job.fork()
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, **job.options(number, max_failed_restarts=2))
    for rank in job.ranks:
        with pytest.raises(Refused, match="NoGoodCheckpoint: 2 restarts from step 2 failed; 2 restarts from step"):
            rank.result("attach")


def test_directories_that_do_not_belong_together_are_refused(make_job, tmp_path):
    job = make_job()
    job.start()
    job.save_durably()
    own = rank_directory(job.directory, 1)
    shutil.copytree(own, tmp_path / "old copy")
    for _ in range(2):
        job.save_durably()
    job.kill()
    own.rename(tmp_path / "newest")

    def refused(words):
        job.fork()
        for number, rank in enumerate(job.ranks):
            rank.begin("attach", str(job.directory), number, **job.options(number))
        for rank in job.ranks:
            with pytest.raises(Refused, match=words):
                rank.result("attach")
        job.kill()

    refused(r"MismatchError: rank 1 on .*rank-00001\): nothing is there, and rank 0 .*bring back the missing")
    shutil.copytree(tmp_path / "old copy", own)
    refused(r"MismatchError: rank 1 on .*step 1 of incarnation 1, and step 3 of incarnation 1 was complete.*older copy")
    shutil.rmtree(own)
    (tmp_path / "newest").rename(own)
    assert job.start() == 3


def test_a_rank_that_cannot_begin_ends_the_others_join(make_job):
    job = make_job()
    job.fork()
    rank_directory(job.directory, 1).mkdir(parents=True)
    (rank_directory(job.directory, 1) / "job.json").mkdir()
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, **job.options(number))
    with pytest.raises(Refused, match="StorageError"):
        job.ranks[1].result("attach")
    with pytest.raises(Refused, match=r"MismatchError: rank 1 on .*: StorageError: .*job.json: is a directory"):
        job.ranks[0].result("attach")


def test_a_wrong_clock_changes_nothing(make_job):
    job = make_job()
    job.fork()
    job.ranks[1]("wrong_clock", 10 * 365 * 86400.0)
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, **job.options(number))
    assert [rank.result("attach")[0] for rank in job.ranks] == [0, 0]
    job.save_durably()
    job.ranks[0]("wrong_clock", -20 * 365 * 86400.0)
    step = job.save_durably()
    job.kill()
    assert job.start() == step
    # And no code of the agreement looks at the time of day.
    for path in Path(agreement.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("time", "time"), ("time", "time_ns")}, path
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert "datetime" not in [name.name for name in node.names], path


def test_steps_that_do_not_grow_are_refused_and_harm_nothing(make_job):
    job = make_job()
    job.start()
    step = job.save_durably()
    job.ranks[0]("save", step=step)
    assert "does not come after" in job.ranks[0]("wait_for_event", step, "failed")
    assert job.each("latest") == [step, step]


def test_torch_distributed_tells_the_ranks_of_each_other(make_job, tmp_path):
    job = make_job()
    job.fork()
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, init=str(tmp_path / "init"), ranks=2)
    assert [rank.result("attach")[0] for rank in job.ranks] == [0, 0]
    step = job.save_durably()
    assert marks(job) == {0: (1, step), 1: (1, step)}
    job.each("close")


def wait_in_native_code(pid):
    """Until the main thread of a process stays in one call of the kernel's, a futex."""
    seen = [""]

    def stays():
        now = Path("/proc", str(pid), "syscall").read_text()
        seen[:] = [*seen, now] if now == seen[-1] and now.split()[0] in ("202", "98") else [now]
        return len(seen) > 20

    wait_for(stays, "the rank to sit in its collective")


def test_a_rank_that_sits_in_a_collective_ends_at_sigterm(make_job, tmp_path):
    """Its neighbour does not answer; what is under way becomes durable here, and nobody waits for the agreement."""
    job = make_job()
    job.fork()
    for number, rank in enumerate(job.ranks):
        rank.begin(
            "attach", str(job.directory), number, init=str(tmp_path / "init"), ranks=2, agreement_timeout_s=600.0
        )
    assert [rank.result("attach")[0] for rank in job.ranks] == [0, 0]
    first = job.save_durably()
    zero, one = job.ranks
    release = tmp_path / "release"
    zero("hang_disk", str(release))
    second = job.save()
    zero("wait_for_hang")
    one.stop()
    zero.begin("all_reduce")
    wait_in_native_code(zero.pid)
    os.kill(zero.pid, signal.SIGTERM)
    release.touch()
    with pytest.raises((EOFError, ConnectionResetError)):
        zero.result("all_reduce")
    found = [info.step for info in SlotStore.peek(rank_directory(job.directory, 0)).committed()]
    assert found[:2] == [second, first]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_hundred_kills_of_random_ranks_at_random_moments(make_job):
    chance = random.Random(11)
    job = make_job(3)
    durable = 0
    for number in range(100):
        step = job.start(max_failed_restarts=None)
        assert step >= durable, f"round {number}: step {step}, and {durable} had been durable everywhere"
        for digests in job.digests:
            for known in [known for known in digests if known > step]:
                del digests[known]
        for _ in range(chance.randrange(1, 5)):
            job.save()
            if chance.random() < 0.3:
                job.each("drain")
        time.sleep(chance.uniform(0, 0.1))
        for rank in chance.sample(job.ranks, chance.choice((1, 1, 2, 3))):
            rank.kill()
        alive = [rank for rank in job.ranks if rank.pid]
        durable = max([step, *(one for rank in alive for one, outcome, _ in rank("events") if outcome == "durable")])
        job.kill()
