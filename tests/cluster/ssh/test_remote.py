"""Commands on hosts, as far as loopback without an ssh server can show; tests/multinode has real ones."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.cluster.ssh import remote as remote_module
from lastgood.cluster.ssh.remote import Remote, SshOptions
from lastgood.cluster.ssh.ssh_log import ssh_failure
from lastgood.errors import ConfigError, HostError
from lastgood.ports import free_ports
from tests.support import patience


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ssh_config"
    path.write_text("StrictHostKeyChecking yes\nUserKnownHostsFile /dev/null\n")
    return path


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Accepts connections and never says a word, as a machine that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_the_last_word_is_the_whole_command(argv: list[str]) -> None:
    words = Remote(SshOptions()).command("some-host", argv)
    assert words[-3:-1] == ["--", "some-host"]
    assert shlex.split(words[-1]) == argv


def test_a_shell_reads_every_word_as_it_was() -> None:
    nasty = ["a b", "", "'", '"', "$HOME `id` $(id)", "-x", "*", "\n\t\\", "~", "ü", "#", "a;b|c&d>e", "!!"]
    printer = [sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))"]
    line = Remote(SshOptions()).command("some-host", [*printer, *nasty])[-1]
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == ascii(nasty) + "\n"


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "", "root@a", "a\nb"])
def test_names_that_ssh_would_misread_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="not a host's name"):
        Remote(SshOptions()).command(host, ["true"])


@pytest.mark.parametrize("argv", [[], ["a\0b"], ["x" * (101 << 10)]])
def test_commands_that_cannot_be_sent_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        Remote(SshOptions()).command("host", argv)


def test_options_are_checked_and_the_environment_names_a_configuration(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGOOD_SSH_CONFIG", str(config))
    assert SshOptions.choose().config == config
    other = tmp_path / "other"
    other.write_text("")
    assert SshOptions.choose(other).config == other
    monkeypatch.setenv("LASTGOOD_SSH_CONFIG", "")
    assert SshOptions.choose().config is None
    for bad in ({"user": "-x"}, {"port": 0}, {"connect_timeout_s": 0}, {"config": tmp_path / "none"}):
        with pytest.raises(ConfigError):
            SshOptions(**bad)


def test_a_host_without_ssh_server_is_named_with_what_to_do(config: Path) -> None:
    with pytest.raises(
        HostError, match=r"^127\.0\.0\.1: is there, and no ssh server answers; .*openssh-server"
    ) as caught:
        Remote(SshOptions(config, port=free_ports()[0])).run("127.0.0.1", ["true"], 60)
    assert "Connection refused" in str(caught.value)


def test_a_host_that_hangs_costs_the_time_that_was_given(config: Path, silent_port: int) -> None:
    remote = Remote(SshOptions(config, port=silent_port, connect_timeout_s=1))
    with pytest.raises(HostError, match=r"127\.0\.0\.1: does not answer within 1 s"):
        remote.run("127.0.0.1", ["true"], 60)
    remote = Remote(SshOptions(config, port=silent_port, connect_timeout_s=60))
    with pytest.raises(HostError, match=r"127\.0\.0\.1: (no answer within \d+ s|does not answer within 1 s)"):
        remote.run("127.0.0.1", ["true"], 1.5)


def test_everywhere_gives_each_host_its_own_result(config: Path) -> None:
    results = Remote(SshOptions(config, port=free_ports()[0])).run_everywhere(["127.0.0.1", "127.0.0.2"], ["true"], 60)
    assert list(results) == ["127.0.0.1", "127.0.0.2"]
    for name, result in results.items():
        assert isinstance(result, HostError) and str(result).startswith(name)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("root@a: Permission denied (publickey).", "ssh-copy-id"),
        ("Host key verification failed.", "known_hosts"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R"),
        ("ssh: Could not resolve hostname a: Name or service not known", "hostfile"),
        ("ssh: connect to host a port 22: No route to host", "does not answer within 7 s"),
        ("ssh: connect to host a port 22: Connection timed out", "does not answer within 7 s"),
        ("Timeout, server a not responding.", "stopped answering"),
        ("something new", "something new"),
    ],
)
def test_what_ssh_says_is_explained(log: str, message: str) -> None:
    failure = ssh_failure("a", log, 7)
    assert failure is not None
    assert str(failure).startswith("a: ")
    assert message in str(failure)
    assert ssh_failure("a", "", 7) is None


# -- the keeper, which Remote.start runs on the host -------------------------------------------------------------------


def keep(
    mark: str, script: str, *, grace: int = 2, silence: int = 60, env: tuple[str, ...] = (), lines: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    numbers = [str(number) for number in (grace, silence, len(env), len(lines))]
    command = ["bash", "-c", remote_module._KEEPER, "keeper", mark, *numbers, "/", "sh", "-c", script]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdin is not None
    keeper.stdin.write("".join(f"{line}\n" for line in (*env, *lines)).encode())
    keeper.stdin.flush()
    return keeper


def test_what_a_command_is_given_is_on_no_command_line(mark: str) -> None:
    script = 'cat; echo "$A|$B"; cat /proc/$PPID/cmdline /proc/$$/cmdline | tr "\\0" "\\n"'
    keeper = keep(mark, script, env=("A=a secret $HOME `x`", "B="), lines=("a ticket  ", "and more"))
    out = output_of(keeper).decode()
    assert out.startswith("a ticket  \nand more\na secret $HOME `x`|\n")
    assert out.count("a secret") == 1 and out.count("a ticket") == 1


def output_of(keeper: subprocess.Popen[bytes]) -> bytes:
    """All output, with the input held open: its end would be the connection's end."""
    assert keeper.stdout is not None and keeper.stdin is not None
    out = keeper.stdout.read()
    keeper.wait(60)
    keeper.stdin.close()
    keeper.stdout.close()
    return out


def marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"LASTGOOD_REMOTE_ID={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(what: str, reached, seconds: float = 60) -> None:
    patience.wait_until(reached, what, seconds, every_s=0.02)


@pytest.fixture
def mark() -> Iterator[str]:
    value = secrets.token_hex(8)
    yield value
    for pid in marked(value):
        subprocess.run(["kill", "-KILL", str(pid)], check=False)


def test_the_keeper_passes_on_output_exit_code_and_no_input(mark: str) -> None:
    keeper = keep(mark, "pwd; cat; exit 7")
    out = output_of(keeper)
    assert (out, keeper.returncode) == (b"/\n", 7)
    assert marked(mark) == []


DAEMON = "setsid sh -c 'trap : TERM; while :; do sleep 0.1; done' >/dev/null 2>&1 & echo started; "


def test_when_the_connection_ends_so_do_all_descendants_even_stubborn_daemons(mark: str) -> None:
    keeper = keep(mark, DAEMON + "sleep 600", grace=1)
    assert keeper.stdout is not None and keeper.stdin is not None
    assert keeper.stdout.readline() == b"started\n"
    wait_until("both processes", lambda: len(marked(mark)) >= 2)
    keeper.stdin.close()
    wait_until("the end of all", lambda: not marked(mark))
    assert keeper.wait(60) == 143
    keeper.stdout.close()


def test_signs_of_life_keep_it_and_silence_ends_it(mark: str) -> None:
    # A machine that is busy for a whole second is as silent as a lost one; it is not each time.
    assert any(outlives_silence(mark) for _ in range(5))


def outlives_silence(mark: str) -> bool:
    """Whether signs of life kept a command for longer than it bears silence; it must have ended by silence then."""
    keeper = keep(mark, "echo started; sleep 600", silence=1)
    assert keeper.stdout is not None and keeper.stdin is not None
    assert keeper.stdout.readline() == b"started\n"
    with contextlib.suppress(BrokenPipeError):
        for _ in range(6):
            keeper.stdin.write(b"\n")
            keeper.stdin.flush()
            time.sleep(0.3)
    lived = keeper.poll() is None and bool(marked(mark))
    assert keeper.wait(60) == 143
    assert marked(mark) == []
    keeper.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.close()
    return lived


def test_what_is_left_at_a_normal_end_is_ended_too(mark: str) -> None:
    keeper = keep(mark, DAEMON + "exit 3", grace=1)
    out = output_of(keeper)
    assert (out, keeper.returncode) == (b"started\n", 3)
    assert marked(mark) == []


def test_a_killed_keeper_is_no_way_out(mark: str) -> None:
    keeper = keep(mark, "echo started; sleep 600")
    assert keeper.stdout is not None and keeper.stdin is not None
    assert keeper.stdout.readline() == b"started\n"
    # The command may say that before the keeper has what guards it beside itself.
    wait_until("the command and its guard", lambda: len(psutil.Process(keeper.pid).children()) >= 2)
    keeper.kill()
    keeper.wait(60)
    assert marked(mark)
    keeper.stdin.close()
    wait_until("the end of all", lambda: not marked(mark))
    keeper.stdout.close()
