"""The wrapper around each rank and the launch's end of its lifeline, as real processes on this machine, without ssh."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.gemini.address_file import Address
from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.launch import launchers as launch_ways
from lastgood.cluster.launch import lifelines as launch_board
from lastgood.cluster.launch.launchers import Way, deepspeed_env_text, way
from lastgood.cluster.launch.lifelines import Board
from lastgood.cluster.launch.order import TICKET_FILE, How, Ticket, check_env, launch_proof
from lastgood.cluster.launch.wrapper import find_place, route_interface
from lastgood.cluster.ssh.remote import Remote, SshOptions
from lastgood.errors import ConfigError, LaunchError
from lastgood.files import write_atomically

TICKET = Ticket(
    token="t",
    addresses=["127.0.0.1"],
    port=1,
    how="torchrun",
    argv=["true"],
    cwd="/",
    env={},
    logs="/tmp",
    start_s=20.0,
    timeout_s=60.0,
    grace_s=1.0,
)
LINES = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=40)


class Job:
    """A board, and wrappers that this test has started in the place of a launcher."""

    def __init__(self, folder: Path, world: int) -> None:
        self.board = Board(secrets.token_hex(8), ["here"] * world)
        self.logs = folder / "logs of ranks"
        self.wrappers: list[subprocess.Popen[bytes]] = []
        self._world = world

    def ticket(self, code: str, **changes: object) -> Ticket:
        argv = [sys.executable, "-c", code]
        made = replace(TICKET, token=self.board._token, port=self.board.port, argv=argv, logs=str(self.logs))
        return replace(made, **changes)

    def start(self, code: str, through: tuple[str, ...] = (), **changes: object) -> None:
        word = self.ticket(code, **changes).encode()
        for rank in range(self._world):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._world),
                "MASTER_ADDR": "127.0.0.1",
            }
            command = [*through, sys.executable, "-m", "lastgood.cluster.launch.wrapper", "-"]
            wrapper = subprocess.Popen(command, env={**os.environ, **env}, stdin=subprocess.PIPE)
            assert wrapper.stdin is not None
            with wrapper.stdin as given:
                given.write(word.encode())
            self.wrappers.append(wrapper)

    def serve_until(self, what: str, found: Callable[[], object], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not found():
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s: {self.board.ranks}"
            self.board.serve(0.1)

    def running(self) -> list[psutil.Process]:
        """The ranks' programs, once all of them run."""
        self.serve_until("start", lambda: all(state.pid is not None for state in self.board.ranks))
        return [psutil.Process(state.pid) for state in self.board.ranks]

    def end(self) -> None:
        self.board.close()
        for wrapper in self.wrappers:
            wrapper.terminate()
            wrapper.wait(timeout=60)


def rank_command(folder: Path, word: str) -> list[str]:
    write_atomically(folder / "ticket", word.encode())
    return [sys.executable, "-m", "lastgood.cluster.launch.wrapper", str(folder / "ticket")]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    made: list[Job] = []

    def make(world: int) -> Job:
        made.append(Job(tmp_path, world))
        return made[-1]

    yield make
    for one in made:
        one.end()


SLEEP = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(100)"


