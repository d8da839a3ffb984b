"""Runs as forks of one process: what they give, how they end, and who is not served."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from lastgood.errors import LastgoodError
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.runs import fork_server
from lastgood.experiments.runs.fork_server import ADDRESS, ForkServer, run_in_fork, start_fork_server
from lastgood.workloads.data.prepare import prepare_dataset
from tests.experiments.support.run_specs import COMMAND, spec_of
from tests.support.patience import wait_until


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare_dataset("images", folder)
    return folder


@pytest.fixture(scope="module")
def server():
    server = ForkServer()
    yield server
    server.close()
    assert not Path(server.address).exists()


def arguments(spec, folder, data_dir):
    found = ["--spec", spec.canonical_json(), "--out", str(folder / "r0.json")]
    return [*found, "--data-dir", str(data_dir), "--scratch", str(folder / "scratch")]


def start(server, spec, folder, data_dir, *more):
    return subprocess.Popen(
        [*COMMAND, *arguments(spec, folder, data_dir), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, ADDRESS: server.address},
    )


def forks(server):
    return psutil.Process(server._process.pid).children()


def waits_for_the_machine(server, process):
    """That its fork does, so that nothing more of it happens."""

    def waiting():
        assert process.poll() is None, process.communicate()[0]
        return len(forks(server)) == 1

    wait_until(waiting, "the fork of a run", 120)
    fork = forks(server)[0]
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert "turn to measure" in lines[1], lines
    return fork


def test_runs_are_forks_and_give_records_with_proofs(server, tmp_path, data_dir):
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = start(server, spec_of(), folder, data_dir, "--end-with", str(os.getpid()))
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        assert output.splitlines()[0].startswith("lastgood run --spec '{")
        assert "--end-with" not in output
        record = RunRecord.load(folder / "r0.json")
        assert record.proof.equal
        assert list((folder / "scratch").iterdir()) == []
    assert forks(server) == []
    assert psutil.Process(server._process.pid).num_threads() == 1


def test_a_failing_run_fails_alone_and_with_its_message(server, tmp_path, data_dir):
    bad = arguments(spec_of(), tmp_path, tmp_path / "no data")
    process = subprocess.run(
        [*COMMAND, *bad], capture_output=True, text=True, timeout=240, env={**os.environ, ADDRESS: server.address}
    )
    assert process.returncode == 1
    assert "lastgood data prepare" in process.stderr
    assert server._process.poll() is None


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_who_asked_for_it(how, server, tmp_path, data_dir):
    lock = machine_lock()
    lock.acquire(240)
    try:
        process = start(server, spec_of(), tmp_path, data_dir)
        fork = waits_for_the_machine(server, process)
        process.send_signal(how)
        assert process.wait(60) in (-how, 130, 1)
        fork.wait(60)
    finally:
        process.kill()
        process.stdout.close()
        lock.release()
    assert not (tmp_path / "r0.json").exists()


def test_a_run_that_no_interrupt_reaches_is_killed_with_who_asked_for_it(server, tmp_path, data_dir):
    lock = machine_lock()
    lock.acquire(240)
    try:
        process = start(server, spec_of(), tmp_path, data_dir)
        fork = waits_for_the_machine(server, process)
        fork.suspend()  # as one that imports a library that catches the interrupt
        process.kill()
        fork.wait(fork_server._END_S - 5)
    finally:
        process.kill()
        process.stdout.close()
        lock.release()


@pytest.mark.slow
def test_runs_end_with_the_server(tmp_path, data_dir):
    server = ForkServer()
    lock = machine_lock()
    lock.acquire(240)
    try:
        process = start(server, spec_of(), tmp_path, data_dir)
        fork = waits_for_the_machine(server, process)
        server._process.kill()
        output, _ = process.communicate(timeout=60)
        fork.wait(60)
    finally:
        lock.release()
        server.close()
    assert process.returncode == 1
    assert not Path(server.address).parent.exists()
    assert "has ended, and this run with it" in output


def test_the_server_ends_with_who_started_it():
    program = "import time; from lastgood.experiments.runs.fork_server import ForkServer; s = ForkServer()\n"
    program += "print(s._process.pid, s.address, flush=True); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid, address = starter.stdout.readline().split()
    server = psutil.Process(int(pid))
    starter.kill()
    starter.wait(60)
    starter.stdout.close()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server's end", 60)
    wait_until(lambda: not Path(address).parent.exists(), "the end of its folder", 60)


def test_without_a_server_nothing_is_begun(tmp_path):
    assert run_in_fork(str(tmp_path / "nobody"), "vgg16", ["plan", "fig8"]) is None
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(left))
        killed.listen()
    assert left.exists()
    assert run_in_fork(str(left), "vgg16", ["plan", "fig8"]) is None


def test_a_server_that_is_stopped_holds_no_run_up_and_begins_none_later(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "_HEARD_S", 0.5)
    process = psutil.Process(server._process.pid)
    process.suspend()
    try:
        assert run_in_fork(server.address, "vgg16", ["run"]) is None
    finally:
        process.resume()
    monkeypatch.setattr(fork_server, "_HEARD_S", 120)
    # It hears one after the other: the next one's answer says that the first one is over.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.settimeout(60)
        asked.connect(server.address)
        socket.send_fds(asked, [b"{}"], [0, 1, 2])
        assert asked.recv(64) == b"elsewhere"
    assert forks(server) == []


def test_a_server_that_says_nothing_when_a_run_has_ended_is_named(monkeypatch):
    monkeypatch.setattr(fork_server, "_END_S", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork = subprocess.Popen(["sleep", "0.1"])
    with ours, theirs:
        theirs.send(str(fork.pid).encode())
        with pytest.raises(LastgoodError, match="does not answer"):
            fork_server._await_end(ours)
        fork.wait(60)
        theirs.send(str(fork.pid).encode())  # it was reaped before who asked looked
        theirs.send(b"3")
        assert fork_server._await_end(ours) == b"3"
        monkeypatch.setattr(fork_server, "_BEGIN_S", 0.2)
        with pytest.raises(LastgoodError, match="does not answer"):
            fork_server._await_end(ours)


def test_a_run_that_ends_with_who_asked_for_it_does_not_end_the_server(server, tmp_path, data_dir):
    """Both in one moment, as by a killer that looks for memory: the server sees them together."""
    lock = machine_lock()
    lock.acquire(240)
    parent = psutil.Process(server._process.pid)
    try:
        process = start(server, spec_of(), tmp_path, data_dir)
        fork = waits_for_the_machine(server, process)
        parent.suspend()
        fork.kill()
        process.kill()
        process.wait(60)
        parent.resume()
        wait_until(lambda: forks(server) == [], "the end of the fork", 60)
    finally:
        parent.resume()
        process.kill()
        process.stdout.close()
        lock.release()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.settimeout(60)
        asked.connect(server.address)
        socket.send_fds(asked, [b"{}"], [0, 1, 2])
        assert asked.recv(64) == b"elsewhere"
    assert server._process.poll() is None


def test_a_server_whose_terminal_is_gone_goes_on(tmp_path):
    program = """
