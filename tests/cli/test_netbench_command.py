"""`lastgood netbench`: loopback and a peer for real, the table, the refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cli._peer import serve_peer
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.ceilings.network_peer import PeerServer
from lastgood.experiments.machine import lock as lock_module
from lastgood.locks import FileLock
from lastgood.ports import free_ports
from tests.suggestions.following import advice, follows, refusal
from tests.support import patience

TOKEN = "a token of this test"
SHORT = ("--seconds", "0.05", "--rounds", "2", "--streams", "1,2", "--messages", "64KiB")


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must neither wait for a measurement on this machine nor hold one up."""
    path = tmp_path / "machine.lock"
    monkeypatch.setattr(lock_module, "machine_lock", lambda: FileLock(path, "this test's turn"))


def netbench(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["netbench", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def wait_until(done: Callable[[], bool]) -> None:
    patience.wait_until(done, "what the command is to do", 60)


@contextmanager
def serving() -> Iterator[str]:
    server = PeerServer("127.0.0.1", 0, TOKEN)
    thread = threading.Thread(target=server.serve, args=(200,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.stop()
        thread.join(60)


def test_loopback_as_a_table_and_as_json() -> None:
    rows = [line.split("│") for line in netbench(*SHORT).stdout.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[1:4]] for row in rows] == [["send", str(n), "64 KiB"] for n in (1, 2)]
    assert all("iB/s" in row[4] and " to " in row[5] for row in rows)
    found = json.loads(netbench(*SHORT, "--json").stdout)
    assert found["peer"] is None
    assert [point["streams"] for point in found["points"]] == [1, 2]
    for point in found["points"]:
        assert len(point["bytes_per_s"]) == 2 and min(point["bytes_per_s"]) > 0
        assert min(point["bytes_per_s"]) <= point["median_bytes_per_s"] <= max(point["bytes_per_s"])


@follows("refuses this token, or does not know the token: both machines need the same one (LASTGOOD_PEER_TOKEN)")
def test_a_peer_in_all_directions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    monkeypatch.delenv("LASTGOOD_PEER_TOKEN", raising=False)
    ways = ("--way", "send", "--way", "both", "--way", "receive")
    with serving() as address:
        found = json.loads(netbench("--peer", address, "--peer-token-file", str(token), *SHORT, *ways, "--json").stdout)
        assert [(point["direction"], point["streams"]) for point in found["points"]] == [
            (way, count) for way in ("send", "both", "receive") for count in (1, 2)
        ]
        monkeypatch.setenv("LASTGOOD_PEER_TOKEN", "the token of another test")
        message = refusal(lambda: netbench("--peer", address, *SHORT))
        monkeypatch.setenv(advice(message, r"both machines need the same one \((\w+)\)"), TOKEN)
        for more in ((), ("--way", "receive")):  # also one way alone
            netbench("--peer", address, *SHORT, *more)


def test_serve_makes_a_token_answers_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTGOOD_PEER_TOKEN", raising=False)
    (port,) = free_ports()
    told: list[str] = []
    servers: list[PeerServer] = []
    really_serve = PeerServer.serve

    def serve(self: PeerServer, seconds: float) -> None:
        servers.append(self)
        really_serve(self, seconds)

    monkeypatch.setattr(PeerServer, "serve", serve)
    server = threading.Thread(target=serve_peer, args=(f"127.0.0.1:{port}", 200.0, None, told.append))
    server.start()
    wait_until(lambda: len(told) == 2)
    monkeypatch.setenv("LASTGOOD_PEER_TOKEN", told[0].rpartition("LASTGOOD_PEER_TOKEN=")[2])
    # Both sides are this process, and share its lock here: the server refuses to be measured while it is held.
    with pytest.raises(LastgoodError, match=rf"port {port} refuses: .*this test's turn"):
        netbench("--peer", f"127.0.0.1:{port}", *SHORT)
    servers[0].stop()
    server.join(60)
    assert not server.is_alive()
    # The next one ends by itself.
    told = netbench("--serve", "--listen", f"127.0.0.1:{port}", "--serve-s", "1").stderr.splitlines()
    assert told == [f"netbench: answering on 127.0.0.1 port {port} for 1 s; end it with Ctrl-C"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "--peer", "box"], "leave out --peer"),
        (["--peer", "box"], "--serve printed on box.*LASTGOOD_PEER_TOKEN"),
        (["--streams", "0"], "1 to 16 connections"),
        (["--streams", "1,17"], "1 to 16 connections"),
        (["--streams", "two"], "write 1,4 and 64KiB,1MiB"),
        (["--messages", "1,0"], "sizes from 1 byte"),
        (["--messages", "17MiB"], "sizes from 1 byte to 16 MiB"),
        (["--messages", "1 furlong"], "not a size"),
        (["--seconds", "10", "--rounds", "9"], "that takes 9 min 0 s, and 100 s are allowed"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTGOOD_PEER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=message):
        netbench(*arguments)
