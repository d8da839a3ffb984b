"""Python programs in processes that begin with torch imported, which takes longer than most of what they do.

A server of multiprocessing's imports it once, computes nothing, starts no thread, and forks for each program. What must
be shown of a process that begins with nothing, or of its end (`atexit`, its memory, when it imports), needs a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, reduction
from typing import IO, Any

from lastgood.processes import die_with_parent

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Read at the import, so they are the server's for all."""


class WarmProcess:
    """As subprocess.Popen of `python *words`, with the part of its interface that tests use. It ends with its server.

    The first one of this process starts the server, and says by its `preloaded` what that imports.

    Args:
        words: a script and its arguments, or "-c", a program and its arguments.
        stdin: PIPE, or None for nothing to read.
        stdout, stderr: PIPE, STDOUT (stderr only), or an open file.
        env: its environment, this process's by default.
    """

    preloaded = ("torch", "torch._dynamo")  # the first step of an optimizer imports the latter

    def __init__(
        self,
        words: Sequence[object],
        stdin: int | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.STDOUT,
        env: dict[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self.preloaded))
        before = {name: os.environ.get(name) for name in _ONE_THREAD}
        os.environ.update(_ONE_THREAD)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs: list[int] = []
        self.stdin = self.stdout = self.stderr = None
        if stdin == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs.append(reading)
            self.stdin = os.fdopen(writing, "w", encoding="utf-8")
        else:
            theirs.append(os.open(os.devnull, os.O_RDONLY))
        for name, given in (("stdout", stdout), ("stderr", stderr)):
            if given == subprocess.PIPE:
                reading, writing = os.pipe()
                theirs.append(writing)
                setattr(self, name, os.fdopen(reading, encoding="utf-8"))
            elif given == subprocess.STDOUT:
                theirs.append(os.dup(theirs[1]))
            else:
                assert not isinstance(given, int)
                theirs.append(os.dup(given.fileno()))
        self._process = context.Process(
            target=_program, args=(_Descriptors(theirs), list(map(str, words)), dict(env or os.environ))
        )
        self._process.start()
        for descriptor in theirs:
            os.close(descriptor)

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
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 240) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = 240) -> tuple[str, None]:
        """All that is still to be read of stdout; a process that takes longer is killed, and fails the test."""
        assert self.stdout is not None
        late = threading.Timer(timeout, self._process.kill)
        late.start()
        try:
            with self.stdout:
                text = self.stdout.read()
            self.wait()
            assert late.is_alive(), f"killed after {timeout} s: {text}"
        finally:
            late.cancel()
        return text, None


class _Descriptors:
    """File descriptors that reach the process with its arguments."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def __reduce__(self) -> tuple[object, tuple[list[object]]]:
        return _received, ([reduction.DupFd(number) for number in self.numbers],)


def _received(sent: list[Any]) -> list[int]:
    return [one.detach() for one in sent]


def _program(descriptors: list[int], words: list[str], environment: dict[str, str]) -> None:
    die_with_parent()
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    for descriptor in descriptors:
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - until its end
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))  # noqa: PTH120
        runpy.run_path(words[0], run_name="__main__")
