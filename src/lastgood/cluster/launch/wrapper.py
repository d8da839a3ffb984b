"""Around each rank's program: its log, its environment, its lifeline to the launch. ``python -m`` this, with a ticket.

It starts the program when all ranks have reported, sends its output to the rank's own log, and says how it ended. It
ends the program and all that the program started when the launch says so, or is gone, or when the launcher on this host
(torchrun, our own shell, DeepSpeed's, Open MPI's, Slurm's) ends: no rank outlives its job. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from lastgood.cluster.launch.lifelines import notice_loss
from lastgood.cluster.launch.order import (
    MAX_MESSAGE_BYTES,
    MAX_TICKET_BYTES,
    TICKET_FILE,
    How,
    Ticket,
    is_nonce,
    launch_proof,
    rank_log,
)
from lastgood.errors import LastgoodError, LaunchError, StorageError
from lastgood.files import open_log, open_regular, read_bounded, read_end
from lastgood.ports import free_ports
from lastgood.processes import die_with_parent
from lastgood.text import is_whole, parse_json
from lastgood.wire.gate import connect

__all__ = ["find_place", "main", "route_interface"]

_CONNECT_S: Final = 5.0
_TICKET_S: Final = 60.0
_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 20
_PLACES: Final[Mapping[How, tuple[str, str, str]]] = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "ssh": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "deepspeed": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}
_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def find_place(how: How, env: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, rank on this host, and number of ranks, from what the launcher has set. Raises LaunchError without them."""
    try:
        rank, local, world = (int(env[name]) for name in _PLACES[how])
    except (KeyError, ValueError) as error:
        raise LaunchError(f"{how} has not set {', '.join(_PLACES[how])} for this rank: {error}") from error
    return rank, local, world


