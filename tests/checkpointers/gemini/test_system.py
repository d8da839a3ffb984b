"""Gemini with real peers: what their death, silence, damage and limits do, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.gemini.address_file import Address
from lastgood.checkpointers.gemini.partition import Network
from lastgood.checkpointers.gemini.peer_client import Outgoing, PeerLink, Peers, PeerSettings
from lastgood.checkpointers.gemini.system import Gemini, GeminiOptions
from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, NoCheckpoint
from lastgood.state import state_digest
from lastgood.wire.frames import Wire, chunk_checksum, prove_trainer
from tests.checkpointers.support.peer_processes import kill_peer, peers_below, peers_end_with_the_test, wait_for_no_peer
from tests.checkpointers.support.small_training import SmallTraining
from tests.support.patience import wait_until


@pytest.fixture(autouse=True)
def peers_end(tmp_path):
    torch.set_num_threads(1)
    with peers_end_with_the_test(tmp_path):
        yield


PATIENT = {"peer_timeout_s": 120.0}
"""Peers are processes, and may be slow to start and to answer."""


@contextmanager
def running(directory, training, **knobs):
    gemini = Gemini(directory, **PATIENT, **knobs)
    try:
        gemini.start(training.state)
        yield gemini
    finally:
        gemini.close()


def save(gemini, training):
    """A step, its save to the end, and the digest of what was saved."""
    training.step()
    digest = training.digest()
    gemini.save(training.step_number)
    gemini.drain()
    return digest


def restored(directory, **knobs):
    fresh = SmallTraining(seed=1)
    return Gemini(directory, **PATIENT, **knobs).restore(fresh.state), fresh.digest()


def test_no_training_begins_anew_beside_peers_that_do_not_answer(tmp_path):
    """One that has ended holds nothing any more; of one that is silent, that is not known."""
    model = torch.nn.Linear(3, 3)
    first = Gemini(tmp_path, interval_steps=1, **PATIENT)
    assert first.attach(model=model) == 0
    first.step()
    first.close()
    pid = the_peer(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CheckpointError, match=r"begin again beside what these peers may hold: .*peer-1-") as refused:
        Gemini(tmp_path, interval_steps=1, peer_timeout_s=0.3).attach(model=model)
    assert not isinstance(refused.value, NoCheckpoint)
    os.kill(pid, signal.SIGCONT)
    again = Gemini(tmp_path, interval_steps=1, **PATIENT)
    assert again.attach(model=model) == 1
    again.close()
    kill_peer(pid)
    anew = Gemini(tmp_path, interval_steps=1, **PATIENT)
    assert anew.attach(model=model) == 0
    anew.close()


def the_peer(directory):
    (pid,) = peers_below(directory)
    return pid


@pytest.fixture
def stops(monkeypatch):
    """Stops peers. Only they are waited for no longer than 0.5 s: others may need long to start and to answer."""
    stopped, made = set(), PeerLink.__init__

    def make(link, address, timeout_s):
        made(link, address, 0.5 if address.pid in stopped else timeout_s)

    @contextmanager
    def stop(pid, *links):
        stopped.add(pid)
        for link in links:
            link._wire.timeout_s = 0.5
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)
            stopped.discard(pid)

    monkeypatch.setattr(PeerLink, "__init__", make)
    return stop


def test_a_dead_peer_fails_one_save_and_is_replaced(tmp_path):
    training = SmallTraining()
    with running(tmp_path, training) as gemini:
        save(gemini, training)
        kill_peer(the_peer(tmp_path))
        save(gemini, training)
        assert gemini.events[-1].outcome is Outcome.FAILED
        assert str(tmp_path) in gemini.events[-1].error
        assert gemini.latest() is None, "what a peer held is gone with it"
        with pytest.raises(NoCheckpoint, match=r"what a peer held is gone.*cannot be reached"):
            restored(tmp_path)
        digest = save(gemini, training)
        assert gemini.events[-1].outcome is Outcome.DURABLE
    assert restored(tmp_path) == (3, digest)


def test_a_stuck_peer_fails_a_save_in_time_and_keeps_what_it_has_until_it_is_replaced(tmp_path, stops, caplog):
    training = SmallTraining()
    with running(tmp_path, training) as gemini:
        first = save(gemini, training)
        stuck = the_peer(tmp_path)
        with stops(stuck, *(link for link, _ in gemini._links.values())):
            save(gemini, training)
            assert gemini.events[-1].outcome is Outcome.FAILED
            assert "waited 0.5 s" in gemini.events[-1].error
            assert "older ones stay" in caplog.text
        assert restored(tmp_path) == (1, first)
        with stops(stuck):
            digest = save(gemini, training)
            assert gemini.events[-1].outcome is Outcome.DURABLE
            assert restored(tmp_path) == (3, digest)
        deadline = time.monotonic() + 60
        while stuck in peers_below(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert the_peer(tmp_path) != stuck, "the replaced peer must end"


def test_a_checkpoint_too_large_for_the_peer_is_refused_politely(tmp_path):
    training = SmallTraining()
    with running(tmp_path, training, peer_memory_bytes=10_000) as gemini:
        pid = the_peer(tmp_path)
        for _ in range(2):
            save(gemini, training)
        assert [event.outcome for event in gemini.events] == [Outcome.FAILED] * 2
        assert "does not fit into this peer's memory" in gemini.events[0].error
        assert "peer_memory_bytes" in gemini.events[0].error
        assert the_peer(tmp_path) == pid


def link_to(directory, **settings):
    values = {"host": "127.0.0.1", "limit_bytes": 0, "idle_s": 600.0, "timeout_s": 60.0, **settings}
    return Peers(directory, PeerSettings(**values)).reach_or_start(1)


def send(link, sequence, content, meta=b"meta", part_bytes=4096):
    checkpoint = Outgoing(0, sequence, sequence, memoryview(content), memoryview(meta), part_bytes, 3, 0.5)
    link.send(checkpoint, Traffic(1), Network(1e9, 1e-5), 10)


def read(link, held):
    target = bytearray(held.nbytes)
    link.read(0, held, memoryview(target))
    return bytes(target)


SIZES = {"owner": 0, "sequence": 3, "step": 3, "nbytes": 4096, "meta_bytes": 4, "part_bytes": 4096, "parts": 2}


def test_a_transfer_that_breaks_off_leaves_the_complete_one(tmp_path):
    first, second, third = (os.urandom(100_001) for _ in range(3))
    with link_to(tmp_path) as link:
        send(link, 1, first)
        send(link, 2, second)
    with link_to(tmp_path) as broken:
        broken.request("begin", **{**SIZES, "nbytes": 90_000})
        chunk = memoryview(os.urandom(4096))
        broken._wire.send_chunk(chunk, 0, chunk_checksum(chunk, 3, 0))
        # Neither its being under way nor its end without a commit may touch the newest.
        with link_to(tmp_path) as other:
            (held,) = other.held(0)
            assert (held.sequence, read(other, held)) == (2, second + b"meta")
    with link_to(tmp_path) as link:
        (held,) = link.held(0)
        assert read(link, held) == second + b"meta"
        send(link, 4, third)
        newest, older = link.held(0)
        assert (read(link, newest), read(link, older)) == (third + b"meta", second + b"meta")


def test_ranks_that_need_one_peer_at_once_start_it_once(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        links = list(pool.map(lambda _: link_to(tmp_path), range(3)))
    assert len({link.address.pid for link in links}) == len(peers_below(tmp_path)) == 1
    for link in links:
        link.close()


def test_a_second_trainer_of_one_machine_cuts_off_the_first(tmp_path):
    with link_to(tmp_path) as first, link_to(tmp_path) as second:
        first.request("begin", **SIZES)
        send(second, 4, b"content")
        with pytest.raises(CheckpointError, match=r"closed|broke"):
            first.request("commit")
        assert [held.sequence for held in second.held(0)] == [4]


def test_two_owners_have_areas_of_their_own_within_one_limit(tmp_path):
    with link_to(tmp_path, limit_bytes=300_000) as link:
        for sequence in (1, 2):
            send(link, sequence, bytes(100_000))
        checkpoint = Outgoing(5, 9, 9, memoryview(bytes(150_000)), memoryview(b"m"), 4096, 2, 0.5)
        with pytest.raises(CheckpointError, match="200008 of 300000 bytes are taken"):
            link.send(checkpoint, Traffic(1), Network(1e9, 0), 10)
        checkpoint = Outgoing(5, 9, 9, memoryview(bytes(90_000)), memoryview(b"m"), 4096, 2, 0.5)
        link.send(checkpoint, Traffic(1), Network(1e9, 0), 10)
        assert [held.sequence for held in link.held(0)] == [2, 1]
        assert [held.nbytes for held in link.held(5)] == [90_001]


def test_damage_on_the_way_is_found_by_the_peer(tmp_path):
    with link_to(tmp_path) as link:
        send(link, 1, b"a" * 5000)
        link.request("begin", **{**SIZES, "sequence": 2})
        data = memoryview(bytearray(4096))
        checksum = chunk_checksum(data, 2, 0)
        data[17] = 1
        link._wire.send_chunk(data, 0, checksum)
        with pytest.raises(CheckpointError, match=r"refused.*the chunk at byte 0 has checksum"):
            link._granted(link._wire.receive_message("a refusal"))
    with link_to(tmp_path) as link:
        assert [held.sequence for held in link.held(0)] == [1]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"operation": "begin", **SIZES, "owner": -1}, "owner must be"),
        ({"operation": "begin", **SIZES, "meta_bytes": 4097}, "make no checkpoint"),
        ({"operation": "begin", **SIZES, "part_bytes": 1 << 40}, "part_bytes must be"),
        ({"operation": "begin", **SIZES, "nbytes": 1 << 60}, "does not fit"),
        ({"operation": "read", "owner": 0, "sequence": 7}, "checkpoint 7 of machine 0 is not held"),
        ({"operation": "commit"}, "no checkpoint to complete"),
        ({"operation": "open the door"}, "knows no request"),
    ],
)
def test_bad_requests_are_refused_and_the_peer_goes_on(tmp_path, request_, why):
    with link_to(tmp_path) as link:
        with pytest.raises(CheckpointError, match=why):
            link.request(**request_)
        send(link, 1, b"content")
        assert [held.step for held in link.held(0)] == [1]


def test_a_commit_before_all_has_arrived_is_refused(tmp_path):
    with link_to(tmp_path) as link:
        link.request("begin", **{**SIZES, "sequence": 2})
        with pytest.raises(CheckpointError, match="0 of 4096 bytes have arrived"):
            link.request("commit")
        assert link.held(0) == []


def test_a_stranger_is_not_served(tmp_path):
    with link_to(tmp_path) as link:
        address = link.address
        false = Address(address.path, address.host, address.port, b"x" * 32, address.pid)
        with socket.create_connection((address.host, address.port), 60) as connection:
            wire = Wire(connection, "the peer", 60)
            with pytest.raises(CheckpointError, match="does not know this job's token"):
                prove_trainer(wire, false.token)
        assert link.held(0) == []


def overwrite_memory(pid, pattern):
    """Flip a bit where `pattern` stands in a process's memory, wherever it stands."""
    flipped = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            words = line.split()
            if not words[1].startswith("rw") or len(words) > 5:
                continue
            first, last = (int(end, 16) for end in words[0].split("-"))
            memory.seek(first)
            content = memory.read(last - first)
            found = content.find(pattern)
            while found >= 0:
                memory.seek(first + found)
                memory.write(bytes([pattern[0] ^ 0x40]))
                flipped += 1
                found = content.find(pattern, found + 1)
    return flipped


