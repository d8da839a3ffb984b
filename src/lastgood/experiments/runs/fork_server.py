"""A process that has torch and the models' libraries imported, and forks each run of a workflow: seconds less a run.

The workflow starts one (`ForkServer`) and names its socket in its environment; each `lastgood run` of a training in one
process asks it for a fork that does the run, hands over its own input, output and folder, and ends as that ends. The
server computes nothing, starts no thread and never touches CUDA, so that each fork begins as a process that has only
imported. It imports a model's library when a run asks for it. It ends with the workflow. A run is killed if the process
that asked for it is; an interrupt is passed on. If there is no server, or none that answers, `lastgood run` imports for
itself.

The server says that it heard a request (before it imports), then the number of the fork, then its exit status. One who
has left before the first of these gets no fork, so that what gave up waiting may do the run itself.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.errors import LastgoodError
from lastgood.experiments.runs.children import import_before_fork
from lastgood.processes import die_with_parent, wait_or_kill
from lastgood.text import parse_json

__all__ = ["ADDRESS", "ForkServer", "run_in_fork", "start_fork_server"]

ADDRESS = "LASTGOOD_FORK_SERVER"
"""The environment variable that names a server's socket."""
_MOST_BYTES = 192 << 10
"""Of a request: the command line and the environment. The kernel refuses a little more."""
_ANSWER_S = 5.0
"""Both sides are on this machine, and what is asked fits into one message."""
_HEARD_S = 120.0
"""Until a request is heard: an import for another run may be in progress."""
_BEGIN_S = 900.0
"""Until its fork is there: the import of a model's library, on a busy machine."""
_HEARD = b"heard"
_ELSEWHERE = b"elsewhere"
"""Nothing was begun: whoever asked does the run itself."""
_MOST_PATH_BYTES = 100
"""Of a socket's path. The kernel refuses a little more."""
_RUNS_IMPORT = ("lastgood.experiments.runs.measure", "lastgood.experiments.records.kinds", "lastgood.cli.run")
"""The command itself as well, which a fork runs like any other process: by its name, with its own arguments."""
_END_S = 20.0
"""For a run to tidy up after an interrupt."""
_INTERRUPT = b"interrupt"
"""What one who asked for a run and still waits for it sends, so that it tidies up."""


class ForkServer:
    """A server that lasts as long as this process, or until `close`. For the environment of others: `address`.

    Raises OSError if there is no room for its socket, or for a process.
    """

    def __init__(self) -> None:
        self._folder = _new_folder()
        self.address = str(self._folder / "forks")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(self.address)
                listener.listen()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(listener.fileno()), str(self._folder)],
                    stdin=subprocess.PIPE,  # its end tells the server that this process has ended
                    pass_fds=[listener.fileno()],
                    start_new_session=True,  # an interrupt at the terminal reaches it through those that it works for
                )
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def close(self) -> None:
        """End it, and all runs in it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        wait_or_kill(self._process, 2 * _END_S, _END_S)
        shutil.rmtree(self._folder, ignore_errors=True)  # if it was killed, and could not


def _new_folder() -> Path:
    """A folder that only this user may enter. A socket's path must be short, which TMPDIR may not be."""
    folder = Path(tempfile.mkdtemp(prefix="lastgood-"))
    if len(os.fsencode(folder)) > _MOST_PATH_BYTES - len("/forks"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="lastgood-", dir="/tmp"))
    return folder


def start_fork_server(report: Callable[[str], None]) -> ForkServer | None:
    """A server; None, and a reason in `report`, if there can be none here: each run imports for itself then."""
    try:
        return ForkServer()
    except OSError as error:
        report(f"no process that forks runs, so each imports torch for itself: {error}")
        return None