def route_interface(address: str) -> str:
    """The network interface whose address this host's kernel chooses to talk to `address`, an IP address.

    On the host that has `address` itself, the interface that holds it. Raises LaunchError if there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Connecting a datagram socket sends nothing; it asks the kernel for the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = probe.getsockname()[0].partition("%")[0]
    except OSError as error:
        raise LaunchError(f"this host has no route to the first rank at {address}: {error.strerror}") from error
    for name, held in psutil.net_if_addrs().items():
        if any(one.family == family and one.address.partition("%")[0] == own for one in held):
            return name
    if own.startswith("127."):
        return "lo"
    raise LaunchError(f"no interface of this host has the address {own}, from which it reaches {address}")


class _Lifeline:
    """The connection to the launch. Lost is lost: there is no second one, since the launch would have given us up."""

    def __init__(self, ticket: Ticket, deadline: float, hello: dict[str, Any]) -> None:
        self._buffer = bytearray()
        self._ticket = ticket
        self._hello = hello
        self.socket = self._connect(deadline)
        self.socket.setblocking(False)

    def _connect(self, deadline: float) -> socket.socket:
        refused = []
        for address in self._ticket.addresses:
            try:
                connection = connect(address, self._ticket.port, _CONNECT_S)
            except OSError as error:
                refused.append(f"{address}: {error}")
                continue
            try:
                notice_loss(connection)
                self._prove(connection, address)
                return connection
            except (LaunchError, OSError) as error:
                refused.append(f"{address}: {error}")
            connection.close()
            if time.monotonic() > deadline:
                break
        tried = "; ".join(refused)
        raise LaunchError(
            f"{socket.gethostname()} does not reach the launch at port {self._ticket.port} ({tried}); hosts must "
            "be able to connect to the machine that launches: see its firewall, or launch from one of the hosts"
        )

    def _prove(self, connection: socket.socket, address: str) -> None:
        """Show the launch that we know the token, with the hello, and have it shown to us. Raises LaunchError."""
        self._buffer.clear()
        ours, theirs = secrets.token_hex(32), self._line(connection, address).get("nonce")
        if not is_nonce(theirs):
            raise LaunchError("another program listens there")
        shown = launch_proof(self._ticket.token, "rank", ours, str(theirs))
        connection.sendall(json.dumps({"nonce": ours, "proof": shown, **self._hello}).encode() + b"\n")
        answer = str(self._line(connection, address).get("proof")).encode()
        if not hmac.compare_digest(answer, launch_proof(self._ticket.token, "launch", ours, str(theirs)).encode()):
            raise LaunchError("another program, or another launch, listens there")

    def _line(self, connection: socket.socket, address: str) -> dict[str, Any]:
        """The next line, and nothing after it: what follows is for `receive`."""
        while (end := self._buffer.find(b"\n")) < 0:
            part = connection.recv(4096)
            if not part or len(self._buffer) > MAX_MESSAGE_BYTES:
                raise LaunchError("it closed the connection" if not part else "another program listens there")
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        said = parse_json(line, address, most_bytes=MAX_MESSAGE_BYTES, error=LaunchError)
        if not isinstance(said, dict):
            raise LaunchError("another program listens there")
        return said

    def send(self, message: dict[str, Any]) -> None:
        # The launch may be gone already; then nobody wants to know.
        with contextlib.suppress(OSError):
            self.socket.setblocking(True)
            self.socket.settimeout(_CONNECT_S)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
            self.socket.setblocking(False)

    @property
    def has_more(self) -> bool:
        """Whether a message came together with the launch's proof."""
        return b"\n" in self._buffer

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that are there; None if the connection is lost."""
        try:
            part = self.socket.recv(1 << 16)
        except BlockingIOError:
            part = b""
            if not self.has_more:
                return []
        except OSError:
            return None
        self._buffer += part
        if (not part and b"\n" not in self._buffer) or len(self._buffer) > 2 * MAX_MESSAGE_BYTES:
            return None
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        try:
            said = [parse_json(line, "the launch", most_bytes=MAX_MESSAGE_BYTES, error=LaunchError) for line in lines]
        except LaunchError:
            return None
        return said if all(isinstance(message, dict) for message in said) else None


class _Watch:
    """All that can end a rank: the launch's word or its loss, the launcher's end, a signal, time."""

    def __init__(self, lifeline: _Lifeline) -> None:
        self.lifeline = lifeline
        self.parent = os.getppid()
        self.signalled: int | None = None
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake.setblocking(False)
        self._kept = wake
        signal.set_wakeup_fd(wake.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.signalled = number

    def wait(self, deadline: float, also: int | None = None) -> tuple[str | None, dict[str, Any] | None]:
        """Wait: why to end, or a message, or (None, None) if descriptor `also` is ready or some time has passed."""
        readers: list[Any] = [self.lifeline.socket, self._wake, *([] if also is None else [also])]
        # The parent is looked at every second: its pidfd would tell at once, but a thread of it can be the true parent.
        patience_s = 0.0 if self.lifeline.has_more else min(1.0, max(0.0, deadline - time.monotonic()))
        ready, _, _ = select.select(readers, [], [], patience_s)
        if self.signalled is not None:
            return f"signal {self.signalled}", None
        if os.getppid() != self.parent:
            return "the launcher on this host is gone", None
        if self.lifeline.socket in ready or self.lifeline.has_more:
            messages = self.lifeline.receive()
            if messages is None:
                return "the launch is gone", None
            # What was said first may have waited here: the last word counts.
            if any("stop" in message for message in messages):
                return "the launch ended it", None
            if messages:
                return None, messages[0]
        return None, None


def main(words: list[str] | None = None) -> int:
    """Run the rank that the ticket describes; returns its exit status, 128 + N for a program that signal N ended."""
    try:
        (place,) = sys.argv[1:] if words is None else words
        ticket = _read_ticket(place)
        rank, local, world = find_place(ticket.how, os.environ)
        deadline = time.monotonic() + ticket.start_s
        # Rank 0 chooses the port at which all meet, on its own host: there it is free.
        port = free_ports(1, "")[0] if rank == 0 else 0
        job = os.environ.get("SLURM_JOB_ID") if ticket.how == "srun" else None
        lifeline = _Lifeline(ticket, deadline, {"rank": rank, "world": world, "port": port, "slurm_job": job})
    except (LastgoodError, OSError, ValueError) as error:
        sys.stderr.write(f"lastgood launch: {error}\n")
        return 1
    watch = _Watch(lifeline)
    try:
        try:
            go = _wait_for_go(watch, deadline)
        finally:
            _forget_ticket(place)
        if go is None:
            return 1
        env = _environment(ticket, rank, local, world, go)
        return _run(ticket, rank, env, watch)
    except (LastgoodError, OSError) as error:
        lifeline.send({"fault": str(error)})
        sys.stderr.write(f"lastgood launch: rank {rank}: {error}\n")
        return 1


def _read_ticket(place: str) -> Ticket:
    """From standard input if `place` is "-", else from a file. Raises LaunchError."""
    try:
        if place == "-":
            content = _read_input(MAX_TICKET_BYTES + 2)
        else:
            content = read_bounded(Path(place), MAX_TICKET_BYTES + 1, follow=True)
    except (OSError, StorageError) as error:
        raise LaunchError(f"the ticket of this rank cannot be read: {error}") from error
    return Ticket.decode(content.decode(errors="replace").strip())


def _forget_ticket(place: str) -> None:
    """All ranks have read theirs, or need none any more: its file must not outlive a launch that is killed."""
    if place.startswith(TICKET_FILE):
        with contextlib.suppress(OSError):  # another rank of this host was first
            Path(place).unlink()


def _read_input(most_bytes: int) -> bytes:
    content = b""
    deadline = time.monotonic() + _TICKET_S
    while len(content) <= most_bytes:
        if not select.select([0], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise LaunchError(f"no ticket came on standard input within {_TICKET_S:.0f} s")
        part = os.read(0, 1 << 16)
        if not part:
            break
        content += part
    return content


def _wait_for_go(watch: _Watch, deadline: float) -> dict[str, Any] | None:
    while time.monotonic() < deadline:
        why, message = watch.wait(deadline)
        if why is not None:
            return None
        if message is not None and "go" in message:
            go = message["go"]
            if not (isinstance(go, dict) and isinstance(go.get("address"), str) and is_whole(go.get("port"), 1, 65535)):
                raise LaunchError(f"the launch told no address and port of rank 0: {str(go)[:200]}")
            return go
    raise LaunchError("the other ranks have not come in time")


def _environment(ticket: Ticket, rank: int, local: int, world: int, go: dict[str, Any]) -> dict[str, str]:
    env = {**os.environ, **ticket.env}
    env.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world))
    # torchrun's ranks meet at the store that torchrun already keeps; the others at rank 0.
    if ticket.how != "torchrun":
        env.update(MASTER_ADDR=str(go["address"]), MASTER_PORT=str(go["port"]))
    interface = route_interface(env["MASTER_ADDR"])
    for name in _INTERFACE_VARIABLES:
        env.setdefault(name, interface)
    if sys.prefix != sys.base_prefix and "PATH" not in ticket.env:
        # As if this environment were activated, which nobody does over ssh: `python train.py` is to be this Python.
        env["PATH"] = os.pathsep.join(filter(None, (str(Path(sys.prefix, "bin")), env.get("PATH"))))
    return env


def _run(ticket: Ticket, rank: int, env: dict[str, str], watch: _Watch) -> int:
    path = Path(rank_log(ticket.logs, rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    with open_log(path) as log:
        try:
            program = subprocess.Popen(
                ticket.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ticket.cwd,
                env=env,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # this process has one thread
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {ticket.argv[0]!r} in {ticket.cwd}: {error.strerror}; every host needs both"
            ) from error
    watch.lifeline.send({"started": program.pid})
    deadline = time.monotonic() + ticket.timeout_s
    ended = os.pidfd_open(program.pid)
    why = None
    while program.poll() is None and why is None:
        why, _ = watch.wait(deadline, ended)
        if why is None and time.monotonic() > deadline:
            why = f"{ticket.timeout_s:.0f} s are over"
    if program.poll() is None:
        with os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND), "ab") as log:
            log.write(f"lastgood launch: ended rank {rank}: {why}\n".encode())
        _signal_group(program.pid, signal.SIGTERM)
        select.select([ended], [], [], ticket.grace_s)
    # What it started and left behind ends too.
    _signal_group(program.pid, signal.SIGKILL)
    status = program.wait(timeout=60)
    os.close(ended)
    watch.lifeline.send({"ended": status, "tail": _tail(path)})
    return status if status >= 0 else 128 - status


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _tail(path: Path) -> str:
    text = read_end(path, _TAIL_BYTES).decode(errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main())
