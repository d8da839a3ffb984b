"""Telemetry between ranks and a server: what is told and heard, and servers and clients that fail in every way."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import secrets
import socket
import threading
import time
import urllib.request

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import CheckpointError, ConfigError, HostError, MismatchError
from lastgood.ports import free_ports
from lastgood.sparse.control import telemetry_server
from lastgood.sparse.control.telemetry import (
    MOST_TOLD,
    TELEMETRY_GREETING,
    TELEMETRY_VERSION,
    Join,
    Measured,
    TelemetryClient,
    ask_view,
)
from lastgood.sparse.control.telemetry_metrics import TelemetryNumbers
from lastgood.sparse.control.telemetry_server import Chooser, Choosing, TelemetryServer
from lastgood.sparse.engine import Engine
from lastgood.wire.frames import Wire, peer_handshake, prove_trainer
from lastgood.wire.gate import Gate, open_listener
from lastgood.wire.scrape import ScrapeServer
from tests.support.patience import PATIENCE

TOKEN = secrets.token_hex(16).encode()
WAIT_S = 20.0 * PATIENCE
QUICK = {"timeout_s": 0.2, "again_s": (0.05, 0.05)}


def until(true, what):
    deadline = time.monotonic() + WAIT_S
    while not (found := true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found


def join(rank=0, ranks=2, **changed):
    values = {
        "version": TELEMETRY_VERSION,
        "job": "ab" * 16,
        "rank": rank,
        "ranks": ranks,
        "host": f"host{rank}",
        "elements": 1_000_000,
        "value_bytes": 5.0,
        "staleness": 1,
        "compression": 0.99,
        "least_compression": 0.9,
    }
    return Join(**{**values, **changed})


def measured(iteration, rank=0, samples=32, alpha_s=0.01, **more):
    values = {"compute_s": alpha_s * samples, "waited_s": 0.01, "sent_bytes": 100_000, "sending_s": 0.008}
    return Measured(worker=rank, iteration=iteration, samples=samples, **{**values, **more})


@contextlib.contextmanager
def served(choosing=None, say=lambda _: None, **options):
    listener = open_listener()
    server = TelemetryServer(listener, TOKEN, choosing, say, **options)
    server.start()
    try:
        yield server, f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.close()


@contextlib.contextmanager
def joined(address, rank=0, token=TOKEN, about=None, **options):
    client = TelemetryClient(address, token, **{"timeout_s": WAIT_S, "again_s": (0.05, 0.05), **options})
    client.join(about or join(rank))
    try:
        yield client
    finally:
        client.close()


def test_what_is_told_is_seen_and_what_is_chosen_is_heard():
    """A worker half as fast gets fewer samples; both hear of the same setting."""
    with served(Choosing({"starts": 2}, every_iterations=2, most_share=1.0)) as (server, address):
        with joined(address, 0) as one, joined(address, 1) as other:
            heard = {0: [], 1: []}
            numbers = itertools.count()

            def tell():
                iteration = next(numbers)
                for rank, client in enumerate((one, other)):
                    samples = 32 + 8 * (iteration % 2)
                    client.tell(measured(iteration, rank, samples, alpha_s=0.01 * (1 + rank), energy_kept=0.5))
                    heard[rank] += client.heard()
                return {one.number for one in heard[0]} & {one.number for one in heard[1]}

            until(tell, "no setting came")
        view = server.view()
        assert json.loads(json.dumps(view)) == view
        first = heard[0][0]
        assert sum(first.samples) == 64 and first.samples[0] > first.samples[1] and first.compression >= 0.9
        assert [one["host"] for one in view["ranks"]] == ["host0", "host1"]
        assert view["setting"]["samples"] and view["controller"]["decisions"] >= 1
        until(lambda: not any(one["connected"] for one in server.view()["ranks"]), "clients that left are there")
        assert ask_view(address, TOKEN)["job"] == "ab" * 16


def test_telling_never_waits_and_the_oldest_is_forgotten():
    """Nobody is there, and there are a thousand iterations."""
    address = f"127.0.0.1:{free_ports()[0]}"
    with joined(address, **QUICK) as client:
        began = time.perf_counter()
        for iteration in range(1000):
            client.tell(measured(iteration))
        assert time.perf_counter() - began < 30, "a wait for each of a thousand takes 200 s"
        assert client.forgotten >= 1000 - 256 and client.heard() == [] and not client.connected


@contextlib.contextmanager
def bad_server(answer):
    """A server that knows the token, and then does `answer(wire)` with each connection."""
    listener = open_listener()
    ending = threading.Event()

    def run():
        with Gate(
            listener, lambda other: peer_handshake(other, TOKEN, TELEMETRY_GREETING), "bad", lambda _: None
        ) as gate:
            while not ending.is_set():
                for guest in gate.step(0.05):
                    gate.serve_in_thread(guest, lambda one: answer(Wire(one.connection, one.other, WAIT_S), ending))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ending.set()
        thread.join(WAIT_S)


def hangs(wire, ending):
    wire.receive_message("a join")
    ending.wait(WAIT_S)


def talks_nonsense(wire, ending):
    wire.receive_message("a join")
    wire.write("nonsense", b"\x00\xff" * 4000)
    ending.wait(WAIT_S)


def gives_another_answer(wire, ending):
    wire.receive_message("a join")
    wire.send_message(ok=True, setting={"number": -1, "from_iteration": 0, "samples": [1, 2], "compression": 2})
    ending.wait(WAIT_S)


def gives_a_setting_of_other_ranks(wire, ending):
    wire.receive_message("a join")
    setting = {"number": 1, "from_iteration": 0, "samples": [1, 2, 3], "compression": 0.5}
    wire.send_message(ok=True, setting=setting)
    ending.wait(WAIT_S)


def leaves(wire, ending):
    wire.receive_message("a join")
    wire.close()


@pytest.mark.parametrize(
    "answer", [hangs, talks_nonsense, gives_another_answer, gives_a_setting_of_other_ranks, leaves, None]
)
def test_a_training_beside_a_bad_server_is_that_without_one(answer, caplog):
    """To the bit, and soon; the log names the server once."""
    caplog.set_level(logging.WARNING)

    def train(telemetry):
        torch.manual_seed(3)
        model = nn.Linear(20, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with contextlib.closing(Engine(model, optimizer, 0.9, "topk", 1, telemetry=telemetry)) as engine:
            data = [torch.randn(6, 20) for _ in range(40)]
            for batch in engine.batches(data):
                engine.backward(model(batch).square().mean())
                engine.step()
                if telemetry is not None:
                    time.sleep(0.01)
            assert engine.facts()["setting"] is None
        return {name: one.clone() for name, one in model.state_dict().items()}

    plain = train(None)
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{free_ports()[0]}" if answer is None else stack.enter_context(bad_server(answer))
        client = TelemetryClient(address, TOKEN, **QUICK)
        began = time.monotonic()
        found = train(client)
        assert time.monotonic() - began < 30 * PATIENCE
        assert client.told == 0
    assert all(torch.equal(value, plain[name]) for name, value in found.items())
    said = [one.message for one in caplog.records if "the training continues" in one.message]
    assert len(said) == 1 and address in said[0]


def test_a_server_that_comes_back_is_told_what_waits(caplog):
    caplog.set_level(logging.WARNING)
    (port,) = free_ports()
    with joined(f"127.0.0.1:{port}") as client:
        for iteration in range(3):
            client.tell(measured(iteration))
        until(lambda: "the training continues" in caplog.text, "it found a server that is gone")
        server = TelemetryServer(until(lambda: _listen_again(port), "the port is taken"), TOKEN, None, lambda _: None)
        server.start()
        until(lambda: client.told == 3, "not told")
        server.close()
    assert "is there again" in caplog.text


def _listen_again(port):
    try:
        return open_listener("127.0.0.1", port)
    except OSError:
        return None


def test_who_does_not_know_the_token_is_told_nothing(caplog):
    lines = []
    with served(say=lines.append) as (server, address), joined(address, token=b"y" * 32, **QUICK) as client:
        until(lambda: lines, "the server says nothing")
        client.tell(measured(0))
        assert client.told == 0 and server.view()["ranks"] == []
        with pytest.raises(MismatchError, match="does not know this job's token"):
            ask_view(address, b"z" * 32)
    assert "does not know the token" in lines[0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"job": "cd" * 16}, "ranks of another training of 2 ranks are connected"),
        ({"elements": 7}, "elements is 7 on rank 1, and 1000000 on rank 0"),
        ({"ranks": 3}, "ranks is 3 on rank 1, and 2 on rank 0"),
    ],
)
def test_a_rank_of_another_training_is_refused(changed, why, caplog):
    caplog.set_level(logging.WARNING)
    with served() as (server, address), joined(address, 0):
        until(lambda: server.view()["ranks"], "not joined")
        with joined(address, about=join(1, **{"ranks": 2, **changed})):
            until(lambda: any(why in one.message for one in caplog.records), "nothing was said")
        assert [one["rank"] for one in server.view()["ranks"]] == [0]


def test_another_incarnation_takes_the_place_of_one_that_is_gone():
    with served(Choosing({"starts": 1}, every_iterations=1, most_share=1.0)) as (server, address):
        with joined(address, about=join(0, 1)) as client:
            for iteration in range(50, 54):
                client.tell(measured(iteration))
            until(lambda: [one for one in server.view()["ranks"] if one["link_bits_per_s"]], "nothing was learnt")
        until(lambda: not server.view()["ranks"][0]["connected"], "it is still there")
        with joined(address, about=join(0, 1, job="cd" * 16)) as client:
            client.tell(measured(3))  # from a checkpoint: iterations begin again
            until(lambda: server.view()["job"] == "cd" * 16, "not joined")
            until(lambda: server.view()["ranks"][0]["most_samples"], "its iteration was left aside")


def connected(address, hello):
    host, _, port = address.rpartition(":")
    wire = Wire(socket.create_connection((host, int(port)), WAIT_S), "the server", WAIT_S)
    prove_trainer(wire, TOKEN, TELEMETRY_GREETING)
    wire.send_message(**hello)
    return wire


def test_bad_clients_end_their_own_connection_only():
    lines = []
    with served(say=lines.append, timeout_s=0.5) as (server, address), joined(address, 0) as good:
        wrong = [
            ({"version": 2}, "speaks version 2 of telemetry, and this is version 1"),
            ({"hello": 1}, "sent no description of a rank"),
            ({**join(1).model_dump(), "rank": 2}, "sent no description of a rank"),
        ]
        for hello, why in wrong:
            answer = connected(address, hello).receive_message("a refusal")
            assert answer["ok"] is False and why in answer["why"]
        for told in (
            {"measured": [], "forgotten": 0},
            {"measured": [measured(0, 0).model_dump()], "forgotten": 0},
            {"measured": [{**measured(0, 1).model_dump(), "compute_s": -1}], "forgotten": 0},
            {"measured": [measured(n, 1).model_dump() for n in range(MOST_TOLD + 1)], "forgotten": 0},
        ):
            wire = connected(address, join(1).model_dump())
            assert wire.receive_message("an answer") == {"ok": True, "setting": None}
            wire.send_message(**told)
            assert wire.wait_readable(WAIT_S) and wire.ended()
        slow = connected(address, join(1).model_dump())
        slow.receive_message("an answer")
        slow.write("half a header", b"LGM1")
        for iteration in range(5):
            good.tell(measured(iteration))
        until(lambda: good.told == 5, "a slow rank holds up another one")
        assert slow.wait_readable(WAIT_S) and slow.ended()  # after its half a second
        assert server.view()["ranks"][0]["connected"]


def test_a_rank_that_connects_again_takes_its_own_place():
    with served() as (server, address):
        first = connected(address, join(0).model_dump())
        first.receive_message("an answer")
        second = connected(address, join(0).model_dump())
        second.receive_message("an answer")
        assert first.wait_readable(WAIT_S) and first.ended()
        second.send_message(measured=[measured(7).model_dump()], forgotten=3)
        second.receive_message("an answer")
        (rank,) = server.view()["ranks"]
        assert rank["connected"] and rank["told_iterations"] == 1 and rank["forgotten_iterations"] == 3


def test_settings_that_no_controller_can_have_leave_the_ranks_as_they_are():
    lines = []
    with (
        served(Choosing({"most_samples": 1}), lines.append) as (_, address),
        joined(address, about=join(0, 1)) as client,
    ):
        client.tell(measured(0))
        until(lambda: any("it chooses nothing more for this training" in line for line in lines), "nothing was said")
        client.tell(measured(1))
        until(lambda: client.told == 2, "not told")
        assert client.heard() == []


def test_prometheus_text_names_units():
    with served() as (server, address), joined(address, 1, about=join(1)) as client:
        client.tell(measured(4, 1, energy_kept=0.25))
        until(lambda: client.told == 1, "not told")
        scraped = ScrapeServer(TelemetryNumbers(server), "127.0.0.1", 0, lambda _: None)
        try:
            with urllib.request.urlopen(f"http://{scraped.address}/metrics", timeout=WAIT_S) as answer:
                text = answer.read().decode()
        finally:
            scraped.close()
    values = dict(re.findall(r'^lastgood_sparse_(\w+)\{rank="1"\} ([\d.e+-]+)$', text, flags=re.M))
    assert float(values["iteration_compute_seconds"]) == 0.32 and float(values["sent_bytes_total"]) == 100_000
    assert values["energy_kept_ratio"] == "0.25" and "residual_age_iterations" not in values
    counted = ("connected", "iteration", "setting")
    units = ("_total", "_seconds", "_bytes", "_ratio", "_iterations", "_samples", "_bits_per_second")
    assert [name for name in values if name not in counted and not name.endswith(units)] == []
    assert all(f"# HELP lastgood_sparse_{name} " in text for name in values)


def test_status_shows_ranks(tmp_path):
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    with served() as (_, address), joined(address, 0) as client:
        client.tell(measured(12, energy_kept=0.5))
        until(lambda: client.told == 1, "not told")
        words = ["stellatrain", "status", address, "--token-file", str(token)]
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == 0 and "host0" in shown.output and " 12 " in shown.output
        assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["ranks"][0]["last"]["iteration"] == 12
    with pytest.raises(CheckpointError, match="cannot be reached"):
        raise CliRunner().invoke(app, words).exception


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ["stellatrain", "serve", "--token-file", str(tmp_path / "token"), "--port", str(port)]
        done = CliRunner().invoke(app, words)
    with pytest.raises(HostError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*free the port or name another"):
        raise done.exception


def test_no_server_for_what_is_no_address():
    with pytest.raises(ConfigError, match="not an address"):
        TelemetryClient("nowhere", TOKEN)


def test_deciding_takes_no_more_than_its_share_of_a_processor(monkeypatch):
    """By a clock that says that each decision took 50 ms, in a training of 10 iterations a second."""
    spent = itertools.count(0.0, 0.05)
    monkeypatch.setattr(telemetry_server.time, "thread_time", lambda: next(spent))
    chooser = Chooser(Choosing({"starts": 1}, every_iterations=1, most_share=0.005), join(0, 1))
    for iteration in range(1000):
        chooser.observe(measured(iteration, waited_s=0.2, sending_s=0.001 * (1 + iteration % 7)))
        chooser.consider(iteration * 0.1)
    assert 0.5 * 0.005 < chooser.cpu_s / 100.0 <= 0.005 * 1.2 and chooser.decisions == 10
