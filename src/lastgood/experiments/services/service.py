"""Helper processes that a run starts and ends: what a service is, and the one place that starts and ends them.

A service is one or several processes outside of the training, on the run's hosts, for as long as the run lasts. Each is
up once its ready file is there. Without a remote place they are children of this process, which end with it, however it
ends; on hosts they are commands of `Remote.start`, which end with their connection.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from lastgood.cluster.launch.job import LOG_THERE
from lastgood.cluster.ssh.remote import Remote, RemoteProcess
from lastgood.errors import HostError, LastgoodError, WaitTimeout
from lastgood.experiments.services.place import Place, host_address
from lastgood.files import PRIVATE, open_log, read_bounded, read_end, write_result
from lastgood.processes import die_with_parent

__all__ = ["LOCAL", "Meter", "Running", "Seat", "Service", "run_services"]

LOCAL: Final = "localhost"
"""The one host of services without a remote place."""

_POLL_S: Final = 0.1
_COMMAND_S: Final = 60.0
_GRACE_S: Final = 10.0
"""Between SIGTERM and SIGKILL, on this machine; on hosts `Remote.start` has its own."""
_END_S: Final = 60.0
_MAX_READY_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 2000
_TAIL_LINES: Final = 15

Report = Callable[[str], None]
Meter = Callable[[], Mapping[str, Any]]
"""What a service used since the meter was made, as fields of the run's record."""


@dataclass(frozen=True)
class Seat:
    """Where one process of a service runs."""

    number: int
    """From 0, in the order of `Service.hosts`."""
    host: str
    address: str
    """At which all hosts of the run reach it."""


class Service(ABC):
    """What a system needs beside the training. `folder` is the run's own, of the same name on every host.

    The harness calls `hosts` first, writes `secrets`, starts a `command` on each seat, waits for its `ready_file`,
    writes what `announce` returns, runs the training, calls `check`, and ends all processes. The processes of the
    training call `options` and `meter`, with the folder that has the checkpoints in it.
    """

    name: ClassVar[str]
    """What one of its processes is called in messages, as ``shadow``."""
    directory: ClassVar[str]
    """Its folder in the run's, where its logs lie. It is removed from all hosts after the run."""
    ready_s: ClassVar[float] = 60.0
    """How long one of its processes may take until it is up."""

    @abstractmethod
    def hosts(self, names: Sequence[str]) -> Sequence[str]:
        """The host of each process, by number; none if this run needs no such service. `names`: the run's hosts.

        Raises LastgoodError for hosts on which it cannot run.
        """

    def secrets(self, folder: Path) -> Mapping[Path, bytes]:
        """Files that all hosts have before the first process starts; only this user can read them."""
        del folder
        return {}

    @abstractmethod
    def command(self, seat: Seat, folder: Path) -> Sequence[str]:
        """The process on that seat. It stays in the foreground, ends with SIGTERM, and writes its log to its output."""

    @abstractmethod
    def ready_file(self, number: int, folder: Path) -> Path:
        """A file that the process makes, in one step and not empty, on its own host, when it can be used."""

    @abstractmethod
    def announce(self, ready: Sequence[tuple[Seat, bytes]], folder: Path) -> Mapping[Path, bytes]:
        """Files for all hosts that lack them, made from what is in the ready files. Raises LastgoodError for others."""

    def options(self, checkpoints: Path) -> Mapping[str, Any]:
        """Options for the checkpointer in each rank. Raises LastgoodError if nobody has started the service."""
        del checkpoints
        return {}

    def meter(self, checkpoints: Path) -> Meter:
        """Begin to count what the service uses. Raises HostError, as the meter does, if it does not answer."""
        del checkpoints
        return dict

    def check(self, place: Place | None, folder: Path) -> None:  # noqa: B027 - most have nothing to check
        """Raise LastgoodError if the training used something else than these processes. Called after it."""