def test_ranks_get_their_place_and_their_logs(job: Callable[[int], Job]) -> None:
    code = (
        "import os, sys; print(*(os.environ[n] for n in ('RANK','WORLD_SIZE','MASTER_ADDR','GLOO_SOCKET_IFNAME','A')));"
        "print('an error', file=sys.stderr); print(os.getcwd(), sys.stdin.read())"
    )
    one = job(3)
    one.start(code, env={"A": "a $HOME b"})
    one.serve_until("end", lambda: one.board.all_over)
    assert [state.status for state in one.board.ranks] == [0, 0, 0]
    assert one.board.first_failure is None
    for rank in range(3):
        lines = (one.logs / f"rank-{rank:05d}.log").read_text().splitlines()
        assert sorted(lines) == sorted([f"{rank} 3 127.0.0.1 lo a $HOME b", "an error", "/ "])
    assert [wrapper.wait(timeout=60) for wrapper in one.wrappers] == [0, 0, 0]


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="this Python is in no virtual environment")
def test_python_is_that_of_the_launch_unless_a_path_is_given(
    job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for own, expected in (({}, f"{sys.prefix}/bin:/usr/bin:/bin"), ({"PATH": "/bin:/usr/bin"}, "/bin:/usr/bin")):
        one = job(1)
        one.start("", argv=["sh", "-c", "echo $PATH; command -v python || true"], env=own)
        one.serve_until("end", lambda one=one: one.board.all_over)
        path, *python = (one.logs / "rank-00000.log").read_text().splitlines()
        assert path == expected
        assert own or python == [f"{sys.prefix}/bin/python"]


def test_srun_and_deepspeed_ranks_meet_where_rank_0_found_a_port(job: Callable[[int], Job]) -> None:
    one = job(2)
    code = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    one.start(code, how="deepspeed")
    one.serve_until("end", lambda: one.board.all_over)
    first, second = ((one.logs / f"rank-0000{rank}.log").read_text() for rank in range(2))
    assert first == second
    assert first.startswith("127.0.0.1 ")
    assert 1024 <= int(first.split()[1]) <= 65535


def test_the_first_failure_is_told_with_its_last_lines(job: Callable[[int], Job], tmp_path: Path) -> None:
    one = job(2)
    # The other must run by then: told to end before it runs, it never would.
    gate = tmp_path / "gate"
    one.start(
        "import os, pathlib, time\n"
        "if os.environ['RANK'] == '1':\n"
        f"    while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
        "    print('the reason'); raise SystemExit(7)\n"
        f"{SLEEP}",
        grace_s=60.0,
    )
    one.running()
    gate.touch()
    one.serve_until("failure", lambda: one.board.first_failure)
    failed = one.board.first_failure
    assert failed is not None
    assert (failed.rank, failed.status) == (1, 7)
    assert failed.tail == "the reason"
    one.board.stop()
    one.serve_until("end of the other", lambda: one.board.all_over)
    assert one.board.ranks[0].status == -signal.SIGTERM
    assert one.board.first_failure is failed
    assert one.wrappers[1].wait(timeout=60) == 7


@pytest.mark.parametrize(
    ("status", "first"), [(-signal.SIGKILL, 1), (-signal.SIGTERM, 0), (-signal.SIGABRT, 0), (3, 0)]
)
def test_of_failures_that_are_heard_of_before_the_end_a_killed_rank_is_the_first(status: int, first: int) -> None:
    """Rank 0 fails because it has lost rank 1; the launch was held up, and finds both words."""
    board = Board("t", ["here", "here"])
    lines = [socket.create_connection(("127.0.0.1", board.port), timeout=60) for _ in range(2)]
    try:
        for rank, line in enumerate(lines):
            introduce(line, board, rank=rank)
        deadline = time.monotonic() + 60
        while board.missing:
            assert time.monotonic() < deadline
            board.serve(0.1)
        for rank, ended in enumerate((1, status)):
            lines[rank].sendall(json.dumps({"ended": ended, "tail": ""}).encode() + b"\n")
            while not board.ranks[rank].over:
                assert time.monotonic() < deadline
                board.serve(0.1)
        assert board.first_failure is board.ranks[first]
    finally:
        for line in lines:
            line.close()
        board.close()


# -- whatever comes ----------------------------------------------------------------------------------------------------

HELLO = {"rank": 0, "world": 2, "port": 5, "slurm_job": None}


def introduce(line: socket.socket, board: Board, **changes: object) -> None:
    """As a rank that knows the token does, but for `changes`."""
    while not ready(line):
        board.serve(0.02)
    ours, theirs = "0" * 64, json.loads(line.recv(4096).splitlines()[0])["nonce"]
    hello = {"nonce": ours, "proof": launch_proof("t", "rank", ours, theirs), **HELLO, **changes}
    line.sendall(json.dumps(hello).encode() + b"\n")


@contextlib.contextmanager
def serving_board(world: int = 2) -> Iterator[tuple[Board, Callable[[str, Callable[[], object]], None]]]:
    board = Board("t", ["here"] * world)

    def until(what: str, found: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not found():
            assert time.monotonic() < deadline, f"no {what}: {board.ranks}"
            board.serve(0.02)

    try:
        yield board, until
    finally:
        board.close()


def comes_in(board: Board, rank: int, world: int = 2) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", board.port), timeout=60)
    introduce(line, board, rank=rank, world=world)
    return line


ODD_LINES = {
    "deep": b"[" * 60_000,
    "short of fields": b'{"rank": 0}',
    "no text": b"\xff\xfe",
    "a list": b"[]",
    "a number": b"5",
    "a text": b'"x"',
    "infinite": json.dumps({**HELLO, "port": math.inf}).encode(),
    "too large": json.dumps(HELLO).replace("5", "1e999").encode(),
    "many digits": json.dumps(HELLO).replace("5", "9" * 5000).encode(),
    "endless": b"x" * 200_000,
    "a true rank": {"rank": True},
    "a rank that nobody has": {"rank": 7},
    "another proof": {"proof": "0" * 64},
    "a proof of another kind": {"proof": 5},
    "another nonce": {"nonce": "1" * 64},
    "half a character": {"proof": "\ud800"},
    "nothing": b"",
}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES)
def test_no_line_of_a_stranger_ends_a_launch(line: bytes | dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    with serving_board() as (board, until):
        with socket.create_connection(("127.0.0.1", board.port), timeout=60) as stranger:
            with contextlib.suppress(OSError):
                if isinstance(line, dict):
                    introduce(stranger, board, **line)
                else:
                    stranger.sendall(line + b"\n")
            until("line in the log", lambda: "the launch's port" in caplog.text)
        with comes_in(board, 0), comes_in(board, 1):
            until("ranks", lambda: not board.missing)
        assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b"\xff",
        b"[1]",
        b'{"started": "x"}',
        b'{"started": 1e999}',
        b'{"ended": 99999999999999999999}',
        b'{"ended": 0}',
        b"x" * 200_000,
    ],
    ids=lambda line: repr(line[:30]),
)
def test_no_line_of_a_rank_ends_a_launch(line: bytes) -> None:
    with serving_board() as (board, until), comes_in(board, 0) as bad, comes_in(board, 1) as good:
        until("ranks", lambda: board.connected == 2)
        with contextlib.suppress(OSError):
            bad.sendall(line + b"\n")
        until("the loss", lambda: board.ranks[0].over)
        assert "no message" in (board.ranks[0].fault or "") or "a line of more than" in (board.ranks[0].fault or "")
        good.sendall(b'{"ended": 0, "tail": ""}\n')
        until("the end", lambda: board.all_over)
        assert board.ranks[1].status == 0


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("first", [b"", b"x", json.dumps(HELLO).encode() + b"\n"], ids=["silent", "half", "hello"])
def test_a_connection_that_is_reset_ends_no_launch(first: bytes, turns: int) -> None:
    with serving_board() as (board, until):
        for _ in range(5):
            dying = socket.create_connection(("127.0.0.1", board.port), timeout=60)
            for _ in range(turns):
                board.serve(0.005)
            dying.sendall(first)
            dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dying.close()
            board.serve(0.02)
        with comes_in(board, 1):
            until("rank 1", lambda: board.ranks[1]._hello)
            if board.ranks[0]._hello:  # it may have gone with its connection
                until("the loss of rank 0", lambda: board.ranks[0].over)