def test_damage_in_the_peer_s_memory_leads_to_the_checkpoint_before(tmp_path, caplog):
    training = SmallTraining()
    with running(tmp_path, training) as gemini:
        first = save(gemini, training)
        second = save(gemini, training)
        assert restored(tmp_path) == (2, second)
        weights = training.model[0].weight.detach().numpy().tobytes()[:64]
        try:
            assert overwrite_memory(the_peer(tmp_path), weights), "the peer must hold the newest weights"
        except PermissionError:
            pytest.skip("this kernel lets nobody write into another process's memory")
        assert restored(tmp_path) == (1, first)
        assert "is damaged" in caplog.text and "trying the checkpoint before it" in caplog.text
        # The damaged one is given up: what is sent next goes there, not over the one that is whole.
        with Peers(tmp_path, PeerSettings("127.0.0.1", 0, 600, 60)).reach_or_start(1) as link:
            link.request("begin", **{**SIZES, "sequence": 9})
        assert restored(tmp_path) == (1, first)


def test_a_declared_size_beyond_the_memory_of_this_machine_is_refused(tmp_path, monkeypatch):
    training = SmallTraining()
    with running(tmp_path, training) as gemini:
        save(gemini, training)
        monkeypatch.setattr("lastgood.checkpointers.gemini.system.available_memory_bytes", lambda: 1000)
        with pytest.raises(NoCheckpoint, match="this machine has 1000 to read it into"):
            restored(tmp_path)


