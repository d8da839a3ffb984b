"""The directory that a system is given: who may read what lies there, where it is, and that one training has it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names
from lastgood.errors import ConfigError, LockHeld, StorageError
from lastgood.storage import SlotStore
from tests.checkpointers.support.peer_processes import peers_end_with_the_test

ON_DISK = ["sync", "checkfreq", "gpm", "pccheck", "dcp", "torchsnapshot", "nvrx"]


@pytest.fixture(params=ON_DISK)
def system(request: pytest.FixtureRequest) -> type[Checkpointer]:
    kind = checkpointer_class(request.param)
    reason = kind.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return kind


def a_state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1000,), value), "step": torch.tensor(3)}


def modes(directory: Path) -> dict[str, int]:
    found = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory.parent)): stat.S_IMODE(path.lstat().st_mode) for path in found}


@pytest.mark.parametrize(("readers", "file_mode", "folder_mode"), [(None, 0o600, 0o700), ("group", 0o640, 0o750)])
def test_only_the_owner_reads_unless_told(
    system: type[Checkpointer], tmp_path: Path, readers: str | None, file_mode: int, folder_mode: int
) -> None:
    before = os.umask(0o022)
    try:
        more = {} if readers is None else {"readable_by": readers}
        checkpointer = system(tmp_path / "runs" / "job", **more)
        checkpointer.start(a_state())
        checkpointer.save(1)
        checkpointer.drain()
        checkpointer.close()
    finally:
        os.umask(before)
    assert checkpointer.events[-1].outcome is Outcome.DURABLE
    found = modes(tmp_path / "runs" / "job")
    for name, mode in found.items():
        path = tmp_path / "runs" / name
        assert mode == (folder_mode if path.is_dir() else file_mode), name
    assert len(found) > 2
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755, "its parents are the user's"
    fresh = a_state(0.0)
    assert system(tmp_path / "runs" / "job").restore(fresh) == 1 and fresh["x"][0] == 1


def test_slots_of_an_earlier_version_get_the_mode_too(tmp_path: Path) -> None:
    for name in ("pccheck", "gpm"):
        kind = checkpointer_class(name)
        for _ in range(2):
            checkpointer = kind(tmp_path / name)
            checkpointer.start(a_state())
            checkpointer.save(1)
            checkpointer.close()
            slot = tmp_path / name / "slot-0000.lgs"
            assert stat.S_IMODE(slot.stat().st_mode) == 0o600
            slot.chmod(0o644)


def test_an_archive_is_as_private(tmp_path: Path) -> None:
    checkpointer = PCcheck(tmp_path / "job", archive_every=1, archive_dir=str(tmp_path / "archive"))
    checkpointer.start(a_state())
    checkpointer.save(1)
    checkpointer.drain()
    checkpointer.close()
    found = modes(tmp_path / "archive")
    assert found.pop("archive") == 0o700
    assert len(found) == 2 and set(found.values()) == {0o600}


def test_who_may_read_is_part_of_no_record(tmp_path: Path) -> None:
    """It would change the path and the hash of every one."""
    for name in checkpointer_names():
        assert not {"readable_by", "path_options"} & checkpointer_class(name).Options.model_fields.keys()
    with pytest.raises(ConfigError, match="pccheck: readable_by must be one of owner, group, all, not 'everyone'"):
        PCcheck(tmp_path, readable_by="everyone")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "hdfs://host/run", "file:///tmp/run"])
@pytest.mark.parametrize("name", checkpointer_names())
def test_a_url_is_refused_by_every_system(name: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a URL"):
        checkpointer_class(name)(url)
    with pytest.raises(ConfigError, match="is a URL"):
        checkpointer_class(name)(Path(url))
    assert list(tmp_path.iterdir()) == []


def test_other_paths_may_be_no_urls_either(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="s3://b/r: is a URL"):
        PCcheck(tmp_path, archive_dir="s3://b/r", archive_every=2)
    with pytest.raises(ConfigError, match="gs://b/r: is a URL"):
        PCcheck(tmp_path, resume_from="gs://b/r")
    with pytest.raises(ConfigError, match="is a URL"):
        PCcheck.tuned("s3://b/r")
    with pytest.raises(ConfigError, match="is a URL"):
        SlotStore.peek("s3://b/r")
    with pytest.raises(ConfigError, match="is a URL"):
        SlotStore("s3://b/r", slots=3)


def test_a_process_that_goes_elsewhere_saves_where_it_said(
    system: type[Checkpointer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpointer = system("ckpt/job")
    monkeypatch.chdir(tmp_path / "there")
    checkpointer.start(a_state())
    for step in (1, 2):
        checkpointer.save(step)
        checkpointer.drain()
    checkpointer.close()
    assert [event.outcome for event in checkpointer.events] == [Outcome.DURABLE] * 2
    assert list((tmp_path / "there").iterdir()) == []
    assert system(tmp_path / "here" / "ckpt" / "job").restore(a_state()) == 2


def test_all_paths_are_absolute_from_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = PCcheck("job", archive_every=1, archive_dir="archive", resume_from="older")
    shadowed = Checkmate("job", token_file="token")
    with peers_end_with_the_test(tmp_path):
        gemini = checkpointer_class("gemini")("peers")
        assert gemini.directory == tmp_path / "peers" == gemini._peers._directory
    assert (made.options.archive_dir, made.options.resume_from) == (str(tmp_path / "archive"), str(tmp_path / "older"))
    assert shadowed.options.token_file == str(tmp_path / "token")
    assert SlotStore.peek("job").directory == made.directory == tmp_path / "job"


def test_a_second_training_is_refused_and_loses_nothing(system: type[Checkpointer], tmp_path: Path) -> None:
    first = system(tmp_path, interval_steps=1)
    first.attach(x=a_state())
    first.step()
    first.drain()
    with pytest.raises(
        LockHeld, match=rf"checkpoint directory {tmp_path} is held by this very process \({os.getpid()}\)"
    ):
        system(tmp_path, interval_steps=1).attach(x=a_state(5.0))
    with pytest.raises(LockHeld):
        system(tmp_path).start(a_state(5.0))
    assert system(tmp_path).latest() == 1, "whoever only looks is let in"
    first.step()
    first.drain()
    assert [event.outcome for event in first.events] == [Outcome.DURABLE] * 2
    first.close()
    second = system(tmp_path, interval_steps=1)
    assert second.attach(x=a_state(0.0)) == 2
    second.close()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_lock_that_is_none_is_named(system: type[Checkpointer], tmp_path: Path, kind: str) -> None:
    lock = tmp_path / "job" / "lock"
    lock.parent.mkdir()
    {"fifo": os.mkfifo, "link": lambda path: path.symlink_to(tmp_path / "x"), "folder": Path.mkdir}[kind](lock)
    with pytest.raises(StorageError, match=f"{lock}: is a "):
        system(tmp_path / "job").start(a_state())
    assert not (tmp_path / "x").exists()


def test_a_failed_start_gives_the_directory_back(system: type[Checkpointer], tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"state\.bad|bad"):
        system(tmp_path).start({"bad": lambda: None})
    other = system(tmp_path)
    other.start(a_state())
    other.close()


def test_settings_that_are_a_fifo_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pccheck.yaml")
    with pytest.raises(StorageError, match=r"pccheck\.yaml: is a FIFO"):
        PCcheck.tuned(tmp_path)
