"""Services of a run: a third one, of real small processes, goes through all that the harness does with one."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lastgood.errors import ConfigError, HostError, LastgoodError, WaitTimeout
from lastgood.experiments.services import service as service_module
from lastgood.experiments.services.place import Place
from lastgood.experiments.services.registry import begin_meters, services_of, trainer_options
from lastgood.experiments.services.service import LOCAL, Meter, Running, Seat, Service, run_services
from tests.experiments.support.specs import make_spec

PROGRAM = """
import os, pathlib, signal, sys, time
ready, secret, kind = sys.argv[1:]
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("echo begins, secret", pathlib.Path(secret).read_text(), flush=True)
if kind == "broken":
    sys.exit("echo: no such luck")
if kind != "slow":
    part = pathlib.Path(ready + ".part")
    part.write_text(str(os.getpid()))
    part.rename(ready)
while True:
    time.sleep(600)
"""


@dataclass
class Echo:
    """A service of two processes; each says its process id in its ready file."""

    kind: str = "good"
    used_more: bool = False
    name: str = "echo"
    directory: str = "echoes"
    ready_s: float = 60.0

    def hosts(self, names: Sequence[str]) -> Sequence[str]:
        return [*names, *names]

    def secrets(self, folder: Path) -> Mapping[Path, bytes]:
        return {folder / "echoes" / "secret": b"s3cret"}

    def command(self, seat: Seat, folder: Path) -> Sequence[str]:
        files = [str(self.ready_file(seat.number, folder)), str(folder / "echoes" / "secret")]
        return [sys.executable, "-c", PROGRAM, *files, self.kind if seat.number == 1 else "good"]

    def ready_file(self, number: int, folder: Path) -> Path:
        return folder / "echoes" / f"{number}.pid"

    def announce(self, ready: Sequence[tuple[Seat, bytes]], folder: Path) -> Mapping[Path, bytes]:
        lines = [f"{seat.number} {seat.host} {seat.address} {content.decode()}" for seat, content in ready]
        return {folder / "checkpoints" / "echoes": "\n".join(lines).encode()}

    def options(self, checkpoints: Path) -> Mapping[str, Any]:
        return {"echoes": (checkpoints / "echoes").read_text().splitlines()}

    def meter(self, checkpoints: Path) -> Meter:
        pids = [int(line.split()[-1]) for line in (checkpoints / "echoes").read_text().splitlines()]
        before = time.monotonic()
        return lambda: {"echo_pids": pids, "echo_s": time.monotonic() - before}

    def check(self, place: Place | None, folder: Path) -> None:
        if self.used_more:
            raise LastgoodError("the training used another echo")


def toys(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(int(path.read_text())) for path in sorted(folder.glob("echoes/*.pid"))]


def own_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if PROGRAM in child.cmdline()]


def kill_unreaped(process: psutil.Process) -> None:
    """Wait for its end, and leave its status to the harness."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def running(service: Service, folder: Path, said: list[str] | None = None) -> Any:
    return run_services([service], folder, [].append if said is None else said.append)


def test_a_service_is_started_announced_used_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    echo = Echo()
    with running(echo, tmp_path, said):
        assert said == ["starting 2 echos on this machine"]
        found = toys(tmp_path)
        assert [one.ppid() for one in found] == [os.getpid()] * 2
        for path in (tmp_path / "echoes" / "secret", tmp_path / "checkpoints" / "echoes"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        monkeypatch.setattr("lastgood.experiments.services.registry._OWN", {"peers": lambda spec: echo})
        spec = make_spec(system="gemini", system_options={})
        options = trainer_options(spec, tmp_path / "checkpoints")
        assert options == {"echoes": [f"{n} {LOCAL} 127.0.0.1 {one.pid}" for n, one in enumerate(found)]}
        facts = begin_meters(spec, tmp_path / "checkpoints")()
        assert facts["echo_pids"] == [one.pid for one in found] and facts["echo_s"] >= 0
    assert not any(one.is_running() for one in found)
    assert "s3cret" in (tmp_path / "echoes" / "echo-0.log").read_text()


def test_a_run_ends_if_its_service_dies_and_says_which_one_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "echoes" / "echo-1.log"
    words = (
        rf"(?s)^echo 1 on localhost has ended while the run went on: signal SIGKILL; log: {log}\n.*echo begins[^\n]*$"
    )
    said: list[str] = []

    def lose_one(services: Running) -> None:
        report = services.watched(said.append)
        report("before")
        kill_unreaped(toys(tmp_path)[1])
        report("after")

    with pytest.raises(LastgoodError, match=words), running(Echo(), tmp_path) as services:
        lose_one(services)
    assert said == ["before"] and own_children() == []


def test_what_the_run_failed_with_stands_behind_a_lost_service(tmp_path: Path) -> None:
    words = r"(?s)echo 0 on .*\nthe run then failed: no answer$"
    with pytest.raises(LastgoodError, match=words) as caught, running(Echo(), tmp_path):
        kill_unreaped(toys(tmp_path)[0])
        raise HostError("no answer")
    assert isinstance(caught.value.__cause__, HostError)
    with pytest.raises(ConfigError, match=r"^its own fault$"), running(Echo(), tmp_path / "second"):
        raise ConfigError("its own fault")


def test_a_service_that_cannot_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    words = r"(?s)^echo 1 on localhost has ended before it could be used: exit status 1; log: .*echo: no such luck"
    with pytest.raises(LastgoodError, match=words), running(Echo("broken"), tmp_path):
        raise AssertionError("it came up")
    assert own_children() == [] and not (tmp_path / "checkpoints" / "echoes").exists()


def test_a_service_that_is_never_ready_is_waited_for_so_long_only(tmp_path: Path) -> None:
    missing = tmp_path / "echoes" / "1.pid"
    words = rf"^waited 2 s for echo 1 on localhost to be up: there is no {missing}; log: .*echo-1\.log"
    with pytest.raises(WaitTimeout, match=words), running(Echo("slow", ready_s=2.0), tmp_path):
        raise AssertionError("it came up")
    assert own_children() == []


def test_a_ready_file_that_cannot_be_read_is_named_and_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, most_bytes: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(service_module, "read_bounded", refused)
    with pytest.raises(LastgoodError, match=r"0\.pid: cannot be read: Permission denied"), running(Echo(), tmp_path):
        pass
    assert own_children() == []


def test_a_service_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_GRACE_S", 0.5)
    with running(Echo("stubborn"), tmp_path):
        found = toys(tmp_path)
    assert len(found) == 2 and not any(one.is_running() for one in found)


def test_what_a_service_finds_wrong_after_the_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LastgoodError, match="used another echo"), running(Echo(used_more=True), tmp_path):
        pass
    assert own_children() == []


def test_peers_need_hosts_of_their_own_and_a_run_of_one_process_none(tmp_path: Path) -> None:
    alone = make_spec(system="gemini", system_options={})
    with run_services(services_of(alone), tmp_path, [].append) as services:
        assert services.processes == [] and list(tmp_path.iterdir()) == []
    together = make_spec(system="gemini", system_options={}, ranks=2, parallel="ddp")
    peers = run_services(services_of(together), tmp_path, [].append)
    with pytest.raises(LastgoodError, match="hosts of their own"), peers:
        raise AssertionError("peers came up")