def test_a_rank_that_is_gone_right_behind_its_hello_is_lost_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with serving_board() as (board, until):
        with monkeypatch.context() as patched, comes_in(board, 0):
            patched.setattr(launch_board, "notice_loss", no_more)
            until("the loss", lambda: board.ranks[0].over)
        assert "not connected" in (board.ranks[0].fault or "")
        with comes_in(board, 1):
            until("rank 1", lambda: board.ranks[1]._hello)


def test_a_launch_on_this_machine_listens_on_loopback_only() -> None:
    with serving_board() as (board, _):
        assert board._gate._listener.getsockname()[0] == "127.0.0.1"
    board = Board("t", ["there"], listen="")
    assert board._gate._listener.getsockname()[0] in ("::", "0.0.0.0")
    board.close()


def test_a_killed_program_is_told_by_its_signal(job: Callable[[int], Job]) -> None:
    one = job(1)
    one.start(SLEEP)
    (program,) = one.running()
    program.kill()
    one.serve_until("failure", lambda: one.board.first_failure)
    assert one.board.ranks[0].status == -signal.SIGKILL
    assert one.wrappers[0].wait(timeout=60) == 128 + signal.SIGKILL


def test_a_killed_wrapper_takes_its_program_along_and_is_noticed(job: Callable[[int], Job]) -> None:
    one = job(1)
    one.start(SLEEP)
    programs = one.running()
    one.wrappers[0].kill()
    _, alive = psutil.wait_procs(programs, timeout=60)
    assert not alive
    one.serve_until("failure", lambda: one.board.first_failure)
    assert "closed without a word" in (one.board.ranks[0].fault or "")


