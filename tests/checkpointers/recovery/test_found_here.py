"""No training begins anew beside checkpoints: every system, in every situation that leads there."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.rank_directory import rank_directories, rank_directory
from lastgood.checkpointers.recovery.checkmate_job import JOB_FILE, Promises, note_job
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import CorruptCheckpoint, LastgoodError, MismatchError, StorageError
from lastgood.files import ReadableBy
from lastgood.ports import free_ports
from lastgood.storage import SlotStore
from lastgood.storage import format as fmt

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck", "dcp", "none"]
KEEPING = SYSTEMS[:-1]
READS = {"sync": "torch", "checkfreq": "torch", "gpm": "slots", "pccheck": "slots", "dcp": "folders", "none": ""}
TOKEN = "a token of the tests of layouts"


def attach(system: str, directory: Path, **knobs) -> int:
    """A training of one step; returns what it began at."""
    checkpointer = checkpointer_class(system)(directory, interval_steps=1, **knobs)
    step = checkpointer.attach(model=torch.nn.Linear(3, 3))
    checkpointer.step()
    checkpointer.close()
    return step


@pytest.fixture(autouse=True)
def the_jobs_token(monkeypatch):
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a checkpoint of each system."""
    folders = {system: tmp_path_factory.mktemp(system) for system in KEEPING}
    for system, folder in folders.items():
        assert attach(system, folder) == 0
    return folders


def refused(system: str, directory: Path, words: str, error: type[LastgoodError] = MismatchError, **knobs) -> None:
    def lying():
        return sorted(path for path in directory.parent.rglob("*-*") if path.name.startswith(("slot-", "checkpoint-")))

    before = lying()
    with pytest.raises(error, match=words):
        attach(system, directory, **knobs)
    assert lying() == before


@pytest.mark.parametrize("system", SYSTEMS)
def test_folders_of_ranks_in_the_directory(system, saved, tmp_path):
    """A job of two ranks was here, and one starts alone."""
    for rank in range(2):
        shutil.copytree(saved[system if system in saved else "sync"], rank_directory(tmp_path, rank))
    refused(
        system,
        tmp_path,
        r"rank-00000 holds .* of steps 1, and there are more .* written by a job of 2 ranks that keep a directory each"
        r".*this training is rank 0 of 1 rank, .*Start it as before.*move them away",
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_checkpoint_of_one_rank_above_a_ranks_directory(system, saved, tmp_path):
    shutil.copytree(saved[system if system in saved else "sync"], tmp_path, dirs_exist_ok=True)
    refused(system, rank_directory(tmp_path, 0), r"of steps 1, written by a job of 1 rank in .* itself.*move them away")


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_rank_that_is_new_beside_others(system, saved, tmp_path):
    for rank in range(2):
        shutil.copytree(saved[system if system in saved else "sync"], rank_directory(tmp_path, rank))
    refused(
        system,
        rank_directory(tmp_path, 2),
        r"rank-00002 holds no checkpoint, and .*rank-00000 holds .*this training has 1 rank.*bring them back",
    )


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("other", ["sync", "gpm", "dcp"])
def test_another_systems_checkpoints(system, other, saved, tmp_path):
    directory = tmp_path / "job"
    shutil.copytree(saved[other], directory)
    if READS[system] == READS[other]:
        assert attach(system, directory) == 1
        return
    refused(system, directory, rf"of steps 1, which {system} cannot resume; .*move them away")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("readable", [True, False])
def test_a_directory_of_a_checkmate_job(system, readable, tmp_path):
    """Its checkpoints are in shadows; a job none of whose steps was complete has none."""
    directory = tmp_path / "job"
    note_job(tmp_path / "early", "ab" * 16)
    assert attach(system, tmp_path / "early") == 0
    promises = Promises(directory, "ab" * 16, ReadableBy.OWNER)
    promises.made(7)
    words = rf"of steps 7, which {system} cannot resume"
    if not readable:
        (directory / JOB_FILE).write_text("{")
        words = "none of which can be read"
    refused(system, directory, rf"shadows of checkmate or flowcheck \(checkmate.json\).*{words}")


@pytest.mark.parametrize("system", KEEPING)
def test_everything_there_is_damaged(system, saved, tmp_path):
    directory = tmp_path / "job"
    shutil.copytree(saved[system], directory)
    for path in [*directory.glob("checkpoint-*.pt"), *directory.glob("slot-*"), *directory.glob("*/*.distcp")]:
        path.write_bytes(path.read_bytes()[:70_000].replace(b"\x01", b"\x02"))
    refused(system, directory, "no checkpoint can be read|no complete checkpoint, and slots", CorruptCheckpoint)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("what", ["file", "dangling link", "unreadable"])
def test_a_directory_that_is_none(system, what, tmp_path, monkeypatch):
    directory = tmp_path / "job"
    if what == "file":
        directory.write_bytes(b"")
    elif what == "dangling link":
        directory.symlink_to(tmp_path / "not mounted")
    else:  # the tests may run as root, whom no permission stops
        directory.mkdir()
        real = Path.iterdir

        def iterdir(path):
            if path == directory:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(Path, "iterdir", iterdir)
    if system == "none" and what != "unreadable":
        return  # it neither reads nor writes
    refused(system, directory, "job", StorageError)


@pytest.mark.parametrize("system", ["pccheck", "gpm"])
def test_slots_of_a_newer_format(system, saved, tmp_path, monkeypatch):
    directory = tmp_path / "job"
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "FORMAT_VERSION", fmt.FORMAT_VERSION + 1)
        attach("pccheck", directory)
    refused(system, directory, "version")
    (directory / "job.json").unlink()
    refused(system, directory, "version")


