"""Gemini over the network: each node has its peer, a node is lost with its memory, and comes back from the other's."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastgood.checkpointers.gemini.peer_client import Peers, PeerSettings
from lastgood.cluster.ssh.remote import RemoteProcess
from lastgood.cluster.testbed.testbed import Testbed
from tests.checkpointers.support.peer_processes import peers_below, peers_end_with_the_test
from tests.support.patience import wait_until

pytestmark = pytest.mark.root
SCRIPT = str(Path(__file__).parent / "support" / "gemini_node.py")
WIDTH = 128
PORTS = itertools.count(29820)


@pytest.fixture(autouse=True)
def peers_end(tmp_path: Path) -> Iterator[None]:
    with peers_end_with_the_test(tmp_path):
        yield


class NodeRank:
    """A rank on a node, by ssh, and what it has said."""

    def __init__(self, bed: Testbed, rank: int, port: int, directory: Path, width: int, steps: int) -> None:
        self.rank = rank
        self.errors = directory.parent / f"rank-{rank}-{port}.err"
        command = [
            sys.executable,
            SCRIPT,
            str(rank),
            bed.address("vm1"),
            str(port),
            str(directory),
            str(width),
            str(steps),
        ]
        with self.errors.open("wb") as errors:
            self.process: RemoteProcess = bed.remote().start(
                f"vm{rank + 1}", command, stdout=subprocess.PIPE, stderr=errors, grace_s=0
            )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.digests: dict[int, str] = {}
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.decode(errors="replace").split()
            if words[0] == "saved":
                self.digests[int(words[1])] = words[2]
            self.lines.put(" ".join(words))
        self.lines.put("")

    def wait_for(self, start: str, seconds: float = 200.0) -> list[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            assert line, f"rank {self.rank} ended before it said {start!r}: {self.errors.read_text()[-2000:]}"
            if line.startswith(start):
                return line.split()
        raise AssertionError(f"waited {seconds:g} s for rank {self.rank} to say {start!r}")

    def end(self) -> None:
        self.process.kill()
        self.process._process.wait(20)
        self.reader.join(20)
        self.process.close()


Start = Callable[..., list[NodeRank]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[NodeRank] = []

    def two(bed: Testbed, width: int = WIDTH, steps: int = 0, shared: bool = False) -> list[NodeRank]:
        port = next(PORTS)
        # Unless `shared`, no file is common to both: what a rank knows of the other's peer, that rank has told it.
        both = []
        for rank in range(2):
            directory = tmp_path / f"disk-of-vm{1 if shared else rank + 1}" / "job"
            directory.mkdir(parents=True, exist_ok=True)
            both.append(NodeRank(bed, rank, port, directory, width, steps))
        made.extend(both)
        return both

    yield two
    for rank in made:
        rank.end()


def copies(directory: Path, owner: int) -> dict[int, set[str]]:
    """For each step of a machine's the hosts whose memory has it."""
    held, _ = Peers(directory, PeerSettings("127.0.0.1", 0, 60.0, 5.0)).holding(owner, [0, 1])
    found: dict[int, set[str]] = {}
    for one in held:
        found.setdefault(one.step, set()).add(one.address.host)
    return found


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["disks", "shared disk"])
def test_a_lost_node_comes_back_from_the_other_s_memory(
    bed: Testbed, start: Start, tmp_path: Path, shared: bool
) -> None:
    disks = [tmp_path / f"disk-of-vm{number}" for number in (1, 2)]
    first = start(bed, shared=shared)
    for rank in first:
        assert rank.wait_for("resumed")[1] == "0"
    durable = 0
    for _ in range(2):
        durable = min(int(rank.wait_for("durable")[1]) for rank in first)
    tokens = [json.loads(path.read_text())["token"] for path in tmp_path.rglob("peer-*.json")]
    assert len(tokens) == (2 if shared else 4), "each rank knows both peers"
    assert not [line for line in command_lines() for token in tokens if token in line], "others can read these"
    bed.kill("vm2")
    for rank in first:
        rank.end()
    wait_for(lambda: training_processes() == [], "the end of rank 0")
    # The launch of the job ends what it has started, but for the peer; a lost node loses disk and memory.
    assert len(peers_below(disks[0])) == 1
    assert peers_below(disks[1]) == []
    if not shared:
        shutil.rmtree(disks[1])
    bed.restart("vm2")
    second = start(bed, steps=9, shared=shared)
    told = [rank.wait_for("resumed") for rank in second]
    step = int(told[0][1])
    assert step >= durable
    for rank, (_, found, digest, count) in enumerate(told):
        assert (int(found), digest) == (step, first[rank].digests[step]), f"rank {rank} is back to the bit"
        assert count == "2", "a lost copy is made again before training goes on"
    new = step + 8
    for rank in second:
        assert int(rank.wait_for("durable")[1]) == new
        rank.wait_for("facts")
    everywhere = {bed.address("vm1"), bed.address("vm2")}
    for owner in range(2):
        found = copies(disks[0] / "job", owner)
        assert found[new] == found[step] == everywhere, found
        # The dead life may have got further; nothing of that is left.
        assert set(found) == {new, step}, found


