"""What answers of hosts mean, who meets whom, and the agent as a process of its own. Real hosts: tests/multinode."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.cluster.host_check import agent as host_agent
from lastgood.cluster.host_check import check as host_check
from lastgood.cluster.host_check.check import (
    CheckOptions,
    CheckReport,
    ClockReading,
    Finding,
    HostFacts,
    Rate,
    judge,
    pairings,
    read_clock,
)
from lastgood.cluster.hostfile import Host, Hostfile
from lastgood.errors import ConfigError
from lastgood.ports import free_ports

HOSTS = Hostfile((Host("a", 1), Host("b", 1)))
GIB = 1 << 30
RIGHT = ClockReading(0.001, 0.001)


def facts(**changed: Any) -> HostFacts:
    values = {
        "hostname": "a",
        "python": "3.11.2",
        "executable": "/usr/bin/python3",
        "torch": "2.14.1",
        "lastgood": "0.1.0",
        "code": "c0de",
        "revision": "1234",
        "dirty": False,
        "folder": "/root",
        "free_bytes": 100 * GIB,
        "gpus": [],
        "busy_ports": [],
    }
    return HostFacts.model_validate({**values, **changed})


def findings(
    hostfile: Hostfile = HOSTS,
    a: HostFacts | None = None,
    b: HostFacts | None = None,
    clock_b: ClockReading = RIGHT,
    rates: tuple[Rate, ...] = (),
    failures: dict[str, str] | None = None,
    **options: Any,
) -> list[Finding]:
    known = {"a": a or facts(), "b": b or facts(hostname="b")}
    for name in failures or {}:
        del known[name]
    clocks = {"a": ClockReading(0.0, 0.001), "b": clock_b}
    report = CheckReport(hostfile.names, known, {name: clocks[name] for name in known}, rates)
    return judge(hostfile, report, failures or {}, "c0de", CheckOptions(**options))


def test_hosts_that_are_well() -> None:
    assert findings(rates=(Rate("a", "b", 1e8), Rate("b", "a", 1e8))) == []


@pytest.mark.parametrize(
    ("changed", "what", "found"),
    [
        ({"b": facts(code="0ther", revision="5678" * 10)}, "lastgood", "revision 567856785678"),
        ({"b": facts(code="0ther", dirty=True)}, "lastgood", "with changes"),
        ({"b": facts(lastgood=None, code=None)}, "lastgood", "not installed"),
        ({"b": facts(python="3.12.1")}, "Python", "3.12.1, and 3.11.2"),
        ({"b": facts(torch=None)}, "torch", "not installed"),
        ({"b": facts(torch="2.11")}, "torch", "2.11, and 2.14.1"),
        ({"b": facts(free_bytes=GIB)}, "disk", "1 GiB free"),
        ({"b": facts(free_bytes=None)}, "disk", "no folder /root"),
        ({"b": facts(busy_ports=[29501])}, "ports", "29501"),
        ({"a": facts(gpus=["H200"])}, "GPUs", "0 GPUs, 1 slots"),
        ({"clock_b": ClockReading(-0.3, 0.01)}, "clock", "-300.0 ms"),
        ({"clock_b": ClockReading(0.3, 0.01)}, "clock", "+300.0 ms"),
        ({"rates": (Rate("b", "a", None, "b: no way"),)}, "network to a", "no way"),
        ({"rates": (Rate("b", "a", 1e6),), "min_bytes_per_s": 1e7}, "network to a", "KiB/s"),
        ({"failures": {"b": "b: refuses this key; copy it there"}}, "ssh", "refuses this key"),
    ],
)
def test_each_fault_is_found_on_its_host_alone(changed: dict[str, Any], what: str, found: str) -> None:
    (finding,) = findings(**changed)
    assert (finding.verdict, finding.host, finding.what) == ("fault", "b", what)
    assert found in finding.found
    assert finding.to_do


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"clock_b": ClockReading(0.0, 0.2)}, "clock"),
        ({"b": facts(gpus=["H200"] * 2), "a": facts(gpus=["H200"])}, "GPUs"),
        ({"rates": (Rate("a", "b", 1e9), Rate("b", "a", 1e8), Rate("a", "b", 1e9))}, "network to a"),
    ],
)
def test_what_is_odd_but_works_is_a_warning(changed: dict[str, Any], what: str) -> None:
    (finding,) = findings(**changed)
    assert (finding.verdict, finding.host, finding.what) == ("warning", "b", what)


def test_patch_versions_of_python_may_differ() -> None:
    assert findings(b=facts(python="3.11.9")) == []


class Clock:
    """A conversation with a clock of its own, behind a line of known delays each way, in a time of its own."""

    def __init__(self, ahead_s: float, delays: list[tuple[float, float]]) -> None:
        self._ahead_s, self._delays = ahead_s, iter(delays)
        self._now_s = 1000.0

    def monotonic(self) -> float:
        return self._now_s

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        there, back = next(self._delays)
        self._now_s += there
        answer = {"time_s": self._now_s + self._ahead_s}
        self._now_s += back
        return answer


@pytest.mark.parametrize("ahead_s", [0.0, 5.0, -5.0])
def test_a_clock_is_read_as_well_as_the_best_round_trip_allows(ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slow and lopsided readings, and fast ones, of which the fastest must win and be taken at its middle.
    delays = [(0.08, 0.0), (0.0, 0.08), (0.02, 0.02), (0.015, 0.005)] + [(0.015, 0.015)] * 4
    clock = Clock(ahead_s, delays)
    monkeypatch.setattr(host_check, "time", clock)
    reading = read_clock(cast(Any, clock), clock.monotonic)
    assert reading.error_s == pytest.approx(0.01)
    # What the way there took longer than the way back is halved, and cannot be known.
    assert reading.skew_s - ahead_s == pytest.approx(0.005)


@given(st.integers(2, 40))
def test_all_pairs_meet_once_and_nobody_is_in_two_transfers(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = list(pairings(names))
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert met == sorted(tuple(sorted(pair)) for pair in itertools.combinations(names, 2))
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)


@pytest.mark.parametrize(
    "bad",
    [
        {"ports": (0, 5)},
        {"ports": (9, 5)},
        {"ports": (1, 65535)},
        {"transfer_s": 99.0},
        {"clock_limit_s": float("nan")},
    ],
)
def test_options_are_bounded(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CheckOptions(**bad)


# -- the agent ---------------------------------------------------------------------------------------------------------

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def agents() -> Iterator[Callable[[], Ask]]:
    """Starts agents as they run on hosts: from their source as an argument, questions on standard input."""
    source = host_agent.source()
    started = []

    def start() -> Ask:
        process = subprocess.Popen(
            [sys.executable, "-c", source, "200"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)

        def ask(**question: Any) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        return ask

    yield start
    for process in started:
        process.communicate(timeout=60)
        assert process.returncode == 0, "the end of its input ends it"


def test_an_agent_tells_of_versions_disk_and_taken_ports(agents: Callable[[], Ask], tmp_path: Path) -> None:
    ask = agents()
    with socket.create_server(("", 0)) as taken:
        busy = taken.getsockname()[1]
        answer = ask(do="facts", folder=str(tmp_path), ports=[busy, free_ports(1, "")[0]])
    found = HostFacts.model_validate(answer)
    assert found.busy_ports == [busy]
    assert found.free_bytes is not None and found.free_bytes > 0
    assert found.code == host_agent.lastgood_facts()["code"]
    assert found.executable == sys.executable
    assert found.torch is not None
    assert ask(do="facts", folder=str(tmp_path / "none"), ports=[])["free_bytes"] is None


def test_another_code_is_another_digest(tmp_path: Path) -> None:
    told = "told = {'__name__': 'agent'}; exec(sys.argv[1], told); print(json.dumps(told['lastgood_facts']()))"
    program = ["-c", f"import json, sys; {told}", host_agent.source()]

    def digest(where: Path | None) -> str:
        # A Python without installed packages, so that the only Lastgood that it can find is the one in `where`.
        environment = {} if where is None else {"PYTHONPATH": str(where)}
        done = subprocess.run(
            [sys.executable, "-S", *program], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)["code"]

    for name in ("one", "two"):
        (tmp_path / name / "lastgood").mkdir(parents=True)
        (tmp_path / name / "lastgood" / "__init__.py").write_text("x = 1\n")
        (tmp_path / name / "lastgood" / "part.py").write_text("y = 2\n")
    assert digest(None) is None
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    (tmp_path / "two" / "lastgood" / "part.py").write_text("y = 3\n")
    assert digest(tmp_path / "one") != digest(tmp_path / "two")


def test_agents_send_each_other_bounded_bytes(agents: Callable[[], Ask]) -> None:
    sender, receiver = agents(), agents()
    port = free_ports(1, "")[0]
    listen = {"do": "listen", "ports": [port], "token": "ab" * 16, "seconds": 30}
    assert receiver(**listen) == {"port": port}
    answer = sender(do="send", host="127.0.0.1", port=port, token="ab" * 16, bytes=3 << 20, seconds=30)
    assert answer["bytes"] == 3 << 20
    assert answer["seconds"] > 0


def test_a_stranger_gets_nothing_and_takes_no_ones_place(agents: Callable[[], Ask]) -> None:
    sender, receiver = agents(), agents()
    port = receiver(do="listen", ports=[free_ports(1, "")[0]], token="ab" * 16, seconds=30)["port"]
    send = {"do": "send", "host": "127.0.0.1", "port": port, "bytes": 1 << 20, "seconds": 30}
    assert "error" in sender(**send, token="cd" * 16)
    assert sender(**send, token="ab" * 16)["bytes"] == 1 << 20


def test_silent_strangers_take_no_senders_turn(agents: Callable[[], Ask]) -> None:
    """Of which one alone held everybody up for its ten seconds, and six for a whole transfer."""
    sender, receiver = agents(), agents()
    port = receiver(do="listen", ports=[free_ports(1, "")[0]], token="ab" * 16, seconds=30)["port"]
    with ExitStack() as silent:
        for _ in range(12):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        send = {"do": "send", "host": "127.0.0.1", "port": port, "bytes": 1 << 20, "seconds": 30}
        assert sender(**send, token="ab" * 16)["bytes"] == 1 << 20


def test_a_transfers_token_is_not_sent_and_must_be_long(agents: Callable[[], Ask]) -> None:
    """Whoever listens in the receiver's place learns nothing that would let him in, and is found out."""
    sender = agents()
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as false:

        def listen() -> None:
            connection, _ = false.accept()
            with connection:
                connection.settimeout(30)
                connection.sendall(bytes(32))
                while len(heard) < 64 and (part := connection.recv(64)):
                    heard.extend(part)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=listen)
        thread.start()
        send = {"do": "send", "host": "127.0.0.1", "port": false.getsockname()[1], "bytes": 1, "seconds": 1}
        assert "does not know this transfer's token" in sender(**send, token="ab" * 16)["error"]
        thread.join(60)
    assert len(heard) == 64
    assert bytes.fromhex("ab" * 16) not in heard
    assert "16 bytes" in agents()(do="listen", ports=[], token="ab" * 15, seconds=1)["error"]


@pytest.mark.parametrize("question", [{"do": "dance"}, {"do": "send"}, {"do": "facts", "folder": 3, "ports": []}, {}])
def test_a_bad_question_is_an_error_and_not_the_end(agents: Callable[[], Ask], question: dict[str, Any]) -> None:
    ask = agents()
    assert "error" in ask(**question)
    assert abs(ask(do="time")["time_s"] - time.time()) < 60