@contextlib.contextmanager
def run_services(
    services: Sequence[Service], folder: Path, report: Report, place: Place | None = None
) -> Iterator[Running]:
    """All processes of `services`, up and announced; they end with the block. Without a remote place on this machine.

    Raises LastgoodError for a process that ends before it is up, or while the block runs (also if the block fails, with
    its error as the cause), WaitTimeout for one that does not come up or does not end, and HostError.
    """
    remote = None if place is None else place.remote
    hosts: _Hosts
    names: Sequence[str]
    if place is None or remote is None:
        hosts, names = _Hosts(), [LOCAL]
    else:
        hosts, names = _OverSsh(remote, place.hosts.names), place.hosts.names
    running = Running(hosts)
    try:
        for service in services:
            running.start(service, names, folder, report)
        try:
            yield running
        except LastgoodError as error:
            if error is not running.lost:
                running.check(error)
            raise
        running.check()
        for service in services:
            service.check(place, folder)
    finally:
        hosts.end(running.processes)


class Running:
    """The processes of a run's services."""

    def __init__(self, hosts: _Hosts) -> None:
        self._hosts = hosts
        self.processes: list[_Started] = []
        self.lost: LastgoodError | None = None
        """What `check` raised."""

    def start(self, service: Service, names: Sequence[str], folder: Path, report: Report) -> None:
        """Start all processes of a service, wait until they are up, and announce them."""
        chosen = service.hosts(names)
        if not chosen:
            return
        where = "this machine" if list(names) == [LOCAL] else ", ".join(dict.fromkeys(chosen))
        report(f"starting {len(chosen)} {service.name}s on {where}")
        self._leave(service.secrets(folder))
        seats = [Seat(number, host, self._hosts.address(host)) for number, host in enumerate(chosen)]
        first = len(self.processes)
        for seat in seats:
            log = folder / service.directory / f"{service.name}-{seat.number}.log"
            process = self._hosts.start(seat.host, service.command(seat, folder), log)
            self.processes.append(_Started(f"{service.name} {seat.number}", seat.host, process, log))
        self._leave(
            service.announce(
                [
                    (seat, self._await(one, service.ready_file(seat.number, folder), service.ready_s))
                    for seat, one in zip(seats, self.processes[first:], strict=True)
                ],
                folder,
            )
        )

    def check(self, cause: LastgoodError | None = None) -> None:
        """Raise LastgoodError, naming it and its log, if a process has ended. `cause`: what the run failed with."""
        for one in self.processes:
            if one.process.poll() is not None:
                more = "" if cause is None else f"\nthe run then failed: {cause}"
                self.lost = LastgoodError(f"{self._how_it_ended(one, 'while the run went on')}{more}")
                raise self.lost from cause

    def watched(self, report: Report) -> Report:
        """A `report` that checks first: so a run ends at its next stage, not at its end."""

        def checked(stage: str) -> None:
            self.check()
            report(stage)

        return checked

    def _leave(self, files: Mapping[Path, bytes]) -> None:
        for path, content in files.items():
            self._hosts.leave(path, content)

    def _await(self, one: _Started, path: Path, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            over = one.process.poll() is not None or time.monotonic() > deadline
            found = self._hosts.read(one.host, path)
            if found:
                return found
            if one.process.poll() is not None:
                raise LastgoodError(self._how_it_ended(one, "before it could be used"))
            if over:
                raise WaitTimeout(
                    f"waited {timeout_s:g} s for {one.name} on {one.host} to be up: there is no {path}; "
                    f"{self._log_of(one)}"
                )
            time.sleep(_POLL_S)

    def _how_it_ended(self, one: _Started, when: str) -> str:
        status = one.process.poll()
        how = f"signal {signal.Signals(-status).name}" if status and status < 0 else f"exit status {status}"
        return f"{one.name} on {one.host} has ended {when}: {how}; {self._log_of(one)}"

    def _log_of(self, one: _Started) -> str:
        lines = self._hosts.tail(one.host, one.log).splitlines()[-_TAIL_LINES:]
        return "\n".join([f"{self._hosts.log_words}{one.log}", *(f"    {line}" for line in lines)])


@dataclass(frozen=True)
class _Started:
    name: str
    host: str
    process: subprocess.Popen[bytes] | RemoteProcess
    log: Path


class _Hosts:
    """How files and processes get to the hosts of services: here, to this machine."""

    log_words: str = "log: "
    """Before the path of a log in an error."""

    def address(self, _host: str) -> str:
        """At which the others reach a host."""
        return "127.0.0.1"

    def leave(self, path: Path, content: bytes) -> None:
        """A file on all hosts that have none of that name, complete when it appears, for this user only."""
        if not path.exists():
            write_result(path, content, mode=PRIVATE)

    def start(self, _host: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes] | RemoteProcess:
        """A process, with its output in a log."""
        parent = os.getpid()
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_log(log) as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),  # this process has one thread
            )

    def read(self, _host: str, path: Path) -> bytes:
        """What is in a file; nothing if it is not there."""
        try:
            return read_bounded(path, _MAX_READY_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise LastgoodError(f"{path}: cannot be read: {error.strerror}") from error

    def tail(self, _host: str, log: Path) -> str:
        """A log's last lines, if they can be had."""
        return read_end(log, _TAIL_BYTES).decode(errors="replace")

    def end(self, started: Sequence[_Started]) -> None:
        """End all: SIGTERM, and after a grace SIGKILL. Raises WaitTimeout for a process that is there even then."""
        own = [(one, one.process) for one in started if isinstance(one.process, subprocess.Popen)]
        for _, process in own:
            process.terminate()
        left = _wait(own, _GRACE_S)
        for _, process in left:
            process.kill()
        left = _wait(left, _END_S)
        if left:
            names = ", ".join(f"{one.name} (process {process.pid})" for one, process in left)
            raise WaitTimeout(f"still there {_END_S:.0f} s after SIGKILL: {names}")


_Pairs = list[tuple[_Started, "subprocess.Popen[bytes]"]]


def _wait(pairs: _Pairs, timeout_s: float) -> _Pairs:
    """Wait for all, at most `timeout_s`. Those that are still there."""
    deadline = time.monotonic() + timeout_s
    for _, process in pairs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    return [(one, process) for one, process in pairs if process.poll() is None]


class _OverSsh(_Hosts):
    log_words: str = LOG_THERE

    def __init__(self, remote: Remote, names: Sequence[str]) -> None:
        self._remote = remote
        self._names = names

    def address(self, host: str) -> str:
        return host_address(self._remote, host)

    def leave(self, path: Path, content: bytes) -> None:
        # What is there stays: a process may watch the file that it wrote itself, also on a disk that hosts share.
        self._remote.write_everywhere(self._names, path, content, _COMMAND_S, keep=True)

    def start(self, host: str, command: Sequence[str], log: Path) -> RemoteProcess:
        keep = 'mkdir -p -- "${0%/*}" && (umask 077 && : > "$0") && exec "$@" > "$0" 2>&1'
        return self._remote.start(host, ["sh", "-c", keep, str(log), *command], stdout=subprocess.DEVNULL)

    def read(self, host: str, path: Path) -> bytes:
        found = self._remote.run(host, ["cat", str(path)], _COMMAND_S, max_output_bytes=_MAX_READY_BYTES)
        return b"" if found.rc else found.stdout

    def tail(self, host: str, log: Path) -> str:
        try:
            return self._remote.run(host, ["tail", "-n", str(_TAIL_LINES), str(log)], _COMMAND_S).text
        except HostError as error:
            return str(error)

    def end(self, started: Sequence[_Started]) -> None:
        remote = [one.process for one in started if isinstance(one.process, RemoteProcess)]
        for process in remote:
            process.terminate()
        for process in remote:
            process.close()