def test_without_the_jobs_file_the_slots_tell(saved, tmp_path):
    shutil.copytree(saved["pccheck"], tmp_path / "job")
    (tmp_path / "job" / "job.json").unlink()
    assert attach("pccheck", tmp_path / "job") == 1


def test_slots_that_were_emptied(saved, tmp_path):
    """That training has gone on from a checkpoint here is on the disk beside them."""
    directory = tmp_path / "job"
    shutil.copytree(saved["pccheck"], directory)
    checkpointer = PCcheck(directory, interval_steps=0)
    assert checkpointer.attach(model=torch.nn.Linear(3, 3)) == 1
    checkpointer._store.close()
    checkpointer._store = None
    checkpointer.close()
    for path in directory.glob("slot-*"):
        path.unlink()
    refused("pccheck", directory, "training has gone on from one here .of step 1 at most.*emptied", CorruptCheckpoint)


def test_other_numbers_of_slots_go_on(saved, tmp_path):
    shutil.copytree(saved["pccheck"], tmp_path / "job")
    for number, knobs in enumerate([{"keep": 1, "max_in_flight": 1}, {"keep": 5}, {"keep": 1}], 1):
        assert attach("pccheck", tmp_path / "job", **knobs) == number


# -- several ranks of PCcheck ------------------------------------------------------------------------------------------


def together(directory: Path, world: int, *, agree: bool = True, **knobs) -> list[int | LastgoodError]:
    """What each rank began at, or was refused with; each trains a step."""
    control = f"127.0.0.1:{free_ports()[0]}" if agree else "off"
    checkpointers = [
        PCcheck(
            directory if agree else rank_directory(directory, rank),
            interval_steps=1,
            rank=rank,
            world_size=world,
            control=control,
            join_timeout_s=60.0,
            **knobs,
        )
        for rank in range(world)
    ]

    def begin(checkpointer):
        try:
            return checkpointer.attach(model=torch.nn.Linear(3, 3))
        except LastgoodError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(begin, checkpointers))
        if all(isinstance(one, int) for one in found):
            list(pool.map(lambda one: one.step(), checkpointers))
        list(pool.map(lambda one: one.close(), checkpointers))
    return found


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_ranks(before, now, tmp_path):
    """Each way, on all ranks alike; and where that is meant, resume_from goes on from there."""
    job = tmp_path / "job"
    if before == 1:
        assert attach("pccheck", job) == 0
    else:
        assert together(job, before) == [0] * before
    lying = sorted(path for path in job.rglob("slot-*"))
    if now == 1:
        with pytest.raises(MismatchError) as refused:
            attach("pccheck", job)
        found = [refused.value]
    else:
        found = together(job, now)
    for error in found:
        assert isinstance(error, MismatchError), found
        for words in (f"a job of {before} rank", "resume_from"):
            assert words in str(error)
        assert f"has {now}" in str(error) or f" of {now} rank" in str(error), error
    assert sorted(path for path in job.rglob("slot-*")) == lying
    assert PCcheck(job).latest() == 1 if before == 1 else SlotStore.peek(rank_directory(job, 0)).committed()


@pytest.mark.parametrize("agreed", [True, False])
def test_a_control_that_was_changed(agreed, tmp_path):
    assert together(tmp_path, 2, agree=agreed) == [0, 0]
    assert len(rank_directories(tmp_path)) == 2
    for error in together(tmp_path, 2, agree=not agreed):
        assert isinstance(error, MismatchError)
        assert "of a job of 2 ranks" in str(error) and "`control` was changed" in str(error), error
    assert together(tmp_path, 2, agree=agreed) == [1, 1]


def test_a_control_that_is_off_for_the_jobs_directory(tmp_path):
    assert together(tmp_path, 2) == [0, 0]
    refused(
        "pccheck",
        tmp_path,
        r"a job of 2 ranks .*this training is rank 1 of 2 ranks.*control",
        rank=1,
        world_size=2,
        control="off",
    )


def test_an_environment_that_forgot_the_other_ranks(tmp_path):
    """Neither torch.distributed nor options say that there are two."""
    assert together(tmp_path, 2) == [0, 0]
    for directory in (tmp_path, rank_directory(tmp_path, 1)):
        refused("pccheck", directory, r"of 2( |,).*(rank 0 of 1|1 rank)")


def test_a_job_whose_first_life_ended_early_begins_anew(tmp_path):
    """There is no checkpoint, so nothing is lost."""
    checkpointer = PCcheck(tmp_path, interval_steps=0)
    checkpointer.attach(model=torch.nn.Linear(3, 3))
    checkpointer.close()
    assert attach("pccheck", tmp_path) == 0
