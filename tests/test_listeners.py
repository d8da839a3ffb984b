"""Every listening socket of Lastgood, while silent strangers hold connections to it: who knows the token gets in."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastgood.checkpointers.agreement.channel import open_channel
from lastgood.checkpointers.agreement.coordinator import Coordinator
from lastgood.checkpointers.gemini.address_file import Address
from lastgood.checkpointers.gemini.peer import Peer
from lastgood.cluster.launch.lifelines import Board
from lastgood.cluster.launch.order import launch_proof
from lastgood.errors import WaitTimeout
from lastgood.experiments.ceilings.network_peer import PeerClient, PeerServer
from lastgood.gradients.protocol.client import ShadowClient
from lastgood.gradients.shadow.core import ShadowCore
from lastgood.gradients.shadow.metrics import MetricsServer
from lastgood.gradients.shadow.service import ShadowService
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.gradients.switch.check import answer_checks, check_link
from lastgood.gradients.switch.forward import CopySettings
from lastgood.gradients.switch.relay import Switch, SwitchLink
from lastgood.ports import free_ports
from lastgood.sparse.control.telemetry import ask_view
from lastgood.sparse.control.telemetry_server import TelemetryServer
from lastgood.wire import gate, ring_link
from lastgood.wire.frames import Wire, prove_trainer
from lastgood.wire.gate import open_listener
from lastgood.wire.ring_link import RING_GREETING, Hello
from tests.wire.support.strangers import come_in, strangers

WAIT_S = 60.0
TOKEN = secrets.token_bytes(32)
COPIES = CopySettings(TOKEN, timeout_s=WAIT_S)
Enter = Callable[[], None]
"""Connects, and returns once both sides know each other."""


@contextlib.contextmanager
def running(target: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
        assert thread.is_alive(), "the service has ended"
    finally:
        end()
        thread.join(WAIT_S)


def until_listening(port: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), WAIT_S).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextlib.contextmanager
def shadow(_: Path) -> Iterator[tuple[int, Enter]]:
    listener = open_listener()
    port = listener.getsockname()[1]
    service = ShadowService(ShadowSettings(0, 1), TOKEN, listener)

    def enter() -> None:
        with ShadowClient(f"127.0.0.1:{port}", TOKEN, WAIT_S) as client:
            client.status()

    with running(service.run, service.stop):
        yield port, enter


@contextlib.contextmanager
def metrics(_: Path) -> Iterator[tuple[int, Enter]]:
    core = ShadowCore(ShadowSettings(0, 1), lambda message, everyone: None)
    server = MetricsServer(core, "127.0.0.1", 0)
    port = int(server.address.rpartition(":")[2])

    def enter() -> None:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WAIT_S) as answer:
            assert answer.status == 200

    try:
        yield port, enter
    finally:
        server.close()
        core.close()


@contextlib.contextmanager
def switch(_: Path) -> Iterator[tuple[int, Enter]]:
    """Behind it a rank that answers tests, through a gate of its own."""
    behind = f"127.0.0.1:{free_ports()[0]}"
    stop = threading.Event()
    link = SwitchLink("127.0.0.1:0", behind)
    with running(lambda: answer_checks(behind, TOKEN, stop, WAIT_S), stop.set), Switch([link], [], COPIES) as relay:
        until_listening(int(behind.rpartition(":")[2]))

        def enter() -> None:
            assert check_link(SwitchLink(relay.addresses[0], behind), TOKEN, WAIT_S).good

        yield int(relay.addresses[0].rpartition(":")[2]), enter


@contextlib.contextmanager
def checks(_: Path) -> Iterator[tuple[int, Enter]]:
    address = f"127.0.0.1:{free_ports()[0]}"
    stop = threading.Event()

    def enter() -> None:
        assert check_link(SwitchLink(address, address), TOKEN, WAIT_S).good

    with running(lambda: answer_checks(address, TOKEN, stop, WAIT_S), stop.set):
        until_listening(int(address.rpartition(":")[2]))
        yield int(address.rpartition(":")[2]), enter


@contextlib.contextmanager
def coordinator(_: Path) -> Iterator[tuple[int, Enter]]:
    listener = open_listener()
    port = listener.getsockname()[1]
    serving = Coordinator(listener, TOKEN, 2, WAIT_S)
    try:
        yield port, lambda: open_channel("127.0.0.1", port, TOKEN, WAIT_S).close()
        assert serving._thread.is_alive()
    finally:
        serving.close(0.0)


@contextlib.contextmanager
def gemini(folder: Path) -> Iterator[tuple[int, Enter]]:
    listener = open_listener()
    port = listener.getsockname()[1]
    address = Address(folder / "peer-0-000001.json", "127.0.0.1", port, TOKEN, 1)
    address.write()
    serving = Peer(listener, address, 1 << 20, WAIT_S)

    def enter() -> None:
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
            wire = Wire(connection, "the peer", WAIT_S)
            prove_trainer(wire, TOKEN)
            wire.send_message(op="list", owner=0)
            assert wire.receive_message("an answer")["ok"]

    with running(lambda: serving.run(1000.0), serving.ending.set):
        yield port, enter


@contextlib.contextmanager
def measured(_: Path) -> Iterator[tuple[int, Enter]]:
    serving = PeerServer("127.0.0.1", 0, TOKEN.hex())

    def enter() -> None:
        with PeerClient("127.0.0.1", serving.port, TOKEN.hex()).session():
            pass

    with running(lambda: serving.serve(1000.0), serving.stop):
        yield serving.port, enter


@contextlib.contextmanager
def board(_: Path) -> Iterator[tuple[int, Enter]]:
    ranks = 100_000
    serving = Board(TOKEN.hex(), ["here"] * ranks)
    stop = threading.Event()
    number = itertools.count()

    def serve() -> None:
        while not stop.is_set():
            serving.serve(0.1)
        serving.close()

    def enter() -> None:
        rank = next(number)
        ours = "0" * 64
        hello = {"nonce": ours, "rank": rank, "world": ranks, "port": 1, "slurm_job": None}
        with socket.create_connection(("127.0.0.1", serving.port), WAIT_S) as line:
            theirs = json.loads(line.recv(1000))["nonce"]
            hello["proof"] = launch_proof(TOKEN.hex(), "rank", ours, theirs)
            line.sendall(json.dumps(hello).encode() + b"\n")
            assert json.loads(line.recv(1000)) == {"proof": launch_proof(TOKEN.hex(), "launch", ours, theirs)}
            deadline = time.monotonic() + WAIT_S
            while serving.ranks[rank]._hello is None:
                assert time.monotonic() < deadline and not serving.ranks[rank].over
                time.sleep(0.001)

    with running(serve, stop.set):
        yield serving.port, enter


@contextlib.contextmanager
def ring(_: Path) -> Iterator[tuple[int, Enter]]:
    """A rank that waits for the previous one, and refuses those of another life of the job."""
    listener = open_listener()
    port = listener.getsockname()[1]
    own, other = Hello("0" * 32, 2, 0, 2, "a" * 64, "host"), Hello("0" * 32, 1, 1, 2, "a" * 64, "host")
    stop = threading.Event()

    def wait() -> None:
        with pytest.raises(WaitTimeout):
            ring_link._accept(own, listener, TOKEN, RING_GREETING, time.monotonic() + 1000.0, 1000.0, stop)

    def enter() -> None:
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
            wire = Wire(connection, "the rank", WAIT_S)
            prove_trainer(wire, TOKEN, RING_GREETING)
            wire.send_message(**other.content())
            assert "epoch is 1" in wire.receive_message("a refusal")["why"]

    with running(wait, stop.set):
        yield port, enter


@contextlib.contextmanager
def telemetry(_: Path) -> Iterator[tuple[int, Enter]]:
    listener = open_listener()
    port = listener.getsockname()[1]
    serving = TelemetryServer(listener, TOKEN, None, lambda _: None, timeout_s=WAIT_S)

    def enter() -> None:
        assert ask_view(f"127.0.0.1:{port}", TOKEN, WAIT_S)["ranks"] == []

    with running(serving.run, serving.stop):
        yield port, enter


LISTENERS = [ring, board, coordinator, gemini, measured, shadow, metrics, switch, checks, telemetry]


@pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: one.__name__)
def test_silent_strangers_lock_nobody_out(
    listener: Callable[[Path], contextlib.AbstractContextManager[tuple[int, Enter]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "_MOST_STRANGERS", 200, raising=False)
    with listener(tmp_path) as (port, enter), strangers(port, 300, 1.5, again_per_s=50) as there:
        come_in(there, enter, least=5)


@pytest.mark.slow
@pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: one.__name__)
def test_ten_thousand_strangers_for_a_minute_slow_nobody_down(
    listener: Callable[[Path], contextlib.AbstractContextManager[tuple[int, Enter]]], tmp_path: Path
) -> None:
    with listener(tmp_path) as (port, enter), strangers(port, 10_000, 60.0) as there:
        took = sorted(come_in(there, enter))
    late = sum(seconds > 1.0 for seconds in took)
    assert late <= len(took) // 100, f"{late} of {len(took)} came in after more than 1 s, the last after {took[-1]:.1f}"