def test_a_program_that_will_not_end_is_killed_with_its_children(job: Callable[[int], Job]) -> None:
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 100; :']); print('on', flush=True); time.sleep(100)"
    )
    one = job(1)
    one.start(stubborn)
    (program,) = one.running()
    one.serve_until("children", lambda: len(program.children(recursive=True)) >= 2)
    family = [program, *program.children(recursive=True)]
    one.board.close()  # as a kill of the launch does
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    one.board = Board("another", ["here"])  # for the fixture to close


def test_ranks_end_with_their_launcher(job: Callable[[int], Job]) -> None:
    one = job(1)
    # The shell stands for torchrun; it does not become the wrapper, since it has something to do afterwards.
    one.start(SLEEP, through=("sh", "-c", '"$@"; :', "sh"))
    programs = one.running()
    one.wrappers[0].kill()
    _, alive = psutil.wait_procs(programs, timeout=60)
    assert not alive
    one.serve_until("word of it", lambda: one.board.all_over)


def test_a_program_that_is_not_there(job: Callable[[int], Job]) -> None:
    one = job(1)
    one.start("", argv=["/no/such/program"])
    one.serve_until("failure", lambda: one.board.first_failure)
    assert "cannot start '/no/such/program' in /: No such file" in (one.board.ranks[0].fault or "")


def test_a_log_that_is_no_file_is_a_fault_that_the_launch_hears_of(job: Callable[[int], Job]) -> None:
    one = job(1)
    one.logs.mkdir()
    os.mkfifo(one.logs / "rank-00000.log")
    one.start(SLEEP)
    one.serve_until("failure", lambda: one.board.first_failure)
    assert "rank-00000.log" in (one.board.ranks[0].fault or "")


def test_the_ranks_remove_the_file_of_their_ticket(job: Callable[[int], Job]) -> None:
    """So that it is not left where the launch is killed while they run."""
    one = job(2)
    file = Path(f"{TICKET_FILE}{secrets.token_hex(16)}")
    write_atomically(file, one.ticket(SLEEP).encode().encode())
    try:
        for rank in "01":
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            command = [sys.executable, "-m", "lastgood.cluster.launch.wrapper", str(file)]
            one.wrappers.append(subprocess.Popen(command, env={**os.environ, **env}))
            one.serve_until("word of it", lambda rank=rank: one.board.ranks[int(rank)] not in one.board.missing)
            assert file.exists() or rank == "1"
        one.running()
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


