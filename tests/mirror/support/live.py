"""A real DDP training over Gloo in network namespaces, with rank 0's port captured both ways, and the truth beside it.

Needs root. ``python -m tests.mirror.support.live OUT --ranks 3 --steps 4`` leaves OUT/capture.pcap, OUT/truth.npz and
OUT/ddp.json; `training.make` is the model. tests/mirror/samples/make.py keeps two such captures for tests without root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 240.0 * PATIENCE


def can_run() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"lgcan{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


class Network:
    """A namespace for each rank, and one with a bridge between them; port N of the bridge leads to rank N."""

    def __init__(self, ranks: int) -> None:
        self._stack = ExitStack()
        self.switch = self._space("switch")
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        self.spaces = []
        for rank in range(ranks):
            space = self._space(str(rank))
            self.spaces.append(space)
            peer = ("peer", "name", f"port{rank}", "netns", self.switch)
            _ip("-n", space, "link", "add", "eth0", "type", "veth", *peer)
            _ip("-n", space, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
            _ip("-n", self.switch, "link", "set", f"port{rank}", "master", "br0", "up")

    def _space(self, what: str) -> str:
        name = f"lgm{os.getpid()}-{what}"
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        return name

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


def train(
    out: Path,
    ranks: int,
    steps: int,
    options: dict[str, Any] | None = None,
    *,
    watched: int = 0,
    environment: dict[str, str] | None = None,
    program: str = "tests.mirror.support.live_rank",
) -> None:
    """Run a training (or another `program`) and capture the port of rank `watched`."""
    out.mkdir(parents=True, exist_ok=True)
    with Network(ranks) as network, ExitStack() as stack:
        command = ["ip", "netns", "exec", network.switch, sys.executable, "-m", "tests.mirror.support.capture_port"]
        capture = subprocess.Popen(
            [*command, f"port{watched}", str(out / "capture.pcap")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        stack.callback(capture.wait)
        stack.callback(capture.kill)
        assert capture.stdout is not None and capture.stdout.readline() == "ready\n"
        running = []
        for rank, space in enumerate(network.spaces):
            variables = {
                "MASTER_ADDR": address(0),
                "MASTER_PORT": "29517",
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", space, sys.executable, "-m", program]
            one = subprocess.Popen(
                [*command, str(out), str(steps), json.dumps(options or {})],
                env={**os.environ, **variables, **(environment or {})},
                cwd=ROOT,
            )
            stack.callback(one.wait)
            stack.callback(one.kill)
            running.append(one)
        codes = [one.wait(timeout=TIMEOUT_S) for one in running]
        assert codes == [0] * ranks, f"the ranks ended with {codes}"
        said, _ = capture.communicate(timeout=30)
        frames, dropped = map(int, said.split())
        assert frames > 0 and dropped == 0, f"{frames} frames, {dropped} dropped"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--options", type=json.loads, default={})
    given = parser.parse_args()
    train(given.out, given.ranks, given.steps, given.options)
