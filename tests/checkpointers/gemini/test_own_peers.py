"""What a machine with a peer of its own does. Two of them, and a network: tests/multinode/test_gemini_on_nodes.py."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch

from lastgood.checkpointers.gemini.address_file import Address, address_for_peers
from lastgood.checkpointers.gemini.partition import Network
from lastgood.checkpointers.gemini.peer_client import Outgoing, Peers, PeerSettings
from lastgood.checkpointers.gemini.system import Gemini, GeminiOptions
from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.errors import CheckpointError, ConfigError, NoCheckpoint
from tests.checkpointers.support.peer_processes import kill_peer, peers_below, peers_end_with_the_test
from tests.checkpointers.support.small_training import SmallTraining


@pytest.fixture(autouse=True)
def peers_end(tmp_path):
    with peers_end_with_the_test(tmp_path):
        yield


def peers_of(directory, machine):
    return Peers(directory, PeerSettings("127.0.0.1", 0, 600.0, 60.0, starts=machine))


def send(link, sequence):
    checkpoint = Outgoing(0, sequence, sequence, memoryview(os.urandom(5000)), memoryview(b"meta"), 4096, 3, 0.5)
    link.send(checkpoint, Traffic(1), Network(1e9, 1e-5), 10)


def test_what_some_ranks_do_not_have_is_forgotten_and_what_all_have_is_not_overwritten(tmp_path):
    with peers_of(tmp_path, 1).reach_or_start(1) as link:
        for sequence in (5, 6):
            send(link, sequence)
        link.request("forget", owner=0, after=6)
        assert [held.sequence for held in link.held(0)] == [6, 5]
        # Without this the next one would take the place of 5.
        link.request("forget", owner=0, after=5)
        assert [held.sequence for held in link.held(0)] == [5]
        send(link, 7)
        assert [held.sequence for held in link.held(0)] == [7, 5]
        with pytest.raises(CheckpointError, match="after must be"):
            link.request("forget", owner=0, after=-1)


def test_machines_learn_of_each_other_s_peers_and_start_only_their_own(tmp_path):
    here, there = peers_of(tmp_path / "0", 0), peers_of(tmp_path / "1", 1)
    with pytest.raises(CheckpointError, match="machine 1 has told of no peer"):
        here.reach_or_start(1)
    assert peers_below(tmp_path) == []
    with there.reach_or_start(1) as link:
        here.learn(1, there.own(1))
        with here.reach_or_start(1) as known:
            assert known.address.pid == link.address.pid
    (pid,) = peers_below(tmp_path)
    kill_peer(pid)
    with pytest.raises(CheckpointError, match=r"(?s)machine 1: .*when all ranks begin again"):
        here.reach_or_start(1)
    assert peers_below(tmp_path) == []


def test_who_only_looks_starts_nothing(tmp_path):
    anyone = Peers(tmp_path, PeerSettings("127.0.0.1", 0, 60.0, 2.0))
    with pytest.raises(CheckpointError, match="machine 1 has told of no peer"):
        anyone.reach(1)
    Address(Address.path_of(tmp_path, 1, 1), "127.0.0.1", 1, b"t" * 32, 17).note()
    with pytest.raises(CheckpointError, match="cannot be reached"):
        anyone.reach(1)
    assert peers_below(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["peer-1-000001.json"]


def test_a_machine_that_lost_its_disk_is_not_taken_for_its_peers_of_before(tmp_path):
    """It counts its peers from 1 again, and here is one of an earlier life with a higher number."""
    here, there = peers_of(tmp_path / "0", 0), peers_of(tmp_path / "1", 1)
    (tmp_path / "0").mkdir()
    for machine, serial in ((1, 1), (1, 3), (2, 3)):
        Address(Address.path_of(tmp_path / "0", machine, serial), "127.0.0.1", 1, b"t" * 32, 17).note()
    with there.reach_or_start(1) as link:
        here.learn(1, there.own(1))
        assert [path.name for path in here.addresses(1)] == ["peer-1-000001.json"]
        assert len(here.addresses(2)) == 1, "of that machine nothing was told"
        with here.reach_or_start(1) as known:
            assert known.address.pid == link.address.pid


def test_an_address_that_is_known_is_not_written_again(tmp_path):
    address = Address(Address.path_of(tmp_path, 1, 1), "192.0.2.1", 4711, b"t" * 32, 17)
    address.note()
    before = address.path.stat()
    assert before.st_mode & 0o777 == 0o600
    address.note()
    assert address.path.stat().st_ino == before.st_ino, "its peer would take another file for another peer's, and end"
    # A machine with a new disk counts its peers from 1 again.
    dataclasses.replace(address, port=4712).note()
    assert Address.read(address.path).port == 4712
    assert [path.name for path in tmp_path.iterdir()] == [address.path.name]


def test_own_peers_need_ranks(tmp_path):
    gemini = Gemini(tmp_path, peers="own")
    with pytest.raises(ConfigError, match=r"needs torch.distributed"):
        gemini.start(SmallTraining().state)


def test_loopback_stands_for_the_way_to_the_first_rank(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert address_for_peers("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert address_for_peers("127.0.0.1") == "127.0.0.1"
    assert address_for_peers("192.0.2.7") == "192.0.2.7"
    monkeypatch.setenv("MASTER_ADDR", "not a name")
    with pytest.raises(ConfigError, match="MASTER_ADDR=not a name"):
        address_for_peers("127.0.0.1")


def test_records_of_before_keep_their_names():
    assert "peers" not in GeminiOptions().model_dump()
    assert GeminiOptions(peers="own").model_dump()["peers"] == "own"
    assert GeminiOptions.model_validate(GeminiOptions(peers="own").model_dump()).peers == "own"


class Ranks:
    """In place of `RankExchange`: this rank, and another one that holds what this one holds, or nothing."""

    lost = False

    def __init__(self, system, machine, machines, timeout_s):
        pass

    def tell(self, mine):
        checkpoints = isinstance(mine, list) and mine and isinstance(mine[0], tuple)
        return [mine, []] if checkpoints and Ranks.lost else [mine]


def attached(directory, saves=0, timeout_s=60.0):
    model = torch.nn.Linear(3, 3)
    options = GeminiOptions(peers="own", buffer_bytes=1 << 20, peer_timeout_s=timeout_s)
    gemini = Gemini(directory, options.model_copy(update={"machines": 1, "replicas": 1}), interval_steps=1)
    try:
        first = gemini.attach(model=model)
        for _ in range(saves):
            gemini.step()
            gemini.drain()
        return first
    finally:
        gemini.close()


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr("lastgood.checkpointers.gemini.system.RankExchange", Ranks)
    monkeypatch.setattr(Ranks, "lost", False)
    return Ranks


def test_ranks_do_not_begin_anew_beside_a_peer_that_does_not_answer(tmp_path, ranks):
    assert attached(tmp_path, saves=1) == 0
    (pid,) = peers_below(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CheckpointError, match=r"begin again beside what these peers may hold: .*peer-0-") as refused:
        attached(tmp_path, timeout_s=0.5)
    assert not isinstance(refused.value, NoCheckpoint)
    os.kill(pid, signal.SIGCONT)
    assert attached(tmp_path) == 1


def test_ranks_begin_anew_beside_a_step_of_some_only_if_none_was_ever_complete(tmp_path, ranks, monkeypatch, caplog):
    assert attached(tmp_path, saves=1) == 0
    monkeypatch.setattr(Ranks, "lost", True)
    assert attached(tmp_path, saves=2) == 0
    assert "no complete checkpoint that all machines have" in caplog.text
    with pytest.raises(CheckpointError, match=r"peers may hold: .*\(steps \[2, 1\]\)"):
        attached(tmp_path)
    monkeypatch.setattr(Ranks, "lost", False)
    assert attached(tmp_path) == 2


def test_ranks_whose_peers_have_ended_are_told_that_they_begin_anew(tmp_path, ranks, caplog):
    assert attached(tmp_path, saves=2) == 0
    (pid,) = peers_below(tmp_path)
    kill_peer(pid)
    assert attached(tmp_path) == 0
    assert "what a peer held is gone with it" in caplog.text
