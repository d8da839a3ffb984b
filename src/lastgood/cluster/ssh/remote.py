"""Commands on other hosts, over the machine's own ssh client: nothing is ever asked, output and time are bounded.

`Remote.run` is for short commands. `Remote.start` is for long ones, and keeps a promise that ssh alone does not: when
the connection ends, however it ends (this process or its ssh killed, the host lost, the cable cut), the command and all
that it started end as well. So no rank of a dead job goes on writing. A small shell keeper on the host does that: it
reads a sign of life from the connection every few seconds, and ends what carries its job's mark (an environment
variable, which children inherit across sessions and daemons) when the signs stop.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import selectors
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from lastgood.cluster.hostfile import check_host_name
from lastgood.cluster.ssh.ssh_log import SshLog, last_words, ssh_failure
from lastgood.errors import ConfigError, HostError
from lastgood.processes import wait_or_kill

__all__ = ["REMOTE_MARK", "SSH_CONFIG_VARIABLE", "Completed", "Remote", "RemoteProcess", "SshOptions"]

SSH_CONFIG_VARIABLE = "LASTGOOD_SSH_CONFIG"
"""Names an ssh configuration for all commands, as a testbed's; an option on the command line goes first."""

REMOTE_MARK = "LASTGOOD_REMOTE_ID"
"""The variable by which the keeper below knows what to end. A program that is to outlive its job takes it away."""

MAX_OUTPUT_BYTES = 1 << 20
_MAX_COMMAND_BYTES = 100 << 10
"""Linux takes one argument of up to 128 KiB, and the whole command travels as one."""
_MAX_PARALLEL = 32
_REMOTE_GRACE_S = 5
"""How much longer than the wait for it a command of `run` may live on its host."""
_SSH_END_S = 10.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_KEEPER: Final = r"""
id=$1 grace=$2 silence=$3 variables=$4 lines=$5 folder=$6; shift 6
cd -- "$folder" || exit 126
exec 3<&0 </dev/null
settings=() given=
for ((i = 0; i < variables; i++)); do
    IFS= read -r -t 60 -u 3 line || exit 125
    settings+=("$line")
done
for ((i = 0; i < lines; i++)); do
    IFS= read -r -t 60 -u 3 line || exit 125
    given+=$line$'\n'
done
begin() {
    for line in "${settings[@]}"; do export "${line?}"; done
    export LASTGOOD_REMOTE_ID=$id
    exec setsid -- "$@" 3<&-
}
mine() { grep -lsxzF "LASTGOOD_REMOTE_ID=$id" /proc/[0-9]*/environ; }
each() { for file in $(mine); do file=${file#/proc/}; kill -s "$1" "${file%/environ}"; done; }
end_all() {
    each TERM
    for ((i = 0; i < grace * 5; i++)); do [ -n "$(mine)" ] || return; sleep 0.2; done
    for ((i = 0; i < 50; i++)); do each KILL; [ -n "$(mine)" ] || return; sleep 0.1; done
}
if ((lines)); then begin "$@" <<<"${given%$'\n'}" & else begin "$@" & fi
child=$!
( while read -r -t "$silence" -u 3 _; do :; done; end_all ) >/dev/null 2>&1 &
watcher=$!
wait "$child"; code=$?
kill "$watcher" 2>/dev/null
end_all 2>/dev/null
exit "$code"
"""


