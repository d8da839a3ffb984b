"""The token's file: made once, for its owner alone."""

import multiprocessing

import pytest

from lastgood.cli._peer import read_token as read_peer_token
from lastgood.errors import ConfigError, StorageError
from lastgood.experiments.ceilings.measure import Peer
from lastgood.tokens import read_token


def test_made_once_and_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "new" / "token"
    with pytest.raises(ConfigError, match="there is no token"):
        read_token(path)
    token = read_token(path, make=True)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path, make=True) == read_token(path) == token
    assert [one.name for one in path.parent.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("content", "mode", "match"),
    [
        (b"x" * 32, 0o644, "chmod 600"),
        (b"short", 0o600, "not 5"),
        (b"x" * 5000, 0o600, "not 4097"),
        (b"", 0o600, "not 0"),
    ],
)
def test_what_is_no_token_is_refused(tmp_path, content, mode, match):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=match):
        read_token(path, make=True)


@pytest.mark.parametrize("make", [False, True])
@pytest.mark.parametrize("name", ["x" * 300, "file/token", "folder", "loop"])
def test_where_no_file_can_be_that_is_an_error_with_its_name(tmp_path, name, make):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match=name):
        read_token(tmp_path / name, make=make)


def test_the_token_of_a_measured_port_is_its_owner_s_too(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(b"x" * 32 + b"\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--peer-token-file: .*chmod 600"):
        read_peer_token(path)
    path.chmod(0o600)
    assert read_peer_token(path) == "x" * 32
    assert "x" * 32 not in repr(Peer("other", 5, "x" * 32))


def make(path, queue):
    queue.put(read_token(path, make=True))


def test_two_processes_that_start_together_agree(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    started = [context.Process(target=make, args=(tmp_path / "token", queue)) for _ in range(4)]
    for process in started:
        process.start()
    found = {queue.get(timeout=60) for _ in started}
    for process in started:
        process.join(60)
    assert len(found) == 1