def command_lines() -> list[str]:
    """Of all processes, their words with NUL between them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(entry.read_bytes().decode(errors="replace"))
    return found


def training_processes() -> list[str]:
    return [line for line in command_lines() if line.startswith(f"{sys.executable}\0{SCRIPT}\0")]


def wait_for(true: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    wait_until(true, what, seconds, every_s=0.05)


@pytest.mark.slow
def test_a_peer_that_is_out_of_reach_fails_saves_and_is_named(bed: Testbed, start: Start, tmp_path: Path) -> None:
    """Rank 1's peer is ended beside a training that goes on: nobody else starts it."""
    ranks = start(bed)
    for rank in ranks:
        rank.wait_for("durable")
    (pid,) = peers_below(tmp_path / "disk-of-vm2")
    os.kill(pid, 9)
    for rank in ranks:
        words = " ".join(rank.wait_for("failed"))
        assert "peer-1-" in words and bed.address("vm2") in words, words
    for rank in ranks:
        rank.wait_for("saved")
    # Rank 1 brings its own back; until it has told the others where, their copy fails.
    assert "machine 1: " in " ".join(ranks[0].wait_for("failed"))
    for rank in ranks:
        rank.end()
    again = start(bed, steps=9)
    told = [rank.wait_for("resumed") for rank in again]
    step = int(told[0][1])
    assert step > 0
    for rank, words in enumerate(told):
        assert words[1:3] == [str(step), ranks[rank].digests[step]]
    for rank in again:
        rank.wait_for("durable")


@pytest.mark.slow
def test_a_step_that_one_machine_lacks_counts_for_none(bed: Testbed, start: Start, tmp_path: Path) -> None:
    first = start(bed, steps=17)
    for rank in first:
        rank.wait_for("facts")
    # As if rank 1's save of step 16 had not come to its end.
    directory = tmp_path / "disk-of-vm1" / "job"
    peers = Peers(directory, PeerSettings("127.0.0.1", 0, 60.0, 5.0))
    for machine in range(2):
        with peers.reach(machine) as link:
            newest, older = link.held(1)
            assert (newest.step, older.step) == (16, 8)
            link.request("forget", owner=1, after=older.sequence)
    assert [set(copies(directory, owner)) for owner in range(2)] == [{16, 8}, {8}]
    second = start(bed, steps=9)
    for rank in range(2):
        assert second[rank].wait_for("resumed") == ["resumed", "8", first[rank].digests[8], "2"]
    for rank in second:
        rank.wait_for("facts")
    everywhere = {bed.address("vm1"), bed.address("vm2")}
    # Step 16 is the new life's, and step 8 was not overwritten for it.
    for owner in range(2):
        assert copies(directory, owner) == {16: everywhere, 8: everywhere}
    third = start(bed, steps=1)
    for rank in range(2):
        assert third[rank].wait_for("resumed") == ["resumed", "16", second[rank].digests[16], "2"]


@pytest.mark.slow
def test_gaps_of_a_slow_link_are_used_and_recorded(needs_testbed: None, start: Start) -> None:
    bits_per_s = 1e9
    with Testbed.up(2, name=f"g{os.getpid()}", rate="1gbit", guarded=True) as bed:
        ranks = start(bed, width=768, steps=72)
        for rank in ranks:
            facts = json.loads(" ".join(rank.wait_for("facts", 200)).removeprefix("facts "))
            assert facts["placement"] == [[0, 1], [1, 0]]
            way = facts["peers"][str(1 - rank.rank)]["bytes_per_s"]
            assert way < 1.4 * bits_per_s / 8, "copies go over the link (whose bucket lets short probes be faster)"
            gaps, times = facts["bytes_per_idle_gap"], facts["communication_s"]
            assert gaps["gaps"] > 1 and 0 < gaps["median"] <= gaps["max"]
            assert times["iterations_without"] > 0 and times["iterations_with"] > 0
            assert times["without_checkpoint_traffic"] > 0 and times["with_checkpoint_traffic"] > 0
            print(f"rank {rank.rank}: {gaps}, {times}, {way:.3g} B/s")
