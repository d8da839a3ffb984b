"""Jobs whose ranks run on nodes of a testbed, one on each: tests/checkpointers/agreement over a real network."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shlex
import signal
import socket
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from lastgood.cluster.testbed.testbed import Testbed
from tests.checkpointers.support.job_of_ranks import TIMEOUT_S, Job, RankProcess

_SCRIPT = Path(__file__).with_name("rank_node.py")
_START_S = 120.0
_PORTS = itertools.count(29700)


class RankOnNode(RankProcess):
    """A rank; `pid` is its number on this machine, not the one inside its node."""

    def __init__(self, told: Any) -> None:
        super().__init__(told)
        with socket.socket(fileno=socket.dup(told.fileno())) as own:
            content = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, _, _ = struct.unpack("3i", content)
        # With its node it may end at any time, and its number be another process's then.
        self._handle = os.pidfd_open(self.pid)

    def kill(self) -> None:
        if not self.pid:
            return
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)
        ended, _, _ = select.select([self._handle], [], [], TIMEOUT_S)
        assert ended, f"waited {TIMEOUT_S} s for a killed rank to end"
        os.close(self._handle)
        self._told.close()
        self.pid = 0


class NodeServer:
    """The process on a node that forks ranks there. It outlives a cut link: nothing of it goes over the network."""

    def __init__(self, bed: Testbed, node: str, shim: Path) -> None:
        self._node = node
        self._connection: socket.socket | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="lastgood-test-")
        path = str(Path(self._folder.name, "s"))
        self._log = Path(self._folder.name, "log")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(1)
        command = ["env", f"LD_PRELOAD={shim}", sys.executable, str(_SCRIPT), path]
        # Not by `Remote.start`, which would end it when its link is cut.
        background = f"setsid {shlex.join(command)} < /dev/null > {shlex.quote(str(self._log))} 2>&1 &"
        done = bed.remote().run(node, ["sh", "-c", background], 100)
        assert done.rc == 0, done.stderr

    def _ready(self) -> socket.socket:
        """Its connection, once it can fork: it has torch to import first."""
        if self._connection is None:
            self._listener.settimeout(_START_S)
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(_START_S)
                assert connection.recv(6) == b"ready\n"
            except (TimeoutError, AssertionError):
                raise AssertionError(f"{self._node}: no server of ranks: {self._log.read_text()}") from None
            self._connection = connection
        return self._connection

    def fork(self) -> RankOnNode:
        connection = self._ready()
        path = str(Path(self._folder.name, f"r{time.monotonic_ns()}"))
        with Listener(path, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(TIMEOUT_S)  # type: ignore[attr-defined]
            connection.sendall(json.dumps({"socket": path}).encode() + b"\n")
            return RankOnNode(listener.accept())

    @property
    def lives(self) -> bool:
        """Whether it is there: it says nothing more, so that what can be read is its end."""
        if self._connection is None:
            return True
        ready, _, _ = select.select([self._connection], [], [], 0)
        return not ready

    def end(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        self._folder.cleanup()


class Nodes:
    """The servers on a testbed's nodes, started when they are needed first, and again after their node was lost."""

    def __init__(self, bed: Testbed, shim: Path) -> None:
        self.bed = bed
        self._shim = shim
        self._servers: dict[str, NodeServer] = {}

    def fork(self, names: list[str]) -> list[RankOnNode]:
        """A rank on each of these nodes."""
        for node in names:
            server = self._servers.get(node)
            if server is None or not server.lives:
                if server is not None:
                    server.end()
                self._servers[node] = NodeServer(self.bed, node, self._shim)
        return [self._servers[node].fork() for node in names]

    def end(self) -> None:
        for server in self._servers.values():
            server.end()


class JobOnNodes(Job):
    """Rank N - 1 is on node vmN. Rank 0 listens on vm1's own address."""

    ranks: list[RankOnNode]  # type: ignore[assignment]

    def __init__(self, nodes: Nodes, directory: Path, world: int = 2) -> None:
        super().__init__(None, directory, world)  # type: ignore[arg-type]
        self.nodes = nodes
        self.bed = nodes.bed
        self.port = next(_PORTS)
        self.control = f"{self.bed.address('vm1')}:{self.port}"

    def fork(self) -> list[RankProcess]:
        self.ranks = self.nodes.fork([f"vm{rank + 1}" for rank in range(self.world)])
        for process, digests in zip(self.ranks, self.digests, strict=True):
            process.digests = digests
        return list(self.ranks)

    def options(self, rank: int, **knobs: Any) -> dict[str, Any]:
        return {**super().options(rank, **knobs), "control": self.control}

    def attach(self, **knobs: Any) -> None:
        """Fork all ranks and let them begin; `result("attach")` of each says how that went."""
        self.fork()
        for number, rank in enumerate(self.ranks):
            rank.begin("attach", str(self.directory), number, **self.options(number, **knobs))

    def lose(self, rank: int) -> None:
        """Kill the node of a rank."""
        self.bed.kill(f"vm{rank + 1}")
        self.ranks[rank].kill()