@dataclass(frozen=True)
class SshOptions:
    """How hosts are reached. What is None is left to the ssh configuration.

    `config` stands in for the user's own ``~/.ssh/config``; `connect_timeout_s` bounds connecting and the key exchange.
    """

    config: Path | None = None
    user: str | None = None
    port: int | None = None
    connect_timeout_s: int = 10

    def __post_init__(self) -> None:
        if self.user is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", self.user):
            raise ConfigError(f"not a user's name: {self.user[:80]!r}; give letters, digits, dots, dashes")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"not a port: {self.port}; give 1 to 65535")
        if not 1 <= self.connect_timeout_s <= 600:
            raise ConfigError(f"a connection may take 1 to 600 s, not {self.connect_timeout_s}")
        if self.config is not None and not self.config.is_file():
            raise ConfigError(
                f"{self.config}: there is no such ssh configuration; see --ssh-config and ${SSH_CONFIG_VARIABLE}"
            )

    @classmethod
    def choose(
        cls,
        config: Path | None = None,
        user: str | None = None,
        port: int | None = None,
        connect_timeout_s: int = 10,
    ) -> SshOptions:
        """Options with the configuration that ``$LASTGOOD_SSH_CONFIG`` names, unless `config` is given."""
        named = os.environ.get(SSH_CONFIG_VARIABLE)
        if config is None and named:
            config = Path(named)
        return cls(config, user, port, connect_timeout_s)


@dataclass(frozen=True)
class Completed:
    """A remote command that ended: its exit code, and what it wrote."""

    rc: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """The standard output as text, without the blanks at its ends."""
        return self.stdout.decode(errors="replace").strip()