def link_before_it_ends(directory, idle_s):
    """A link to a peer that does not wait long for one: if it was gone already, to the next."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return link_to(directory, idle_s=idle_s)
        except (CheckpointError, OSError):
            assert time.monotonic() < deadline, "waited 60 s for a peer to be reached in time"


def test_a_peer_ends_when_it_is_idle_asked_to_or_its_folder_is_gone(tmp_path):
    with link_before_it_ends(tmp_path / "idle", idle_s=0.5):
        time.sleep(1)
        assert peers_below(tmp_path / "idle"), "it is not idle while somebody is connected"
    assert not wait_for_no_peer(tmp_path / "idle")
    assert not list((tmp_path / "idle").glob("peer-*.json"))
    with link_to(tmp_path / "asked") as link:
        link.request("stop")
    assert not wait_for_no_peer(tmp_path / "asked")
    with link_to(tmp_path / "gone"):
        subprocess.run(["rm", "-r", str(tmp_path / "gone")], check=True)
        assert not wait_for_no_peer(tmp_path / "gone")


def test_a_peer_outlives_its_killed_trainer_and_holds_nothing_of_it(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from lastgood.checkpointers.gemini.peer_client import Outgoing, Peers, PeerSettings\n"
        "from lastgood.checkpointers.gemini.partition import Network\n"
        "from lastgood.checkpointers.gemini.traffic import Traffic\n"
        "from pathlib import Path\n"
        "link = Peers(Path(sys.argv[1]), PeerSettings('127.0.0.1', 0, 600.0, 60.0)).reach_or_start(1)\n"
        "one = Outgoing(0, 1, 1, memoryview(b'data'), memoryview(b'meta'), 4096, 2, 0.5)\n"
        "link.send(one, Traffic(1), Network(1e9, 0), 10)\n"
        "print(sorted(name for name in sys.modules if name in ('torch', 'numpy')), flush=True)\n"
        "os.killpg(0, signal.SIGKILL)\n"
    )
    # Its pipes must come to their end with it: communicate() would wait for a peer that kept them open.
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        input=b"",
        capture_output=True,
        timeout=150,
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = the_peer(tmp_path)
    open_files = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    kept = {
        name
        for name in open_files
        if not name.startswith(("/dev/null", "socket:", "anon_inode:[eventpoll]", str(tmp_path)))
    }
    assert not kept
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    with link_to(tmp_path) as link:
        (held,) = link.held(0)
        assert read(link, held) == b"datameta"


def test_a_peer_that_cannot_start_says_why(tmp_path):
    training = SmallTraining()
    gemini = Gemini(tmp_path, host="192.0.2.1")
    with pytest.raises(CheckpointError, match=r"at its start: .*assign requested address.*peer-1-000001\.log"):
        gemini.start(training.state)
    gemini.close()


def test_three_replicas_lie_at_two_peers_and_either_is_enough(tmp_path, stops):
    training = SmallTraining()
    knobs = {"machines": 5, "machine": 4, "replicas": 3}
    with running(tmp_path, training, **knobs) as gemini:
        assert gemini.storage_facts()["placement"][4] == [4, 0, 1]
        digest = save(gemini, training)
        assert gemini.events[0].outcome is Outcome.DURABLE
        assert sorted(gemini.storage_facts()["peers"]) == ["0", "1"]
        for machine in (0, 1):
            (path,) = tmp_path.glob(f"peer-{machine}-*.json")
            pid = Address.read(path).pid
            with stops(pid):
                assert restored(tmp_path, **knobs) == (1, digest)
        assert Gemini(tmp_path, machines=5, machine=3, replicas=3).latest() is None, "another machine's"


def test_the_facts_tell_of_gaps_and_of_communication_with_and_without_checkpoints(tmp_path):
    training = SmallTraining(width=900)
    with running(tmp_path, training, buffer_bytes=256 << 10, profile_steps=4) as gemini:

        def train_steps(count):
            for _ in range(count):
                for _ in range(2):
                    with gemini.traffic.busy():
                        time.sleep(0.002)
                    time.sleep(0.003)
                training.step()

        train_steps(6)
        gemini.save(training.step_number)
        train_steps(3)
        gemini.drain()
        facts = gemini.storage_facts()
    assert gemini.events[-1].outcome is Outcome.DURABLE
    assert facts["durability"] == "in a peer's memory; nothing on disk"
    assert len(facts["profiled_gaps_s"]) == 3
    assert 0 < facts["bytes_per_idle_gap"]["median"] <= facts["bytes_per_idle_gap"]["max"]
    assert facts["bytes_per_idle_gap"]["max"] <= gemini.events[-1].bytes_written
    communication = facts["communication_s"]
    assert communication["iterations_without"] == 4
    assert communication["without_checkpoint_traffic"] >= 0.004
    assert communication["with_checkpoint_traffic"] is None or communication["with_checkpoint_traffic"] >= 0.004
    assert facts["planned_iterations"] >= 1


def test_nothing_is_sent_while_training_communicates(tmp_path):
    training = SmallTraining()
    with running(tmp_path, training) as gemini:
        training.step()
        with gemini.traffic.busy():
            gemini.save(1)
            wait_until(lambda: gemini.events[0].copied_s is not None, "the copy", 60)
            time.sleep(0.3)
            assert gemini.events[0].outcome is Outcome.PENDING
        gemini.drain()
        assert gemini.events[0].outcome is Outcome.DURABLE


def test_an_exit_gives_up_what_waits_for_a_pause(tmp_path):
    training = SmallTraining()
    gemini = Gemini(tmp_path)
    gemini.exit_drain_s = lambda: 0.3
    gemini.start(training.state)
    training.step()
    gemini.traffic.begin()
    gemini.save(1)
    gemini.end()  # or it waits for a pause until the test's own time is over
    assert gemini.events[0].outcome is Outcome.FAILED


def test_a_state_without_tensors_and_one_that_grows(tmp_path):
    state = {"plain": {"step": 1, "name": "x"}}
    gemini = Gemini(tmp_path)
    gemini.start(state)
    gemini.save(1)
    gemini.drain()
    state["plain"]["more"] = torch.arange(700_000)
    gemini.save(2)
    gemini.drain()
    expected = state_digest(state)
    state["plain"]["more"] = torch.zeros(700_000, dtype=torch.int64)
    assert gemini.restore(state) == 2
    assert state_digest(state) == expected
    gemini.close()


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"machine": 2}, "none of 2 machines"),
        ({"replicas": 3}, "3 replicas need"),
        ({"buffer_bytes": 1 << 30, "buffer_parts": 1}, "at most"),
        ({"gamma": 1.0}, "gamma"),
    ],
)
def test_knobs_that_cannot_be_are_refused(tmp_path, knobs, why):
    with pytest.raises(ConfigError, match=why):
        Gemini(tmp_path, **knobs)


def test_what_it_costs():
    options = GeminiOptions(machines=3, replicas=3, buffer_bytes=1 << 20)
    assert options.disk_bytes(1000) == 0
    assert options.host_bytes(10**9) == 5 * 10**9 + (2 << 20)


def test_a_corrupt_answer_is_no_checkpoint(tmp_path):
    with link_to(tmp_path) as link, pytest.raises(CorruptCheckpoint, match="described no checkpoint"):
        link._described({"sequence": 1, "step": 2, "nbytes": 3, "meta_bytes": 4})
