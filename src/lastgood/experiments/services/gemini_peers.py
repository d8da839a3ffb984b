"""Gemini's peers on the hosts of a run: one on each, outside the training's processes, for as long as the run lasts."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from lastgood.cluster.ssh.remote import Completed, Remote, RemoteProcess
from lastgood.errors import HostError, LastgoodError, WaitTimeout
from lastgood.experiments.services.place import Place
from lastgood.experiments.systems.over_ranks import Writers

__all__ = ["host_address", "peers_of_nodes"]

_SERIAL: Final = 1
_COMMAND_S: Final = 60.0
_START_S: Final = 60.0
_IDLE_S: Final = 3600.0
_PEER_S: Final = 30.0
_LOOPBACK: Final = re.compile(r"127\.|::1$")


@contextlib.contextmanager
def peers_of_nodes(writers: Writers, place: Place, folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Where each machine keeps its state at others: a peer on every host, at the address that other hosts reach.

    A training would start a peer that it does not find by itself, on its own host, which would measure no network:
    after the run, more peers than these are an error. All end with the block. Raises HostError and LastgoodError.
    """
    if writers != "peers":
        yield
        return
    remote = place.remote
    if remote is None:
        raise LastgoodError("peers need hosts of their own; give a hostfile, or several nodes")
    directory = folder / "checkpoints"
    report(f"starting a peer on {', '.join(place.hosts.names)}")
    started: list[RemoteProcess] = []
    try:
        for number, host in enumerate(place.hosts.names):
            started.append(_start(remote, host, number, directory))
        for number, host in enumerate(place.hosts.names):
            _tell_others(remote, place, number, host, directory)
        yield
        for host in place.hosts.names:
            _refuse_others(remote, host, directory)
    finally:
        for process in started:
            process.close()


def _start(remote: Remote, host: str, number: int, directory: Path) -> RemoteProcess:
    address = host_address(remote, host)
    peer = [sys.executable, "-m", "lastgood.checkpointers.gemini.peer", "--directory", str(directory)]
    peer += ["--machine", str(number), "--serial", str(_SERIAL), "--host", address]
    peer += ["--limit-bytes", "0", "--idle-s", str(_IDLE_S), "--timeout-s", str(_PEER_S)]
    # The peer leaves its starter; what stays is what this connection keeps, and ends the peer with.
    keep = 'mkdir -p -- "$1" && shift && "$@" && exec sleep infinity'
    return remote.start(host, ["sh", "-c", keep, "sh", str(directory), *peer], stdout=subprocess.DEVNULL)


def host_address(remote: Remote, host: str) -> str:
    """Where the other hosts reach it: where ssh reached it."""
    words = remote.run(host, ["sh", "-c", 'echo "$SSH_CONNECTION"'], _COMMAND_S).text.split()
    if len(words) != 4 or _LOOPBACK.match(words[2]):
        raise HostError(
            f"{host}: ssh reaches it at {' '.join(words) or 'an unknown address'}, where other hosts do not"
        )
    return words[2]


def _path(directory: Path, number: int) -> Path:
    return directory / f"peer-{number}-{_SERIAL:06d}.json"


def _tell_others(remote: Remote, place: Place, number: int, host: str, directory: Path) -> None:
    """Put a peer's address file on hosts that do not share its disk."""
    path = _path(directory, number)
    deadline = time.monotonic() + _START_S
    while True:
        found = remote.run(host, ["cat", str(path)], _COMMAND_S)
        if found.rc == 0 and found.stdout:
            break
        if time.monotonic() > deadline:
            raise WaitTimeout(f"{host}: waited {_START_S:.0f} s for a peer to be there; see {path.with_suffix('.log')}")
        time.sleep(0.2)
    others = [name for name in place.hosts.names if name != host]
    write = ["sh", "-c", 'umask 077; [ -e "$1" ] || cat > "$1"', "sh", str(path)]
    for name, answer in remote.run_everywhere(others, write, _COMMAND_S, found.stdout).items():
        if not isinstance(answer, Completed) or answer.rc:
            raise HostError(f"{name}: cannot be told of the peer on {host}: {answer}")


def _refuse_others(remote: Remote, host: str, directory: Path) -> None:
    names = remote.run(host, ["ls", "--", str(directory)], _COMMAND_S).text.split()
    found = [re.fullmatch(r"peer-\d+-(\d+)\.json", name) for name in names]
    more = sorted(match[0] for match in found if match and int(match[1]) != _SERIAL)
    if more:
        raise LastgoodError(
            f"{host}: a peer was lost and another started beside its trainer ({', '.join(more)}); run again"
        )
