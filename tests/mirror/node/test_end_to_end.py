"""An unmodified DDP training is followed from mirrored frames, killed at random, and goes on: with the same losses.

Real ranks over Gloo in network namespaces; the node is a process of its own that sees what passes at rank 0's port.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time

import pytest

from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import write_job
from tests.mirror.support.live import ROOT, Network, address, can_run
from tests.mirror.support.simulated_life import make_training
from tests.support.patience import PATIENCE, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_run(), reason="needs root, for network namespaces"),
]
STEPS = 40
NODE = "10.77.0.250"
SAME_BUCKETS = {"bucket_cap_mb": 0.001, "find_unused_parameters": True}
"""Sums of three depend on their order, which depends on the place in a bucket; and DDP rebuilds its buckets after the
first step of each life, but for these. Two ranks' sums are the same in any order."""


def ddp_of(ranks):
    return SAME_BUCKETS if ranks > 2 else {"bucket_cap_mb": 0.001}


class Bed:
    """Ranks, and a mirror node at the port of rank 0."""

    def __init__(self, network, folder, ranks, kind, hook):
        self.network, self.folder, self.ranks = network, folder, ranks
        self.kind, self.hook = kind, hook
        self.running = []
        self.node = None
        switch = ["ip", "-n", network.switch]
        subprocess.run([*switch, "addr", "add", f"{NODE}/24", "dev", "br0"], check=True)
        training = make_training(kind, hook)
        training.ddp = {**training.ddp, **ddp_of(ranks)}
        write_job(describe(training, ranks=ranks, steps=200), folder / "job.json")

    def start_node(self):
        words = ["mirror", "run", "--job", str(self.folder / "job.json"), "--interface", "port0"]
        words += ["--watch", address(0), "--dir", str(self.folder / "node"), "--listen", f"{NODE}:7300"]
        command = [
            "ip",
            "netns",
            "exec",
            self.network.switch,
            sys.executable,
            "-c",
            "from lastgood.cli import main; main()",
        ]
        with (self.folder / "node.log").open("ab") as log:
            self.node = subprocess.Popen([*command, *words], cwd=ROOT, stdout=log, stderr=log)
        wait_until(lambda: (self.folder / "node" / "status.json").exists(), "the node", 60 * PATIENCE)

    def train(self, out, **options):
        """Start all ranks."""
        out.mkdir(exist_ok=True)
        for rank, space in enumerate(self.network.spaces):
            variables = {
                "MASTER_ADDR": address(0),
                "MASTER_PORT": "29517",
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", space, sys.executable, "-m", "tests.mirror.support.followed_rank"]
            given = json.dumps({"kind": self.kind, "hook": self.hook, "ddp": ddp_of(self.ranks), **options})
            with (self.folder / f"rank-{rank}.log").open("ab") as log:
                self.running.append(
                    subprocess.Popen(
                        [*command, str(out), str(STEPS), given],
                        env={**os.environ, **variables},
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                    )
                )

    def wait(self):
        for one in self.running:
            assert one.wait(120 * PATIENCE) == 0, (self.folder / "rank-0.log").read_text()[-3000:]
        self.running = []

    def kill(self):
        for one in self.running:
            one.kill()
        for one in self.running:
            one.wait(30)
        self.running = []

    def close(self):
        self.kill()
        if self.node is not None:
            self.node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.node.wait(60)
            self.node.kill()
            self.node.wait(30)


def losses(folder):
    path = folder / "losses.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), loss) for step, loss in map(str.split, lines)]


CASES = [(2, "norm", ""), (2, "adamw", "bf16"), (3, "norm", "bf16"), (3, "adamw", "")]


@pytest.mark.parametrize(("ranks", "kind", "hook"), CASES)
def test_a_training_goes_on_from_what_its_packets_told(ranks, kind, hook, tmp_path):
    chance = random.Random(f"{ranks} {kind} {hook}")
    with Network(ranks) as network, contextlib.closing(Bed(network, tmp_path, ranks, kind, hook)) as bed:
        bed.train(tmp_path / "plain")
        bed.wait()
        truth = dict(losses(tmp_path / "plain"))
        bed.start_node()
        flowcheck = {"nodes": [f"{NODE}:7300"], "token_file": str(tmp_path / "node" / "token")}
        kept = tmp_path / "kept"
        begun = []
        for _ in range(2):
            before = len(losses(kept))
            bed.train(kept, flowcheck=flowcheck, pause_s=0.02)
            wait_until(lambda before=before: len(losses(kept)) > before + 4, "some steps", 120 * PATIENCE)
            time.sleep(chance.uniform(0.0, 0.15))
            bed.kill()
            begun.append(losses(kept)[before][0])
        bed.train(kept, flowcheck=flowcheck)
        before = len(losses(kept))
        bed.wait()
        begun.append(losses(kept)[before][0])
        made = losses(kept)
        assert begun[0] == 1 and begun[1] > 3 and begun[2] > begun[1] + 2, f"lives began at steps {begun}"
        assert [one for one in made if truth[one[0]] != one[1]] == []
        assert {step for step, _ in made} == set(range(1, STEPS + 1))
        status = json.loads((tmp_path / "node" / "status.json").read_text())
        assert status["stands"] == "follows", status["blind"]