import os, socket
from lastgood.experiments.runs.fork_server import ForkServer
ours, theirs = os.pipe()
os.dup2(theirs, 2)
os.close(theirs)
os.close(ours)
server = ForkServer()
for _ in range(2):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.settimeout(60)
        asked.connect(server.address)
        socket.send_fds(asked, [b"{"], [0, 1, 1])
        print(asked.recv(64), flush=True)
print(server._process.poll(), flush=True)
server.close()
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=240)
    assert done.stdout.splitlines() == ["b'elsewhere'", "b'elsewhere'", "None"]


def test_a_long_folder_for_temporary_files_and_a_full_one(tmp_path, monkeypatch):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = ForkServer()
    try:
        assert len(server.address) < 108 and not list(long.iterdir())
    finally:
        server.close()
    assert not Path(server.address).parent.exists()

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    said = []
    assert start_fork_server(said.append) is None
    assert "each imports torch for itself: [Errno 28] No space left" in said[0]


@pytest.mark.parametrize("what", ["bind", "Popen"])
def test_no_room_for_a_socket_or_a_process_leaves_no_folder(what, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if what == "bind":
        monkeypatch.setattr(fork_server.socket.socket, "bind", full)
    else:
        monkeypatch.setattr(fork_server.subprocess, "Popen", full)
    said = []
    assert start_fork_server(said.append) is None
    assert len(said) == 1 and "temporarily unavailable" in said[0]
    assert not list(tmp_path.iterdir())


def test_a_server_that_cannot_fork_says_so_and_stays(tmp_path, monkeypatch):
    """As at a limit of processes: whoever asked does the run itself."""
    monkeypatch.setattr(fork_server, "_import", lambda workload: None)

    def none_left():
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(fork_server.os, "fork", none_left)
    lifeline, ours = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "forks"))
        listener.listen()
        serving = threading.Thread(target=fork_server._Server(listener, lifeline).serve, daemon=True)
        serving.start()
        try:
            for _ in range(2):
                assert run_in_fork(str(tmp_path / "forks"), "vgg16", ["run"]) is None
        finally:
            os.close(ours)
            serving.join(60)
            os.close(lifeline)
        assert not serving.is_alive()


def test_strangers_are_not_served_and_do_not_end_it(server):
    for content in (b"", b"{", b"[" * 100_000, b'{"workload": 3}', json.dumps({"installation": ["other"]}).encode()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
            asked.settimeout(60)
            asked.connect(server.address)
            if content:
                socket.send_fds(asked, [content], [0, 1, 2])
            else:
                asked.shutdown(socket.SHUT_WR)
            assert asked.recv(64) in (b"", b"elsewhere")
    assert forks(server) == []


@pytest.mark.slow
def test_a_plan_is_made_run_by_run_without_those_that_are_there(tmp_path, data_dir):
    specs = [spec_of(), spec_of("sync"), spec_of("none", interval=0, measured_steps=3)]
    runs = [
        {"spec": json.loads(spec.canonical_json()), "record": f"results/{n}/r0.json"} for n, spec in enumerate(specs)
    ]
    runs[1]["spec"]["workload_options"]["classifier_width"] = 0  # cannot be built
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"runs": runs}))
    command = [*COMMAND, "--plan", str(plan), "--data-dir", str(data_dir), "--scratch", str(tmp_path / "scratch")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1 of 3 runs failed" in done.stderr + done.stdout
    assert RunRecord.load(tmp_path / "results/0/r0.json").proof.equal
    assert RunRecord.load(tmp_path / "results/2/r0.json").spec == specs[2]
    again = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert "1 of 1 runs failed" in again.stderr + again.stdout