def test_time_is_bounded_on_the_host_too(job: Callable[[int], Job]) -> None:
    one = job(1)
    one.start(SLEEP, timeout_s=0.5)
    one.serve_until("end", lambda: one.board.all_over)
    assert "ended rank 0: 0 s are over" in one.board.ranks[0].tail or "are over" in one.board.ranks[0].tail


def test_a_rank_waits_only_so_long_for_the_others(job: Callable[[int], Job], tmp_path: Path) -> None:
    one = job(2)
    word = one.ticket(SLEEP, start_s=1.0).encode()
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = rank_command(tmp_path, word)
    one.wrappers.append(subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL))
    one.serve_until("failure", lambda: one.board.first_failure)
    assert one.board.ranks[0].fault == "the other ranks have not come in time"
    assert [state.rank for state in one.board.missing] == [1]


def test_a_launch_that_is_not_reached_is_named(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        word = replace(TICKET, port=nobody.getsockname()[1]).encode()
        done = subprocess.run(
            rank_command(tmp_path, word),
            env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert "does not reach the launch at port" in done.stderr
    assert "firewall" in done.stderr


def test_strangers_disturb_nothing(job: Callable[[int], Job]) -> None:
    one = job(1)
    words = [
        b"",
        b"hello\n",
        b"[]\n",
        b"x" * 100_000,
        b'{"rank": 0, "token": "wrong", "world": 1}\n',
        b'{"rank": -1}\n',
    ]
    strangers = []
    for word in words:
        stranger = socket.create_connection(("127.0.0.1", one.board.port), timeout=60)
        stranger.sendall(word)
        strangers.append(stranger)
    one.serve_until(
        "greeting",
        lambda: strangers[0].recv(4096, socket.MSG_DONTWAIT | socket.MSG_PEEK) if ready(strangers[0]) else b"",
    )
    one.start("pass")
    one.serve_until("end", lambda: one.board.all_over)
    assert one.board.first_failure is None
    for stranger in strangers:
        stranger.close()


def ready(one: socket.socket) -> bool:
    import select

    return bool(select.select([one], [], [], 0)[0])


def test_a_stranger_at_the_board_is_shown_nothing_to_try_tokens_with() -> None:
    with serving_board(1) as (board, until), socket.create_connection(("127.0.0.1", board.port), timeout=60) as line:
        introduce(line, board, proof="0" * 64)
        until("answer", lambda: ready(line))
        assert json.loads(line.recv(4096)) == {"refused": "another token"}


def test_a_rank_tells_a_stranger_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        word = replace(TICKET, token="secret", port=server.getsockname()[1]).encode()
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        rank = subprocess.Popen(
            rank_command(tmp_path, word),
            env=env,
            stderr=subprocess.PIPE,
        )
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60)
                theirs = "1" * 64
                connection.sendall(json.dumps({"nonce": theirs}).encode() + b"\n")
                said = connection.recv(4096)
                assert b"secret" not in said
                ours = json.loads(said)["nonce"]
                shown = launch_proof("another", "launch", ours, theirs)
                connection.sendall(json.dumps({"proof": shown}).encode() + b"\n")
                assert connection.recv(4096) == b""
            assert b"another launch, listens there" in rank.communicate(timeout=60)[1]
        finally:
            rank.kill()
            rank.wait()


def test_a_rank_that_hears_of_the_start_and_of_the_end_at_once_starts_nothing(tmp_path: Path) -> None:
    """As one does that was held up meanwhile; its program would outlive the launch's word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        started = tmp_path / "started"
        word = replace(
            TICKET, port=server.getsockname()[1], argv=["touch", str(started)], logs=str(tmp_path / "logs")
        ).encode()
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        rank = subprocess.Popen(rank_command(tmp_path, word), env=env)
        try:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(60)
                connection.sendall(json.dumps({"nonce": "1" * 64}).encode() + b"\n")
                hello = json.loads(lines.readline())
                assert hello["rank"] == 0
                shown = launch_proof(TICKET.token, "launch", hello["nonce"], "1" * 64)
                words = ({"proof": shown}, {"go": {"address": "127.0.0.1", "port": 1}}, {"stop": True})
                connection.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in words))
                assert rank.wait(60) == 1
        finally:
            rank.kill()
            rank.wait()
    assert not started.exists()


@given(st.lists(LINES, min_size=1), st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), LINES, max_size=4))
def test_a_ticket_comes_back_as_it_was(argv: list[str], env: dict[str, str]) -> None:
    ticket = replace(TICKET, argv=argv, env=env)
    word = ticket.encode()
    assert set(word) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=")
    assert Ticket.decode(word) == ticket


@given(st.text(max_size=60))
def test_what_is_no_ticket_is_refused(word: str) -> None:
    with pytest.raises(LaunchError, match="not a ticket"):
        Ticket.decode(word)


def test_a_ticket_that_is_too_long() -> None:
    with pytest.raises(ConfigError, match="put the rest into a file"):
        replace(TICKET, argv=["x" * 100_000]).encode()


@example("a `b` $c $(d) \\ \\\\ \"e\" 'f' !g %n %% *")
@settings(max_examples=25, deadline=None)
@given(LINES.filter(lambda value: value == value.strip()))
def test_values_reach_deepspeed_ranks_as_they_are(value: str) -> None:
    """What DeepSpeed does with a line of its file, and a shell on the host with that."""
    (line,) = [line for line in deepspeed_env_text({"VALUE": value}).split("\n") if line.startswith("VALUE=")]
    text = line.partition("=")[2].strip().replace("%%", "%")
    shell = f'export VALUE="{text}"; printf %s "$VALUE"'
    done = subprocess.run(["bash", "-c", shell], stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout.decode() == value


@pytest.mark.parametrize(("how", "program"), [("deepspeed", "pdsh"), ("openmpi", "mpirun"), ("srun", "srun")])
def test_a_launcher_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: How, program: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = parse_hostfile("here slots=1\n")
    with pytest.raises(ConfigError, match=program):
        way(how, Way(hosts, TICKET, sys.executable, Remote(), tmp_path, [], "127.0.0.1", 1))


@pytest.mark.parametrize("how", ["deepspeed", "openmpi"])
def test_a_python_without_deepspeed_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: How
) -> None:
    # Only looked for: the launch ends before any of them is called.
    for name, text in (
        *((program, "exit 9\n") for program in ("pdsh", "mpirun", "ompi_info")),
        ("python", f'exec {shlex.quote(sys.executable)} -I -S "$@"\n'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    hosts = parse_hostfile("here slots=1\n")
    for python, why in ((str(tmp_path / "python"), r"pip install 'lastgood\[deepspeed\]'"), ("/no/python", "No such")):
        with pytest.raises(ConfigError, match=f"{python}.*{why}"):
            way(how, Way(hosts, TICKET, python, Remote(), tmp_path, [], "127.0.0.1", 1))
    assert not (tmp_path / "deepspeed.log").exists()


def test_options_that_mpirun_would_tear_apart_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "my config"
    config.write_text("Host *\n")
    given = Way(parse_hostfile("here slots=1\n"), TICKET, "python", Remote(SshOptions(config)), tmp_path, [], "", 1)
    for how, program in (("deepspeed", "pdsh"), ("openmpi", "mpirun")):
        if shutil.which(program) is not None:
            with pytest.raises(ConfigError, match=f"{program} cannot pass on .*my config"):
                way(how, given)


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
def test_a_python_that_deepspeeds_launcher_would_tear_apart_is_refused_before_it_starts(tmp_path: Path) -> None:
    python = "/opt/my environment/bin/python"
    given = Way(parse_hostfile("here slots=1\n"), TICKET, python, Remote(), tmp_path, [], "127.0.0.1", 1)
    with pytest.raises(ConfigError, match=r"my environment/bin/python.*without blanks.*--how torchrun"):
        way("deepspeed", given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("env", [{"1A": "b"}, {"A-B": ""}, {"": ""}, {"A": "x\ny"}, {"A": "x\0"}])
def test_environments_that_cannot_travel(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--env"):
        check_env(env)


def test_the_place_of_a_rank() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "RANK": "9"}
    assert find_place("srun", slurm) == (3, 1, 4)
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "5", "RANK": "9"}
    assert find_place("openmpi", mpi) == (2, 0, 5)
    with pytest.raises(LaunchError, match="torchrun has not set RANK, LOCAL_RANK, WORLD_SIZE"):
        find_place("torchrun", slurm)


def test_the_interface_of_a_route() -> None:
    assert route_interface("127.0.0.1") == "lo"
    assert route_interface("127.0.0.7") == "lo"
    own = [(name, one.address) for name, held in psutil.net_if_addrs().items() for one in held if "." in one.address]
    for name, address in own:
        assert route_interface(address) == name
    with pytest.raises(LaunchError, match="no route"):
        route_interface("255.255.255.255")


# -- secrets -----------------------------------------------------------------------------------------------------------


class _ToldRemote(Remote):
    """Starts nothing, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(SshOptions())
        self.started: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.written: list[tuple[Any, ...]] = []

    def start(self, *words: Any, **more: Any) -> Any:
        self.started.append((words, more))

    def write_everywhere(self, *words: Any) -> None:
        self.written.append(words)


def a_way(how: How, logs: Path, remote: Remote) -> launch_ways.Way:
    ticket = replace(TICKET, token="the token itself", how=how, env={"HF_TOKEN": "hf_secret"})
    logs.mkdir()
    return launch_ways.Way(parse_hostfile("a slots=2\nb slots=1\n"), ticket, "python3", remote, logs, (), "1.2.3.4", 5)


@pytest.mark.parametrize("how", ["ssh", "torchrun"])
def test_the_ticket_and_the_environment_are_on_no_command_line(how: How, tmp_path: Path) -> None:
    remote = _ToldRemote()
    given = a_way(how, tmp_path / "logs", remote)
    launch_ways.way(how, given)
    assert len(remote.started) == 2
    for words, more in remote.started:
        assert "secret" not in str(words) and given.ticket.encode() not in str(words)
        assert more["lines"] == [given.ticket.encode()] and more["env"] == {"HF_TOKEN": "hf_secret"}
    assert {path.stat().st_mode & 0o777 for path in given.log_dir.iterdir()} == {0o600}


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_the_copy_of_a_private_environment_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".deepspeed_env").write_text("HF_TOKEN=hf_secret\n")
    (home / ".deepspeed_env").chmod(0o600)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(launch_ways, "_check_deepspeed", lambda python: None)
    commands: list[list[str]] = []
    monkeypatch.setattr(launch_ways, "_Local", lambda name, command, *_, **__: commands.append(command))
    remote = _ToldRemote()
    given = a_way("deepspeed", tmp_path / "logs", remote)
    before = os.umask(umask)
    try:
        launch_ways._runner(given, "pdsh", [], {"A": "b"}, {})
    finally:
        os.umask(before)
    assert (given.log_dir / "deepspeed_env").read_text() == "HF_TOKEN=hf_secret\nA=b\n"
    assert {path.stat().st_mode & 0o777 for path in given.log_dir.iterdir()} == {0o600}
    ((hosts, place, content, _),) = remote.written
    assert list(hosts) == ["a", "b"] and content == given.ticket.encode().encode()
    assert commands[0][-1] == place and given.ticket.encode() not in commands[0]


def test_what_holds_a_token_does_not_show_it() -> None:
    ticket = replace(TICKET, token="the token itself", env={"HF_TOKEN": "hf_1234"})
    assert "the token itself" not in repr(ticket) and "hf_1234" not in repr(ticket)
    assert "secret" not in repr(Address(Path("peer"), "127.0.0.1", 5, b"secret", 7))
