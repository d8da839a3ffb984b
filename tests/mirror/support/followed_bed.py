"""Ranks of a DDP training on a testbed, and a mirror node that sees what `mirror setup` copies of rank 0's port.

Rank r is vm(r + 1), the node is the one after the last rank; nothing but its mirrored frames reaches it. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cluster.testbed.net import namespace_of, run_program
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import write_job
from lastgood.mirror.node.status import NodeStatus, read_status
from tests.mirror.support.simulated_life import make_training
from tests.support.patience import PATIENCE, wait_until

__all__ = ["STEPS", "FollowedBed", "followed_bed"]

ROOT = Path(__file__).resolve().parents[3]
STEPS = 40
SAME_BUCKETS = {"bucket_cap_mb": 0.001, "find_unused_parameters": True}
"""Sums of three depend on their order, which depends on the place in a bucket; and DDP rebuilds its buckets after the
first step of each life, but for these. Two ranks' sums are the same in any order."""


def ddp_of(ranks: int) -> dict[str, Any]:
    return SAME_BUCKETS if ranks > 2 else {"bucket_cap_mb": 0.001}


class FollowedBed:
    """Made by `followed_bed`."""

    def __init__(self, bed: Testbed, folder: Path, kind: str, hook: str = "") -> None:
        self.bed, self.folder, self.kind, self.hook = bed, folder, kind, hook
        self.ranks = len(bed.node_names) - 1
        self.watcher = bed.node_names[-1]
        self.running: list[subprocess.Popen[bytes]] = []
        self.node: subprocess.Popen[bytes] | None = None
        self._starts = 0
        training = make_training(kind, hook)
        training.ddp = {**training.ddp, **ddp_of(self.ranks)}
        write_job(describe(training, ranks=self.ranks, steps=400), folder / "job.json")
        self.run("setup", "--testbed", bed.name, "--watch", "vm1", "--to", self.watcher)
        self.run("check", "--testbed", bed.name, "--interface", "mir0", "--count", "20")

    def run(self, *words: str) -> None:
        """A command of ``lastgood mirror``, which must end well."""
        done = CliRunner().invoke(app, ["mirror", *words])
        assert done.exit_code == 0, f"{words}: {done.output} {done.exception!r}"

    # -- the node --

    @property
    def flowcheck(self) -> dict[str, Any]:
        """What a restored training is given."""
        return {
            "nodes": [f"{self.bed.address(self.watcher)}:7300"],
            "token_file": str(self.folder / "node" / "token"),
        }

    def command(self, *words: str) -> list[str]:
        """``lastgood mirror`` in the watcher's network."""
        inside = ["ip", "netns", "exec", namespace_of(self.bed.name, self.watcher), sys.executable]
        return [*inside, "-m", "lastgood", "mirror", *words]

    def start_node(self, *more: str) -> None:
        words = ["run", "--job", str(self.folder / "job.json"), "--interface", "mir0"]
        words += ["--watch", self.bed.address("vm1"), "--dir", str(self.folder / "node")]
        words += ["--listen", f"{self.bed.address(self.watcher)}:7300", *more]
        with (self.folder / "node.log").open("ab") as log:
            self.node = subprocess.Popen(self.command(*words), cwd=ROOT, stdout=log, stderr=log)
        self.wait_node(lambda status: status.pid == getattr(self.node, "pid", None), "the node")

    def kill_node(self) -> None:
        assert self.node is not None
        self.node.kill()
        self.node.wait(30)

    def status(self) -> NodeStatus:
        return read_status(self.folder / "node")

    def wait_node(self, good: Callable[[NodeStatus], bool], what: str, seconds: float = 60.0) -> None:
        path = self.folder / "node" / "status.json"

        def words() -> str:
            status = self.status() if path.exists() else None
            return f"{what}: {status}; {(self.folder / 'node.log').read_text()[-3000:]}"

        wait_until(lambda: path.exists() and good(self.status()), words, seconds)

    @contextlib.contextmanager
    def mirror_down(self) -> Iterator[None]:
        """The link to the node is down: copies are lost, the training notices nothing."""
        space = namespace_of(self.bed.name, "br")
        link = f"mon-{self.watcher}-0"
        run_program("ip", "-n", space, "link", "set", link, "down")
        try:
            yield
        finally:
            run_program("ip", "-n", space, "link", "set", link, "up")

    # -- the training --

    def train(self, out: Path, *, steps: int = STEPS, **options: Any) -> None:
        """Start all ranks."""
        out.mkdir(exist_ok=True)
        self._starts += 1
        given = json.dumps({"kind": self.kind, "hook": self.hook, "ddp": ddp_of(self.ranks), **options})
        for rank, node in enumerate(self.bed.node_names[:-1]):
            variables = {
                "MASTER_ADDR": self.bed.address("vm1"),
                "MASTER_PORT": str(29517 + self._starts),
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", namespace_of(self.bed.name, node), sys.executable]
            command += ["-m", "tests.mirror.support.followed_rank", str(out), str(steps), given]
            with (self.folder / f"rank-{rank}.log").open("ab") as log:
                environment = {**os.environ, **variables}
                self.running.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))

    def wait(self) -> None:
        for one in self.running:
            assert one.wait(120 * PATIENCE) == 0, (self.folder / "rank-0.log").read_text()[-3000:]
        self.running = []

    def wait_steps(self, out: Path, count: int) -> None:
        """Until so many steps were made in all lives."""

        def words() -> str:
            return f"{count} steps in {out.name}: {(self.folder / 'rank-0.log').read_text()[-3000:]}"

        wait_until(lambda: len(losses(out)) >= count, words, 120)

    def kill(self) -> None:
        for one in self.running:
            one.kill()
        for one in self.running:
            one.wait(30)
        self.running = []

    def close(self) -> None:
        self.kill()
        if self.node is not None:
            self.node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.node.wait(60)
            self.node.kill()
            self.node.wait(30)


def losses(folder: Path) -> list[tuple[int, str]]:
    """Steps and losses of all lives, in order."""
    path = folder / "losses.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), loss) for step, loss in map(str.split, lines)]


@contextlib.contextmanager
def followed_bed(ranks: int, folder: Path, kind: str, hook: str = "") -> Iterator[FollowedBed]:
    """A testbed of so many ranks and a watcher, mirrored, and gone at the end."""
    with (
        Testbed.up(ranks + 1, name=f"f{os.getpid()}", guarded=True) as bed,
        contextlib.closing(FollowedBed(bed, folder, kind, hook)) as made,
    ):
        yield made
