"""A training that `attach` refuses leaves its directory as it was, and what the refusal says to do then works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.ranks.directories import shared_job_id, whole_checkpoints
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LastgoodError, LockHeld, MismatchError, StorageError
from lastgood.locks import FileLock
from lastgood.ports import free_ports
from lastgood.storage import SlotStore, files
from lastgood.storage import format as fmt
from tests.suggestions.following import advice, follows, hear

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck", "dcp"]


def a_model():
    """The same on all ranks, as with DistributedDataParallel."""
    torch.manual_seed(1)
    return torch.nn.Linear(3, 3)


def made(system: str, directory: Path, **knobs):
    return checkpointer_class(system)(directory, interval_steps=1, **knobs)


def rank_of(system: str, job: Path, rank: int, ranks: int, **more):
    knobs = {"rank": rank, "world_size": ranks, "control": "off"} if system == "pccheck" else {}
    return made(system, rank_directory(job, rank), **knobs, **more)


def train(checkpointer) -> int:
    """One step; returns what it began at."""
    began = checkpointer.attach(model=a_model())
    checkpointer.step()
    checkpointer.close()
    return began


def train_together(checkpointers) -> list[int]:
    began = [checkpointer.attach(model=a_model()) for checkpointer in checkpointers]
    for checkpointer in checkpointers:
        checkpointer.step()
        checkpointer.close()
    return began


def lying(folder: Path) -> dict[str, bytes | None]:
    paths = [folder, *folder.rglob("*")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths if path.exists()}


def refused(folder: Path, checkpointer, error: type[LastgoodError] = LastgoodError, **parts) -> str:
    """The refusal's text; `folder` is byte for byte as before."""
    before = lying(folder)
    with pytest.raises(error) as caught:
        checkpointer.attach(**(parts or {"model": a_model()}))
    after = lying(folder)
    assert {**before, **after} == before
    assert before == after
    return str(caught.value)


class Plain:
    """Nothing that can be stored."""


def loose() -> dict:
    model = a_model()
    return {"model": model, "optimizer": torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))])}


