"""Files at names that somebody else may have made: never waited for, never followed, never taken for ours."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood.errors import ConfigError, LastgoodError, StorageError
from lastgood.files import (
    PRIVATE,
    ReadableBy,
    local_path,
    make_directory,
    open_log,
    open_new,
    open_regular,
    read_bounded,
    read_end,
    readers_of,
    remove_temporary_files,
    temporary_beside,
    write_atomically,
    write_result,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def a_link(path: Path) -> None:
    target = path.with_name("precious")
    target.write_text("precious")
    path.symlink_to(target)


def a_socket(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")  # such an address is short
        Path(folder, "s").rename(path)


WRONG: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a symbolic link": a_link,
    "a socket": a_socket,
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY])
def test_what_is_no_regular_file_is_refused_by_name_and_at_once(tmp_path: Path, kind: str, flags: int) -> None:
    path = tmp_path / "lock"
    WRONG[kind](path)
    with pytest.raises(StorageError, match=f"{re.escape(str(path))}: is {kind}, and a regular file belongs there"):
        open_regular(path, flags)


def test_a_file_that_a_user_named_may_be_a_link_but_no_fifo(tmp_path: Path) -> None:
    a_link(tmp_path / "link")
    assert read_bounded(tmp_path / "link", 100, follow=True) == b"precious"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to-fifo").symlink_to(tmp_path / "fifo")
    with pytest.raises(StorageError, match="is a FIFO"):
        read_bounded(tmp_path / "to-fifo", 100, follow=True)


def test_an_opened_file_waits_as_files_do(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    descriptor = open_regular(tmp_path / "a")
    try:
        assert os.get_blocking(descriptor) and not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_small_files_are_read_up_to_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(b"x" * 10)
    assert read_bounded(path, 10) == b"x" * 10
    with pytest.raises(StorageError, match=r"job\.json: is larger than 9 bytes"):
        read_bounded(path, 9)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 9)
    assert read_end(path, 4) == b"xxxx" and read_end(path, 99) == b"x" * 10


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask_unless_they_should(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for number, mode in enumerate((0o600, 0o640, 0o644)):
            os.close(open_new(tmp_path / f"new{number}", mode=mode))
            write_atomically(tmp_path / f"whole{number}", b"x", mode=mode)
            assert mode_of(tmp_path / f"new{number}") == mode_of(tmp_path / f"whole{number}") == mode
        os.close(open_new(tmp_path / "asked-for", mode=None))
        assert mode_of(tmp_path / "asked-for") == 0o666 & ~umask
        write_result(tmp_path / "results" / "r0.json", b"{}")
        assert mode_of(tmp_path / "results" / "r0.json") == 0o644
        for readers in ReadableBy:
            make_directory(tmp_path / "p" / readers, readers.directory_mode)
            assert mode_of(tmp_path / "p" / readers) == readers.directory_mode
        assert mode_of(tmp_path / "p") == 0o777 & ~umask, "parents are as everything else that a user makes"
    finally:
        os.umask(before)


def test_nobody_else_can_open_it_for_a_moment_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = os.open

    def note(path: str, flags: int, mode: int = 0o777) -> int:
        made.append((mode, flags))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", note)
    before = os.umask(0)
    try:
        write_atomically(tmp_path / "a", b"x", mode=0o644)
        open_log(tmp_path / "b").close()
    finally:
        os.umask(before)
    assert [mode for mode, flags in made if flags & os.O_CREAT] == [PRIVATE, PRIVATE]


def test_a_new_file_is_new(tmp_path: Path) -> None:
    a_link(tmp_path / "link")
    with pytest.raises(FileExistsError):
        open_new(tmp_path / "link")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_log_is_private_and_emptied_and_no_way_out(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_text("an older and longer one")
    path.chmod(0o644)
    with open_log(path) as log:
        log.write(b"new")
    assert path.read_bytes() == b"new" and mode_of(path) == 0o600
    a_link(tmp_path / "link.log")
    os.mkfifo(tmp_path / "fifo.log")
    for name in ("link.log", "fifo.log"):
        with pytest.raises(StorageError, match=name):
            open_log(tmp_path / name)
    assert (tmp_path / "precious").read_text() == "precious"


def test_only_our_own_temporary_names_are_removed(tmp_path: Path) -> None:
    ours = [temporary_beside(tmp_path / name) for name in ("slot-0000.lgs", "ä" * 120, "model", ".hidden")]
    for path in ours[1:]:
        path.write_bytes(b"half")
    (ours[0] / "deep").mkdir(parents=True)
    (ours[0] / "deep" / "file").write_bytes(b"half")
    older = tmp_path / "job.json.tmp"
    older.write_bytes(b"half")
    theirs = [
        "notes.tmp",
        "job.json.tmp.bak",
        "model.replaced.tmp",
        ".lastgood-tmp",
        "x.lastgood-tmp",
        ".x.0123.lastgood-tmp",
        ".x.0123456789ABCDEF.lastgood-tmp",
        f"{ours[2].name}.old",
    ]
    for name in theirs:
        (tmp_path / name).write_bytes(b"theirs")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"theirs")
    link = temporary_beside(tmp_path / "link")
    link.symlink_to(outside)
    removed = remove_temporary_files(tmp_path, re.compile(r"job\.json\.tmp"))
    assert removed == sorted([*ours, older])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*theirs, "outside", link.name])
    assert (outside / "file").read_bytes() == b"theirs"
    assert remove_temporary_files(tmp_path / "nowhere") == []


def test_a_planted_temporary_name_leads_nowhere(tmp_path: Path) -> None:
    """The names that earlier versions opened."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "job.json.tmp").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "other.json.tmp")  # who opens it to write waits without an end
    for name in ("job.json", "other.json"):
        write_atomically(tmp_path / name, b"{}")
    assert (tmp_path / "victim").read_text() == "precious" and (tmp_path / "job.json").read_bytes() == b"{}"


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    write_result(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match=r"a\.csv: writing of 3 bytes .*No space left"):
        write_result(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_half_way_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    program = (
        "import os, signal, sys; from pathlib import Path; from lastgood.files import write_result\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_result(Path(sys.argv[1]), b'half')"
    )
    done = subprocess.run([sys.executable, "-c", program, path], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(remove_temporary_files(tmp_path)) == 1


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b", "file:///tmp/x", "S3:/b/r", Path("s3://bucket/run")])
def test_a_url_is_no_directory(url: Path | str) -> None:
    with pytest.raises(ConfigError, match="is a URL"):
        local_path(url)


def test_a_relative_path_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = local_path("ckpt/job")
    monkeypatch.chdir("/")
    assert path == tmp_path / "ckpt" / "job"
    assert local_path("/a:/b") == Path("/a:/b")


def test_readers_are_owner_group_or_all() -> None:
    assert readers_of("group", "x") is ReadableBy.GROUP
    with pytest.raises(LastgoodError, match="x: readable_by must be one of owner, group, all, not 'world'"):
        readers_of("world", "x")
