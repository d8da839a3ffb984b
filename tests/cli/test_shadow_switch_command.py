"""`lastgood shadow switch` as a process: a ring through it, its counters, its test of the ways, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.gradients.layout.layout import plan_layout
from lastgood.ports import free_ports
from lastgood.wire.records import DType
from lastgood.wire.ring_comm import Place, RingComm
from lastgood.wire.ring_link import listen_ring
from tests.gradients.support.receiving_shadow import ReceivingShadow
from tests.wire.support.ring_helpers import JOB, TOKEN, together

LAYOUT = plan_layout([("p", (1000,), "float32")], {}, ranks=2, shadows=1)
COMMAND = [sys.executable, "-c", "from lastgood.cli import main; main()", "shadow", "switch"]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(TOKEN + b"\n")
    return path


@pytest.fixture
def shadow() -> Iterator[ReceivingShadow]:
    one = ReceivingShadow(0, LAYOUT, TOKEN, JOB)
    yield one
    one.close()


def start(*arguments: object, ready: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    if ready not in line:
        process.kill()
        raise AssertionError(line + process.communicate()[1])
    return process


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGTERM)
    try:
        out, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return out, said


def test_a_ring_goes_through_it_and_its_counters_say_so(token_file: Path, shadow: ReceivingShadow) -> None:
    listeners = [listen_ring("127.0.0.1") for _ in range(2)]
    ports = free_ports(2)
    links = [f"127.0.0.1:{ports[rank]}=127.0.0.1:{listeners[1 - rank].getsockname()[1]}" for rank in range(2)]
    process = start(
        "--token-file", token_file, "--link", links[0], "--link", links[1], "--shadow", shadow.address, ready="goes to"
    )
    try:

        def make(rank: int) -> RingComm:
            return RingComm(
                rank,
                2,
                listener=listeners[rank],
                next_address=f"127.0.0.1:{ports[rank]}",
                token=TOKEN,
                job=JOB,
                epoch=1,
                layout=LAYOUT.digest,
                timeout_s=60.0,
            )

        comms = together([lambda: make(0), lambda: make(1)])
        data = [np.full(1000, rank + 1, np.float32) for rank in range(2)]

        def run(comm: RingComm) -> None:
            comm.all_reduce(comm.plan(1000, DType.float32, [Place(0, 4000, 0, 0)]), data[comm.rank].ctypes.data, 1)
            comm.end(1)

        together([lambda: run(comms[0]), lambda: run(comms[1])])  # type: ignore[misc]
        assert shadow.wait(1, seconds=60.0)
        assert np.frombuffer(shadow.bytes_of(0, 1), np.float32).tolist() == [3.0] * 1000
        for comm in comms:
            comm.close()
    finally:
        out, _ = end(process)
    counts = json.loads(out)
    assert counts["copies"]["sent_bytes"] == 4000 + 2 * 64 + 2 * 64
    assert counts["relay"]["forward_bytes"] > 4 * 2000


def test_check_goes_through_a_running_switch(token_file: Path, shadow: ReceivingShadow) -> None:
    ports = free_ports(3)
    answering = start("--token-file", token_file, "--answer", f"127.0.0.1:{ports[0]}", ready="answering")
    good, bad = f"127.0.0.1:{ports[1]}=127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[2]}=127.0.0.1:{ports[0]}"
    running = start("--token-file", token_file, "--link", good, ready="goes to")
    try:
        arguments = ["shadow", "switch", "--token-file", str(token_file), "--link", good, "--check", "--timeout", "30"]
        done = CliRunner().invoke(app, [*arguments, "--shadow", shadow.address, "--json"])
        assert done.exit_code == 0, done.output
        assert [(row["good"], row["found"]) for row in json.loads(done.stdout)] == [
            (True, "the next rank answers through the switch"),
            (True, f"incarnation 0, job {JOB}"),
        ]
        done = CliRunner().invoke(app, [*arguments, "--link", bad, "--shadow", "127.0.0.1:1", "--json"])
        assert done.exit_code == 1
        rows = json.loads(done.stdout)
        assert [row["good"] for row in rows] == [True, False, False]
        assert "answers, but not through" in rows[1]["found"]
        other = token_file.with_name("other")
        other.touch(mode=0o600)
        other.write_bytes(b"x" * 32)
        done = CliRunner().invoke(app, [*arguments, "--token-file", str(other), "--json"])
        assert done.exit_code == 1
        assert "does not know this token" in json.loads(done.stdout)[0]["found"]
    finally:
        end(running)
        _, said = end(answering)
    assert "3 tests were right" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "at least one --link"),
        (["--link", "nothing"], "not a link"),
        (["--link", "a:1=b:2", "--shadow", "c"], "not an address"),
        (["--link", "a:1=b:2", "--queue", "much"], "--queue"),
        (["--link", "a:1=b:2", "--queue", "4KiB"], "at least 1 MiB"),
        (["--link", "a:1=b:2", "--faults", "loss=3"], "from 0 to 1"),
        (["--link", "a:1=b:2", "--timeout", "0"], "--timeout"),
        (["--link", "a:1=b:2", "--timeout", "nan"], "--timeout"),
        (["--link", "a:1=b:2", "--timeout", "inf"], "--timeout"),
        (["--link", "a:1=b:2", "--report", "nan"], "--report"),
        (["--link", "a:1=b:2", "--report", "-1"], "--report"),
    ],
)
def test_refuses(token_file: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arguments = ["shadow", "switch", "--token-file", str(token_file), *arguments]
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_without_a_token_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no token"):
        CliRunner().invoke(app, ["shadow", "switch", "--token-file", str(tmp_path / "none")], catch_exceptions=False)