@pytest.mark.parametrize("there", ["nothing", "an empty directory", "somebody's files", "checkpoints"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_refused_start_leaves_the_directory_as_it_was(system, there, tmp_path):
    directory = tmp_path / "runs" / "job"
    if there != "nothing":
        directory.mkdir(parents=True)
    if there == "somebody's files":
        (directory / "notes.txt").write_text("mine")
    if there == "checkpoints":
        train(made(system, directory))
        refused(tmp_path, made(system, directory), MismatchError, model=torch.nn.Linear(2, 2))
    refused(tmp_path, made(system, directory), **loose())
    refused(tmp_path, made(system, directory), model=a_model(), own={"a": Plain()})
    before = lying(tmp_path)
    with pytest.raises(LastgoodError):
        made(system, directory).attach(model=a_model(), resume_step=7)
    assert lying(tmp_path) == before
    assert train(made(system, directory)) == (1 if there == "checkpoints" else 0)


@pytest.mark.parametrize("system", SYSTEMS)
def test_another_systems_checkpoints_stay_as_they_were(system, tmp_path):
    other = "dcp" if system == "sync" else "sync"
    if system == "checkfreq":
        other = "dcp"
    train(made(other, tmp_path / "job"))
    (tmp_path / "job" / "lock").unlink()  # as a copy of the checkpoints alone has none
    refused(tmp_path, made(system, tmp_path / "job"), MismatchError)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_directory_that_another_holds_is_left_to_it(system, tmp_path):
    first = made(system, tmp_path / "job")
    first.attach(model=a_model())
    refused(tmp_path, made(system, tmp_path / "job"), LockHeld)
    first.step()
    first.close()
    assert train(made(system, tmp_path / "job")) == 1


@pytest.mark.parametrize(("system", "makes"), [("pccheck", "make_slot_file"), ("gpm", "make_slot_file")])
def test_a_disk_that_is_full_at_the_second_slot(system, makes, tmp_path, monkeypatch):
    make, calls = getattr(files, makes), []

    def full(path, *arguments, **named):
        calls.append(path)
        if len(calls) == 2:
            raise StorageError(f"{path}: making a slot: No space left on device")
        return make(path, *arguments, **named)

    monkeypatch.setattr(files, makes, full)
    parts = {"model": a_model()}
    assert "No space left" in refused(tmp_path, made(system, tmp_path / "job"), StorageError, **parts)
    assert len(calls) == 2
    assert made(system, tmp_path / "job").attach(**parts) == 0


def test_the_archive_of_a_refused_start(tmp_path):
    checkpointer = made("pccheck", tmp_path / "job", archive_every=1, archive_dir=str(tmp_path / "archive"))
    refused(tmp_path, checkpointer, **loose())


def test_a_checkmate_whose_shadows_are_not_there(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o600)
    shadows = (f"127.0.0.1:{free_ports()[0]}",)
    checkpointer = checkpointer_class("checkmate")(
        tmp_path / "job", shadows=shadows, token_file=str(token), timeout_s=0.3
    )
    model = a_model()
    refused(tmp_path, checkpointer, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


# -- another number of ranks -------------------------------------------------------------------------------------------


def job_of_two(system: str, job: Path) -> None:
    assert train_together([rank_of(system, job, rank, 2) for rank in (0, 1)]) == [0, 0]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_third_rank_is_refused_and_what_that_says_resumes(system, tmp_path):
    job = tmp_path / "job"
    job_of_two(system, job)
    message = refused(tmp_path, rank_of(system, job, 2, 3), MismatchError)
    assert not rank_directory(job, 2).exists()
    assert "start it as before" in message and "move them away" in message
    assert ("resume_from" in message) == (system == "pccheck"), "it can read no other system's"
    assert train_together([rank_of(system, job, rank, 2) for rank in (0, 1)]) == [1, 1], "as before"
    job.rename(tmp_path / "away")
    assert train_together([rank_of(system, job, rank, 3) for rank in range(3)]) == [0, 0, 0]


@follows("; or, to go on from them, give PCcheck a new directory and resume_from={}")
def test_three_ranks_go_on_from_two(tmp_path):
    job_of_two("pccheck", tmp_path / "job")
    message = hear(refused(tmp_path, rank_of("pccheck", tmp_path / "job", 2, 3), MismatchError))
    said = advice(message, r"give PCcheck a new directory and (resume_from='.*?');")
    given = eval(f"dict({said})")
    assert train_together([rank_of("pccheck", tmp_path / "new", rank, 3, **given) for rank in range(3)]) == [1, 1, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_told_that_there_are_three_now(rank, tmp_path):
    job = tmp_path / "job"
    job_of_two("pccheck", job)
    message = refused(tmp_path, rank_of("pccheck", job, rank, 3), MismatchError)
    assert "as many ranks as before" in message and "this one as its resume_from" in message


def killed_at_once(job: Path, rank: int, ranks: int) -> None:
    """A rank that was killed before its first checkpoint."""
    SlotStore(rank_directory(job, rank), slots=3, job_id=bytes(16), rank=rank, world_size=ranks).close()


def test_what_a_killed_third_rank_left_is_no_part_of_the_job(tmp_path):
    job = tmp_path / "job"
    job_of_two("pccheck", job)
    killed_at_once(job, 2, 3)
    assert [one.step for one in whole_checkpoints(job)] == [1]
    state = {"model": a_model()}
    again = PCcheck(tmp_path / "new", interval_steps=1, resume_from=str(job))
    assert again.attach(**state) == 1
    again.close()
    shutil.rmtree(rank_directory(job, 1))
    killed_at_once(job, 1, 3)
    with pytest.raises(MismatchError, match=r"of 2 ranks, \[1\] are missing"):
        whole_checkpoints(job)


def test_two_jobs_that_both_committed_are_a_mixture(tmp_path):
    job = tmp_path / "job"
    job_of_two("pccheck", job)
    assert train(rank_of("pccheck", tmp_path / "other", 2, 3)) == 0
    rank_directory(tmp_path / "other", 2).rename(rank_directory(job, 2))
    with pytest.raises(MismatchError, match="a mixture of several jobs"):
        whole_checkpoints(job)


def test_a_directory_in_which_nothing_was_written_is_nobodys(tmp_path):
    killed_at_once(tmp_path, 2, 3)
    directory = rank_directory(tmp_path, 2)
    with SlotStore(directory, slots=3, job_id=b"\x01" * 16, rank=2, world_size=4) as store:
        assert store.job.world_size == 4
        assert fmt.decode_job((directory / fmt.JOB_FILE).read_bytes()) == store.job
        store.reserve(1 << 16)
    with pytest.raises(MismatchError, match="belongs to job"):  # now it has slots
        SlotStore(directory, slots=3, job_id=bytes(16), rank=2, world_size=3)


def test_the_jobs_id_stays_where_others_took_it(tmp_path):
    job = tmp_path / "job"
    refused(tmp_path, rank_of("pccheck", job, 0, 2), **loose())
    assert train(rank_of("pccheck", job, 1, 2)) == 0
    known = shared_job_id(job)
    refused(tmp_path, rank_of("pccheck", job, 0, 2), MismatchError)  # rank 1 holds checkpoints, and rank 0 none
    assert shared_job_id(job) == known


def test_who_waits_for_a_lock_that_is_removed_locks_the_next_one(tmp_path):
    first, second, third = (FileLock(tmp_path / "lock", "it") for _ in range(3))
    first.acquire()
    told = []

    def end_the_first(message):
        told.append(message)
        first.remove()
        first.release()

    second.acquire(10.0, end_the_first)
    assert told and second.held and (tmp_path / "lock").exists()
    with pytest.raises(LockHeld):
        third.acquire()
    second.release()
    third.acquire()
    third.release()
