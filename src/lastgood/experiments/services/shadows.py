"""Shadows for a run under Checkmate: processes on its hosts, outside of the training, for as long as the run lasts.

They outlive every kill of the trainers. Where there are as many hosts or more, each is on a host of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from lastgood.cluster.ssh.remote import Remote, RemoteProcess
from lastgood.errors import LastgoodError, WaitTimeout
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.gemini_peers import host_address
from lastgood.experiments.services.place import Place
from lastgood.experiments.services.shadow_usage import ShadowPlaces, places_path
from lastgood.files import PRIVATE, open_log, open_new, read_end, write_result
from lastgood.processes import die_with_parent
from lastgood.text import is_whole, parse_json

__all__ = ["local_shadows", "shadows_of_run"]

_COMMAND_S: Final = 60.0
_START_S: Final = 60.0
_END_S: Final = 60.0
_POLL_S: Final = 0.1
_MAX_ADDRESS_BYTES: Final = 1 << 16
_SERVE: Final = (sys.executable, "-c", "from lastgood.cli import main; main()", "storage", "serve")

Report = Callable[[str], None]


@contextlib.contextmanager
def shadows_of_run(spec: RunSpec, place: Place, folder: Path, report: Report) -> Iterator[None]:
    """As many shadows as the spec says, at addresses that all hosts reach; a file beside the checkpoints names them.

    All end with the block. Raises HostError, and WaitTimeout for one that does not come up.
    """
    if not spec.shadows:
        yield
    elif place.remote is None:
        with local_shadows(spec, folder, report):
            yield
    else:
        with _remote_shadows(spec, place.remote, place.hosts.names, folder, report):
            yield


def _command(spec: RunSpec, number: int, folder: Path, host: str) -> list[str]:
    return [
        *_SERVE,
        *("--shadow", str(number), "--shadows", str(spec.shadows), "--trainers", str(spec.ranks)),
        *("--host", host, "--port", "0", "--metrics-host", host, "--metrics-port", "0"),
        *("--token-file", str(_token_path(folder)), "--address-file", str(_address_path(folder, number))),
        *("--spill-dir", str(folder / "shadows" / f"spill-{number}")),
    ]


def _token_path(folder: Path) -> Path:
    return folder / "shadows" / "token"


def _address_path(folder: Path, number: int) -> Path:
    return folder / "shadows" / f"shadow-{number}.json"


def _places(found: Sequence[tuple[str, dict[str, Any]]], folder: Path) -> ShadowPlaces:
    return ShadowPlaces(
        hosts=[host for host, _ in found],
        addresses=[f"{one['host']}:{one['port']}" for _, one in found],
        metrics=[str(one["metrics"]) for _, one in found],
        token_file=str(_token_path(folder)),
    )


def _no_shadow(number: int, host: str, words: str) -> LastgoodError:
    return LastgoodError(f"{host}: shadow {number} has ended before it could be used{': ' if words else ''}{words}")


# -- on this machine -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def local_shadows(spec: RunSpec, folder: Path, report: Report) -> Iterator[None]:
    """Shadows beside a training on this machine; they end with this process, however it ends."""
    report(f"starting {spec.shadows} shadows on this machine")
    token = _token_path(folder)
    token.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_new(token), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    parent = os.getpid()
    logs = [folder / "shadows" / f"shadow-{number}.log" for number in range(spec.shadows)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, log in enumerate(logs):
            with open_log(log) as output:
                started.append(_start_here(_command(spec, number, folder, "127.0.0.1"), output, parent))
        found = [
            ("localhost", _await_here(number, process, _address_path(folder, number), logs[number]))
            for number, process in enumerate(started)
        ]
        path = places_path(folder / "checkpoints")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_result(path, _places(found, folder).model_dump_json().encode(), mode=PRIVATE)
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait(_END_S)


def _start_here(command: Sequence[str], output: IO[bytes], parent: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: die_with_parent(parent),  # this process has one thread
    )


def _await_here(number: int, process: subprocess.Popen[bytes], path: Path, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + _START_S
    while not path.exists():
        if process.poll() is not None:
            raise _no_shadow(number, "this machine", read_end(log, 2000).decode(errors="replace"))
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {_START_S:.0f} s for shadow {number} to be there; see {log}")
        time.sleep(_POLL_S)
    return _read(path.read_bytes(), str(path))


def _read(text: bytes, where: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse_json(text, where, most_bytes=_MAX_ADDRESS_BYTES, error=LastgoodError)
        if not isinstance(found["host"], str) or not is_whole(found["port"], 1, 65535):
            raise ValueError("host or port is none")
        if not isinstance(found["metrics"], str):
            raise ValueError("no place of its metrics")
    except (ValueError, KeyError, TypeError) as error:
        raise LastgoodError(f"{where}: not the address of a shadow: {error!r}") from error
    return found


# -- on hosts ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _remote_shadows(
    spec: RunSpec, remote: Remote, hosts: Sequence[str], folder: Path, report: Report
) -> Iterator[None]:
    report(f"starting {spec.shadows} shadows on {', '.join(hosts[: spec.shadows])}")
    token = secrets.token_hex(32) + "\n"
    remote.write_everywhere(hosts, _token_path(folder), token.encode(), _COMMAND_S)
    chosen = [hosts[number % len(hosts)] for number in range(spec.shadows)]
    started: list[RemoteProcess] = []
    try:
        for number, host in enumerate(chosen):
            log = folder / "shadows" / f"shadow-{number}.log"
            command = _command(spec, number, folder, host_address(remote, host))
            keep = ["sh", "-c", 'exec "$@" > "$0" 2>&1', str(log), *command]
            started.append(remote.start(host, keep, stdout=subprocess.DEVNULL))
        found = [
            (host, _await_there(remote, host, number, started[number], folder)) for number, host in enumerate(chosen)
        ]
        places = _places(found, folder).model_dump_json().encode()
        remote.write_everywhere(hosts, places_path(folder / "checkpoints"), places, _COMMAND_S)
        yield
    finally:
        for process in started:
            process.close()


def _await_there(remote: Remote, host: str, number: int, process: RemoteProcess, folder: Path) -> dict[str, Any]:
    path = _address_path(folder, number)
    deadline = time.monotonic() + _START_S
    while True:
        answer = remote.run(host, ["cat", str(path)], _COMMAND_S)
        if answer.rc == 0 and answer.stdout:
            return _read(answer.stdout, f"{host}: {path}")
        if process.poll() is not None or time.monotonic() > deadline:
            log = folder / "shadows" / f"shadow-{number}.log"
            words = remote.run(host, ["tail", "-n", "15", str(log)], _COMMAND_S).text
            if process.poll() is not None:
                raise _no_shadow(number, host, words)
            raise WaitTimeout(f"{host}: waited {_START_S:.0f} s for shadow {number} to be there: {words}")
        time.sleep(_POLL_S)
