"""For the tests: jobs of several real processes, a proxy that can cut a connection, and free ports."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path

from lastgood.ports import free_ports

TIMEOUT_S = 150.0
"""For whatever must come: processes may be slow to start and to answer."""


class Server:
    """The process that forks ranks; `shim` is preloaded into it and its ranks."""

    def __init__(self, shim: Path) -> None:
        script = Path(__file__).with_name("rank_server.py")
        environment = {**os.environ, "LD_PRELOAD": str(shim)}
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 200)
        assert ready and self._process.stdout.readline() == "ready\n", "the server of ranks did not start in 200 s"

    def fork(self) -> RankProcess:
        # A socket's path is short.
        with tempfile.TemporaryDirectory(prefix="lastgood-test-") as folder:
            path = str(Path(folder, "s"))
            with Listener(path, "AF_UNIX") as listener:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps({"socket": path}) + "\n")
                self._process.stdin.flush()
                listener._listener._socket.settimeout(TIMEOUT_S)  # type: ignore[attr-defined]
                return RankProcess(listener.accept())

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Refused(Exception):
    """What a rank raised, as text that begins with the name of its class."""


class RankProcess:
    """One rank."""

    def __init__(self, told) -> None:
        self._told = told
        self.pid = self._receive("its process id")
        self.digests: dict[int, str] = {}

    def _receive(self, what: str, timeout_s: float = TIMEOUT_S):
        if not self._told.poll(timeout_s):
            raise AssertionError(f"waited {timeout_s} s for a rank: {what}")
        return self._told.recv()

    def begin(self, name: str, *arguments, **options) -> None:
        self._told.send((name, arguments, options))

    def result(self, name: str):
        done, value = self._receive(f"the answer to {name}")
        if not done:
            raise Refused(value)
        return value

    def __call__(self, name: str, *arguments, **options):
        self.begin(name, *arguments, **options)
        return self.result(name)

    def save(self, **options) -> int:
        step, digest, _ = self("save", **options)
        self.digests[step] = digest
        return step

    def kill(self) -> None:
        if self.pid:
            # Still ours: the connection is open as long as it lives.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, signal.SIGKILL)
            deadline = time.monotonic() + TIMEOUT_S
            with contextlib.suppress(EOFError, OSError):
                while time.monotonic() < deadline:  # until the kernel has closed what it held
                    if self._told.poll(0.1):
                        self._told.recv()
            self._told.close()
            self.pid = 0

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Job:
    """The ranks of one job, life after life."""

    def __init__(self, server: Server, directory: Path, world: int) -> None:
        self.server = server
        self.directory = directory
        self.world = world
        self.ranks: list[RankProcess] = []
        self.digests: list[dict[int, str]] = [{} for _ in range(world)]
        self.port = free_ports()[0]

    def fork(self) -> list[RankProcess]:
        self.ranks = [self.server.fork() for _ in range(self.world)]
        for rank, digests in zip(self.ranks, self.digests, strict=True):
            rank.digests = digests
        return self.ranks

    def options(self, rank: int, **knobs) -> dict:
        port = knobs.pop("ports", {}).get(rank, self.port)
        own = knobs.pop("of_rank", {}).get(rank, {})
        return {
            "world_size": self.world,
            "control": f"127.0.0.1:{port}",
            # Half of it without a word, and a rank counts as lost: what a busy machine may do to any process.
            "agreement_timeout_s": 60.0,
            "join_timeout_s": 60.0,
            **knobs,
            **own,
        }

    def start(self, **knobs) -> int:
        """Fork all ranks and attach them; all resume at one step, to the bit. Returns the step."""
        self.fork()
        for number, rank in enumerate(self.ranks):
            rank.begin("attach", str(self.directory), number, **self.options(number, **knobs))
        found = [rank.result("attach") for rank in self.ranks]
        steps = {step for step, _ in found}
        assert len(steps) == 1, f"the ranks resumed at different steps: {found}"
        (step,) = steps
        if step:
            for digests, (_, digest) in zip(self.digests, found, strict=True):
                assert digests[step] == digest, f"step {step} came back with another state"
        return int(step)

    def each(self, name: str, *arguments, **options) -> list:
        for rank in self.ranks:
            rank.begin(name, *arguments, **options)
        return [rank.result(name) for rank in self.ranks]

    def save(self) -> int:
        """All ranks train a step and save it."""
        with ThreadPoolExecutor(self.world) as pool:
            (step,) = set(pool.map(lambda rank: rank.save(), self.ranks))
        return int(step)

    def save_durably(self) -> int:
        step = self.save()
        self.each("wait_for_event", step, "durable")
        return step

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks = []


class Proxy:
    """Forwards connections to a port of loopback, until it is `cut`; after `heal` it goes on, with nothing lost."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._cut = False
        self._ended = False
        self._forwarding = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        with self._forwarding:  # what was being forwarded is through
            self._cut = True

    def heal(self) -> None:
        self._cut = False

    def _run(self) -> None:
        while not self._ended:
            if self._cut:
                time.sleep(0.02)
                continue
            readable, _, _ = select.select([self._listener, *self._pairs], [], [], 0.02)
            for end in readable:
                with self._forwarding:
                    if self._cut:
                        break
                    if end is self._listener:
                        self._connect()
                    elif end in self._pairs:
                        self._forward(end)
        for end in [self._listener, *self._pairs]:
            end.close()

    def _connect(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target), 5)
        except OSError:
            near.close()
            return
        self._pairs |= {near: far, far: near}

    def _forward(self, end: socket.socket) -> None:
        other = self._pairs[end]
        try:
            content = end.recv(65536)
            if content:
                other.sendall(content)
        except OSError:
            content = b""
        if not content:
            for one in (end, other):
                del self._pairs[one]
                one.close()

    def end(self) -> None:
        self._ended = True
        self._thread.join(60)