def run_in_fork(address: str, workload: str, command: list[str]) -> int | None:
    """Let the server at `address` do `lastgood COMMAND...`, and return its exit status when it has ended.

    None if no server answers there, or one of another installation, or one that cannot fork: nothing was begun then.
    Raises LastgoodError if the server ended in between, or does not answer any more. After an interrupt it waits until
    the run has tidied up.
    """
    request = {
        "workload": workload,
        "command": command,
        "folder": str(Path.cwd()),
        "environment": {name: value for name, value in os.environ.items() if name != ADDRESS},
        "installation": _installation(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.settimeout(_ANSWER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            asked.connect(address)
            socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
            asked.settimeout(_HEARD_S)
            if asked.recv(64) != _HEARD:
                return None
        except (OSError, UnicodeEncodeError):
            return None
        try:
            answer = _await_end(asked)
        except KeyboardInterrupt:
            asked.settimeout(2 * _END_S)
            with contextlib.suppress(OSError):
                asked.send(_INTERRUPT)
                asked.recv(64)
            raise
    if not answer:
        raise LastgoodError("the process that forks this workflow's runs has ended, and this run with it; begin again")
    return None if answer == _ELSEWHERE else int(answer)


def _await_end(asked: socket.socket) -> bytes:
    """The server's last answer; nothing if it has ended. Raises LastgoodError if it is there and says nothing."""
    try:
        asked.settimeout(_BEGIN_S)
        begun = asked.recv(64)
        if not begun or begun == _ELSEWHERE:
            return begun
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the answer is there
            ended = os.pidfd_open(int(begun))
            try:
                waiting = select.poll()
                waiting.register(asked, select.POLLIN)
                waiting.register(ended, select.POLLIN)
                waiting.poll()  # for as long as the run takes
            finally:
                os.close(ended)
        asked.settimeout(_END_S)
        return asked.recv(64)
    except ConnectionError:
        return b""
    except TimeoutError:
        raise LastgoodError(
            "the process that forks this workflow's runs does not answer (is it stopped?); end it, and begin again"
        ) from None


def _installation() -> list[str]:
    """What must be the same on both sides."""
    return [sys.version, sys.prefix, __file__]


@dataclass
class _Run:
    pid: int
    ended: int
    """A file descriptor of the process (pidfd)."""
    asked: socket.socket
    kill_at: float | None = None
    """When to kill it, if it has been interrupted."""


class _Server:
    """The server's loop: `serve` returns a request in each fork, and None in the server at its end."""

    def __init__(self, listener: socket.socket, lifeline: int) -> None:
        self._listener, self._lifeline = listener, lifeline
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)
        self._runs: list[_Run] = []
        self._closing = False

    def serve(self) -> dict[str, Any] | None:
        while self._runs or not self._closing:
            for key, _ in self._selector.select(0.5 if self._closing or self._any_interrupted() else None):
                if isinstance(key.data, _Run) and key.data not in self._runs:
                    continue  # it has ended with what was seen at the same time
                if key.fileobj is self._listener:
                    if self._closing:
                        continue
                    request = self._take()
                    if request is not None:
                        return request
                elif key.fileobj == self._lifeline:
                    self._close()
                elif key.fileobj == key.data.ended:
                    self._end(key.data)
                else:
                    self._heard(key.data)
            for run in self._runs:
                if run.kill_at is not None and time.monotonic() >= run.kill_at:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(run.ended, signal.SIGKILL)
        return None

    def _take(self) -> dict[str, Any] | None:
        """Answer one connection: the request in a fork, None in the server."""
        descriptors: list[int] = []
        connection: socket.socket | None = None
        try:
            connection, _ = self._listener.accept()
            connection.settimeout(_ANSWER_S)
            user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            content, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
            request: dict[str, Any] = parse_json(content, "a request for a run", most_bytes=_MOST_BYTES)
            if user != os.geteuid() or len(descriptors) != 3 or request["installation"] != _installation():
                connection.send(_ELSEWHERE)
                connection.close()
                return None
            connection.send(_HEARD)  # fails if whoever asked has given up
            _import(request["workload"])
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent(server)
                    self._leave(descriptors, connection)
                except BaseException:
                    os._exit(1)  # a second server it must not become
                return request
            self._watch(pid, connection)
        except (OSError, LastgoodError, KeyError, TypeError) as error:  # that one is not served
            _complain(error)
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.send(_ELSEWHERE)
                connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return None

    def _watch(self, pid: int, connection: socket.socket) -> None:
        """Note a fork, and tell who asked for it. Raises OSError, and there is no fork then."""
        ended = -1
        try:
            ended = os.pidfd_open(pid)
            connection.send(str(pid).encode())
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if ended >= 0:
                os.close(ended)
            raise
        run = _Run(pid, ended, connection)
        self._runs.append(run)
        for one in (run.ended, connection):
            self._selector.register(one, selectors.EVENT_READ, run)

    def _leave(self, descriptors: list[int], connection: socket.socket) -> None:
        """In a fork: nothing of the server's stays open, and the standard streams are those that came."""
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
        for run in self._runs:
            os.close(run.ended)
            run.asked.close()
        self._selector.close()
        self._listener.close()
        connection.close()
        os.setsid()

    def _any_interrupted(self) -> bool:
        return any(run.kill_at is not None for run in self._runs)

    def _heard(self, run: _Run) -> None:
        """The process that asked for it interrupts it, or has ended: then it is killed, as it were without a server."""
        try:
            interrupted = run.asked.recv(len(_INTERRUPT)) == _INTERRUPT
        except OSError:
            interrupted = False
        # An interrupt can get lost, as in a library that catches all; a run of nobody would go on and write its record.
        self._interrupt(run, signal.SIGINT if interrupted else signal.SIGKILL)

    def _interrupt(self, run: _Run, how: signal.Signals = signal.SIGINT) -> None:
        if run.kill_at is None:
            run.kill_at = time.monotonic() + _END_S
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(run.ended, how)
            self._selector.unregister(run.asked)

    def _end(self, run: _Run) -> None:
        _, status = os.waitpid(run.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._selector.unregister(run.ended)
        if run.kill_at is None:
            self._selector.unregister(run.asked)
        with contextlib.suppress(OSError):
            run.asked.send(str(code if code >= 0 else 128 - code).encode())
        run.asked.close()
        os.close(run.ended)
        self._runs.remove(run)

    def _close(self) -> None:
        self._closing = True
        for one in (self._lifeline, self._listener):
            self._selector.unregister(one)
        for run in self._runs:
            self._interrupt(run)


def _complain(error: Exception) -> None:
    with contextlib.suppress(OSError):  # nobody may be there any more to read it
        sys.stderr.write(f"fork server: {error!r}\n")
        sys.stderr.flush()


def _import(workload: str) -> None:
    """What a run of `workload` imports first. What fails here fails in the run as well, which says it to its user."""
    with contextlib.suppress(Exception):
        for name in _RUNS_IMPORT:
            importlib.import_module(name)
        import_before_fork(workload)


def main() -> None:
    """Serve until stdin ends. Arguments: the descriptor of the listening socket, and its folder."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    folder = sys.argv[2]
    lifeline = os.dup(0)
    os.set_inheritable(lifeline, False)
    request = _Server(listener, lifeline).serve()
    if request is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    os.close(lifeline)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["lastgood", *request["command"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        runpy.run_module("lastgood", run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    # Without taking apart all that the server imported: that takes a second, and copies the shared pages.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
