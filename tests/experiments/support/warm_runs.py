"""`lastgood` commands in processes that begin with torch imported, which takes longer than all else that they do.

A server of multiprocessing's imports it once, computes nothing, and forks for each command. What must be shown of a
process that begins with nothing (`python -m`, its memory, when it imports) needs a real one: subprocess.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

_PRELOADED = ["torch", "torch._dynamo", "lastgood.workloads.vision", "lastgood.experiments.runs.measure"]


class WarmRun:
    """As subprocess.Popen of ``lastgood *arguments`` (or of a Python script), both outputs in one pipe, as text."""

    def __init__(self, arguments: Sequence[str], script: Path | None = None, file_bytes: int | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        before = os.environ.get("OPENBLAS_NUM_THREADS")
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as `lastgood run` does before it imports: a fork would lose threads
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ["OPENBLAS_NUM_THREADS"]
            else:
                os.environ["OPENBLAS_NUM_THREADS"] = before
        reading, writing = context.Pipe(duplex=False)
        given = (writing, list(map(str, arguments)), script, dict(os.environ), file_bytes)
        self._process = context.Process(target=_command, args=given)
        self._process.start()
        writing.close()
        self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        reading.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 240) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"{self.pid} has not ended within {timeout} s"
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All that is still to be read, and None; a process that takes longer is killed, and fails the test."""
        late = threading.Timer(timeout, self._process.kill)
        late.start()
        try:
            with self.stdout:
                text = self.stdout.read()
            self._process.join(200)
            assert late.is_alive(), f"killed after {timeout} s: {text}"
        finally:
            late.cancel()
        return text, None


def _command(
    output: Connection, arguments: list[str], script: Path | None, environment: dict[str, str], file_bytes: int | None
) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    sys.stdin.close()
    os.environ.clear()
    os.environ.update(environment)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if script is not None:
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        from lastgood.cli import main

        sys.argv = ["lastgood", *arguments]
        main()