class Remote:
    """Runs commands on hosts by ssh, without ever asking anything (BatchMode)."""

    def __init__(self, options: SshOptions | None = None) -> None:
        self.options = options or SshOptions.choose()

    def command(self, host: str, argv: Sequence[str], *, ssh_options: Sequence[str] = ()) -> list[str]:
        """The local command that runs `argv` on `host`; every word arrives there as it is.

        Raises ConfigError for a host's name or words that cannot be sent.
        """
        fault = check_host_name(host)
        if fault is not None:
            raise ConfigError(f"not a host's name: {host[:80]!r}: {fault}")
        if any("\0" in word for word in argv):
            raise ConfigError(f"{host}: a word of the command holds a NUL byte; no program can be given one")
        remote = shlex.join(argv)
        if not argv or len(os.fsencode(remote)) > _MAX_COMMAND_BYTES:
            raise ConfigError(
                f"{host}: a remote command has 1 to {_MAX_COMMAND_BYTES >> 10} KiB; send more through a file or stdin"
            )
        ssh = shutil.which("ssh")
        if ssh is None:
            raise ConfigError("there is no ssh on this machine (Debian, Ubuntu: apt-get install openssh-client)")
        options = self.options
        # A shared master connection of the user's would outlive our process; forwarded ports would clash.
        fixed = ["BatchMode=yes", "ControlMaster=no", "ControlPath=none", "ClearAllForwardings=yes", "LogLevel=INFO"]
        fixed += [f"ConnectTimeout={options.connect_timeout_s}", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
        words = [ssh, "-T", "-x", "-a"]
        if options.config is not None:
            words += ["-F", str(options.config)]
        for setting in (*ssh_options, *fixed):
            words += ["-o", setting]
        if options.user is not None:
            words += ["-l", options.user]
        if options.port is not None:
            words += ["-p", str(options.port)]
        return [*words, "--", host, remote]

    def run(
        self,
        host: str,
        argv: Sequence[str],
        timeout_s: float,
        input: bytes | None = None,  # noqa: A002 - the name that subprocess.run has for it
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:
        """Run a command that ends within `timeout_s`, connecting included, and return what it wrote.

        An exit code that is not zero is a result. Raises HostError if the host is not reached, refuses the key, has
        no such command, or if time or `max_output_bytes` (of each stream) is exceeded; the command is ended there
        too.
        """
        bounded = ["timeout", "-k", "2", str(math.ceil(timeout_s) + _REMOTE_GRACE_S), *argv]
        connect_s = max(1, min(self.options.connect_timeout_s, math.floor(timeout_s)))
        with contextlib.closing(SshLog()) as log:
            words = self.command(host, bounded, ssh_options=[f"ConnectTimeout={connect_s}"])
            process = subprocess.Popen(
                log.added_to(words),
                stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            try:
                outputs = _exchange(process, input or b"", time.monotonic() + timeout_s, max_output_bytes)
                rc = process.poll()
            finally:
                process.kill()
                process.wait(_SSH_END_S)
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        with contextlib.suppress(OSError):
                            pipe.close()
            shown = shlex.join(argv)[:120]
            if isinstance(outputs, str):
                raise HostError(f"{host}: {outputs}: {shown}{last_words(log.text())}")
            if rc is None or rc == 255:
                failure = ssh_failure(host, log.text(), connect_s)
                if failure is not None:
                    raise failure
            if rc is None:
                raise HostError(f"{host}: ssh closed its output and did not end; try again: {shown}")
        stdout, stderr = outputs
        if rc == 127:
            raise HostError(f"{host}: there is no command {argv[0]!r} there; install it, or give its path")
        return Completed(rc, stdout, stderr)

    def start(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        silence_s: int = 30,
        grace_s: int = 10,
        lines: Sequence[str] = (),
    ) -> RemoteProcess:
        """Start a command that lives no longer than this connection, and return at once.

        Its standard input is `lines`, or nothing. `env` is added to the host's own environment. Neither is on any
        command line, where every user could read it. `cwd` is by default the login folder. When the connection ends, or
        carries no sign of life for `silence_s`, the command and all its descendants get SIGTERM, and SIGKILL `grace_s`
        later. The same happens to descendants that are left when it ends by itself. The host needs bash, and
        util-linux's setsid.
        Raises ConfigError for what cannot be sent; whether the host is reached, `RemoteProcess.wait` tells.
        """
        if not (1 <= silence_s <= 3600 and 0 <= grace_s <= 600):
            raise ConfigError(f"silence_s is 1 to 3600 and grace_s 0 to 600, not {silence_s} and {grace_s}")
        for name in env or {}:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"{host}: not the name of an environment variable: {name[:80]!r}")
        settings = [f"{name}={value}" for name, value in (env or {}).items()]
        if any(sign in line for line in (*settings, *lines) for sign in "\n\0"):
            raise ConfigError(f"{host}: a value or a line of input has no line ends and no NUL bytes")
        keeper = ["bash", "-c", _KEEPER, "lastgood-keeper", secrets.token_hex(16), str(grace_s), str(silence_s)]
        keeper += [str(len(settings)), str(len(lines))]
        log = SshLog()
        try:
            process = subprocess.Popen(
                log.added_to(self.command(host, [*keeper, cwd or ".", *argv])),
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                # Ctrl-C is for this process, which then ends its hosts in order.
                start_new_session=True,
            )
        except BaseException:
            log.close()
            raise
        first = "".join(f"{line}\n" for line in (*settings, *lines)).encode()
        return RemoteProcess(host, process, log, silence_s, grace_s, self.options.connect_timeout_s, first)

    def write_everywhere(
        self, hosts: Iterable[str], path: Path | str, content: bytes, timeout_s: float, *, keep: bool = False
    ) -> None:
        """A file on each host, for this user's eyes alone, that appears complete. Hosts may share a disk.

        With `keep` a file that is there stays as it is.

        Raises HostError for the first host on which it cannot be written.
        """
        write = 'umask 077; mkdir -p -- "${1%/*}" && cat > "$1.$$.$2" && mv -- "$1.$$.$2" "$1"'
        if keep:
            write = f'[ -e "$1" ] || {{ {write}; }}'
        words = ["sh", "-c", write, "sh", str(path), secrets.token_hex(8)]
        for host, answer in self.run_everywhere(hosts, words, timeout_s, content).items():
            if not isinstance(answer, Completed) or answer.rc:
                raise HostError(f"{host}: {path} cannot be written: {answer}")

    def run_everywhere(
        self,
        hosts: Iterable[str],
        argv: Sequence[str],
        timeout_s: float,
        input: bytes | None = None,  # noqa: A002
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> dict[str, Completed | HostError]:
        """`run` on many hosts at the same time, at most 32; for each host its result, or why it has none."""

        def one(host: str) -> Completed | HostError:
            try:
                return self.run(host, argv, timeout_s, input, max_output_bytes)
            except HostError as error:
                return error

        names = list(dict.fromkeys(hosts))
        with ThreadPoolExecutor(max_workers=max(1, min(_MAX_PARALLEL, len(names)))) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))


class RemoteProcess:
    """A command of `Remote.start`. A thread sends its signs of life until it ends."""

    def __init__(
        self,
        host: str,
        process: subprocess.Popen[bytes],
        log: SshLog,
        silence_s: int,
        grace_s: int,
        connect_timeout_s: int,
        first: bytes = b"",
    ) -> None:
        self.host = host
        self.pid = process.pid
        """Of the local ssh."""
        self.stdout, self.stderr = process.stdout, process.stderr
        """The command's output and errors, if `start` was given subprocess.PIPE."""
        self._first = first
        self._process = process
        self._log = log
        self._end_s = grace_s + _SSH_END_S
        self._connect_timeout_s = connect_timeout_s
        self._ending = threading.Event()
        beat_s = silence_s / 6
        self._heart = threading.Thread(target=self._beat, args=(beat_s,), name=f"signs of life to {host}", daemon=True)
        self._heart.start()

    def poll(self) -> int | None:
        """The exit code, or None while it runs; 255 also if ssh itself failed, and `wait` then says how."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code (128 + N for a command that signal N ended).

        Raises HostError if it does not end in time (it then goes on), and if ssh failed: the host was not
        reached, the connection was lost.
        """
        try:
            rc = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise HostError(
                f"{self.host}: the command did not end within {timeout_s:g} s; terminate it, or wait"
            ) from None
        self._ending.set()
        self._heart.join(_SSH_END_S)
        if rc == 255:
            failure = ssh_failure(self.host, self._log.text(), self._connect_timeout_s)
            if failure is not None:
                raise failure
        return rc

    def terminate(self) -> None:
        """Ask for the end: SIGTERM to the command and its descendants, after the grace SIGKILL. Does not wait."""
        self._ending.set()

    def kill(self) -> None:
        """Cut the connection at once. The host sees that and does as in `terminate`, out of our sight."""
        self._ending.set()
        self._process.kill()

    def close(self) -> None:
        """End it if it runs, wait for that through the grace and a few seconds, and give back what is held here."""
        self.terminate()
        wait_or_kill(self._process, self._end_s, _SSH_END_S)
        self._heart.join(_SSH_END_S)
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def __enter__(self) -> RemoteProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self, beat_s: float) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # A closed pipe: ssh has ended, and `wait` says why.
        with contextlib.suppress(OSError):
            pipe.write(self._first)
            pipe.flush()
            while not self._ending.wait(beat_s):
                pipe.write(b"\n")
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()


def _exchange(process: subprocess.Popen[bytes], data: bytes, deadline: float, limit: int) -> tuple[bytes, bytes] | str:
    """Feed a process and read both its outputs to their ends; or the reason why that was given up."""
    assert process.stdout is not None and process.stderr is not None
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    started = time.monotonic()
    view = memoryview(data)
    with selectors.DefaultSelector() as selector:
        for descriptor in outputs:
            selector.register(descriptor, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return f"no answer within {time.monotonic() - started:.0f} s (host, network or command hang)"
            for key, _ in selector.select(left):
                if key.fd not in outputs:
                    assert process.stdin is not None
                    try:
                        view = view[os.write(key.fd, view) :]
                    except BrokenPipeError:
                        view = view[:0]  # it did not want all of it
                    if not view:
                        selector.unregister(key.fd)
                        process.stdin.close()
                    continue
                part = os.read(key.fd, 1 << 16)
                outputs[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                elif len(outputs[key.fd]) > limit:
                    return f"the command wrote more than {limit} bytes"
    try:
        process.wait(max(0.0, deadline - time.monotonic()) + 1)
    except subprocess.TimeoutExpired:
        return "ssh did not end after its output"
    stdout, stderr = outputs.values()
    return bytes(stdout), bytes(stderr)
