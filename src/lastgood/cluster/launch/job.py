"""Starts one program on all slots of a hostfile, through torchrun, DeepSpeed's launcher or Slurm's srun, or ssh alone.

Whichever it is: each rank has a log of its own; the first rank that fails ends the job and is named with its host, its
exit status and its last lines; nothing outlives the call, not even one that is killed; every wait is bounded.
"""

from __future__ import annotations

import ipaddress
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import AddressFamily
from typing import Final

import psutil

from lastgood.cluster.hostfile import Hostfile
from lastgood.cluster.launch.launchers import Started, Way, way
from lastgood.cluster.launch.lifelines import Board, RankState
from lastgood.cluster.launch.order import MAX_MESSAGE_BYTES, How, Ticket, check_env, rank_log
from lastgood.cluster.ssh.remote import Completed, Remote
from lastgood.errors import ConfigError, HostError, LaunchError, StorageError
from lastgood.files import read_end
from lastgood.text import is_whole, parse_json
from lastgood.wire.gate import LOOPBACK

__all__ = ["LOG_THERE", "LaunchResult", "RankResult", "launch"]

LOG_THERE: Final = "log there: "
"""Stands before a log's path in an error, if that is a path on the rank's host."""

_PROBE_S: Final = 60.0
_LATE_S: Final = 3.0
"""How long after a launcher's end its ranks may still be heard of."""
_LOOPBACK: Final = ("127.0.0.1", "::1")
_TAIL_LINES: Final = 15

# Runs on a host: that the package is there, where ssh came from and to, and a port at which ranks can meet.
_PROBE: Final = """
import importlib.util, json, os, socket, sys
wanted = int(sys.argv[1])
found = {"ssh": os.environ.get("SSH_CONNECTION", "").split()}
found["lastgood"] = importlib.util.find_spec("lastgood") is not None
if found["lastgood"] and not wanted:
    try:
        from lastgood.ports import free_ports
        wanted = free_ports(1, "")[0]
    except ImportError:  # another revision of it; that is said later
        pass
try:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", wanted))
        found["port"] = probe.getsockname()[1]
except OSError as error:
    found["port"] = None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class RankResult:
    """A rank that ended well: its host, its program's process there, and its log, on that host."""

    rank: int
    host: str
    pid: int
    log: str


@dataclass(frozen=True)
class LaunchResult:
    """A job whose ranks all ended with status 0, and the seconds it took."""

    ranks: tuple[RankResult, ...]
    wall_s: float


def launch(
    program: Sequence[str],
    hosts: Hostfile,
    how: How,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: Path,
    timeout_s: float,
    start_timeout_s: float = 120.0,
    grace_s: float = 5.0,
    remote: Remote | None = None,
    cwd: str | None = None,
    python: str = sys.executable,
    master_addr: str | None = None,
    master_port: int | None = None,
    launcher_args: Sequence[str] = (),
    report: Callable[[str], None] | None = None,
) -> LaunchResult:
    """Run `program` once for each slot of `hosts`, ranks in the file's order, and wait for all of them.

    Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, the interface of the
    route to the first host in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, unless they are set, and `env`. It works in
    `cwd` (default: this process's), writes to ``log_dir/rank-00000.log``, ... on its host, and has no standard input.
    Hosts need the package at the same `python`, and a way to connect back to this machine. For srun, hosts are Slurm's
    nodes; the others reach them over `remote`. `master_addr` and `master_port` replace what is found out. Call it in
    the main thread.

    Raises LaunchError for a rank or launcher that fails, for ranks that do not start within `start_timeout_s` or end
    within `timeout_s`; HostError for hosts that cannot be reached; ConfigError for what cannot work. Nothing runs any
    more then, nor after KeyboardInterrupt.
    """
    settings = dict(env or {})
    say = report or (lambda _: None)
    check_env(settings)
    if not program or any("\0" in word for word in program):
        raise ConfigError("give a program to launch, after `--`")
    if not (0 < timeout_s <= 366 * 86400 and 0 < start_timeout_s <= 7 * 86400 and 0 <= grace_s <= 600):
        raise ConfigError("timeouts are more than 0 s and at most a year (start: a week, grace: 600 s)")
    began = time.monotonic()
    log_dir = log_dir.absolute()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{log_dir}: cannot make this folder for logs: {error.strerror}; name another") from error
    remote = remote or Remote()
    addresses, address, port = _find_ways(how, hosts, remote, python, master_port)
    token = secrets.token_hex(16)
    names = [host.name for host in hosts.hosts for _ in range(host.slots)]
    # Only ranks on this machine reach loopback.
    listen = LOOPBACK if all(one.startswith("127.") for one in addresses) else ""
    board = Board(token, names, address=master_addr, port=master_port, listen=listen)
    started: list[Started] = []
    try:
        ticket = Ticket(
            token=token,
            addresses=addresses,
            port=board.port,
            how=how,
            argv=list(program),
            cwd=cwd or str(Path.cwd()),
            env=settings,
            logs=str(log_dir),
            start_s=start_timeout_s,
            timeout_s=timeout_s,
            grace_s=grace_s,
        )
        given = Way(hosts, ticket, python, remote, log_dir, launcher_args, master_addr or address, port)
        say(f"{len(board.ranks)} ranks on {len(hosts.hosts)} hosts by {how}; logs in {log_dir}")
        started += way(how, given)
        _attend(board, started, ticket, say)
        _farewell(board, started, _LATE_S)
    finally:
        _end_all(board, started, grace_s)
    results = tuple(
        RankResult(state.rank, state.host, state.pid or 0, rank_log(str(log_dir), state.rank)) for state in board.ranks
    )
    return LaunchResult(results, time.monotonic() - began)


# -- before --------------------------------------------------------------------------------------------------------


def _find_ways(
    how: How, hosts: Hostfile, remote: Remote, python: str, wanted_port: int | None
) -> tuple[list[str], str | None, int | None]:
    """Where ranks reach this machine; and where they reach the first host: address, and a port that is free there."""
    if wanted_port is not None and not 1 <= wanted_port <= 65535:
        raise ConfigError(f"not a port: {wanted_port}; give 1 to 65535")
    if how == "srun":
        # As srun itself: nodes connect to any address of the machine that submits.
        found = [
            one.address
            for held in psutil.net_if_addrs().values()
            for one in held
            if one.family is AddressFamily.AF_INET
        ]
        return [*(one for one in found if not one.startswith("127.")), "127.0.0.1"], None, None
    answers = remote.run_everywhere(hosts.names, [python, "-c", _PROBE, str(wanted_port or 0)], _PROBE_S)
    faults = [str(one) for one in answers.values() if isinstance(one, HostError)]
    if faults:
        raise HostError("; ".join(faults))
    seen: dict[str, list[str]] = {}
    port: int | None = None
    for host, answer in answers.items():
        assert isinstance(answer, Completed)
        seen[host], free = _read_probe(host, answer, python)
        if host == hosts.names[0]:
            port = free
    if port is None:
        raise HostError(
            f"{hosts.names[0]}: port {wanted_port} is in use there; choose another, or none, and a free one is found"
        )
    first = seen[hosts.names[0]]
    here = [client for client, _, _, _ in seen.values()]
    address = first[2]
    if address in _LOOPBACK:
        # The first host is this machine: the others reach it as they are reached from.
        address = next((one for one in here if one not in _LOOPBACK), address)
    return list(dict.fromkeys(here)), address, port


def _is_address(word: object) -> bool:
    """A link's own address of IPv6 names its interface after a percent sign."""
    try:
        ipaddress.ip_address(str(word))
    except ValueError:
        return False
    return True


def _read_probe(host: str, answer: Completed, python: str) -> tuple[list[str], int | None]:
    try:
        line = answer.text.splitlines()[-1]
        found = parse_json(line, host, most_bytes=MAX_MESSAGE_BYTES, error=HostError)
        ssh, port, there = found["ssh"], found["port"], found["lastgood"]
        if not isinstance(ssh, list) or not (port is None or is_whole(port, 1, 65535)):
            raise TypeError("an address or a port that is none")
    except (HostError, LookupError, TypeError):
        said = answer.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise HostError(f"{host}: {python} failed there with status {answer.rc}: {''.join(said)[:200]}") from None
    if not there:
        raise HostError(f"{host}: {python} has no lastgood there; install it at the same place on every host")
    if len(ssh) != 4 or not (_is_address(ssh[0]) and _is_address(ssh[2])):
        raise HostError(
            f"{host}: SSH_CONNECTION does not say there from where ssh came and to which address; look for what clears "
            "it on that host (sshd's ForceCommand, the shell's start files), and reach it over TCP (no ProxyCommand "
            "that starts an sshd)"
        )
    return [str(word) for word in ssh], port


# -- while it runs -------------------------------------------------------------------------------------------------


def _attend(board: Board, started: list[Started], ticket: Ticket, report: Callable[[str], None]) -> None:
    """Serve the board until all ranks have ended well. Raises LaunchError at the first that has not."""
    start = time.monotonic() + ticket.start_s
    deadline = None
    while True:
        board.serve(0.5)
        if board.first_failure is not None:
            raise LaunchError(_describe(board.first_failure, ticket.logs) + _causes(board, started))
        if board.all_over:
            return
        now = time.monotonic()
        if deadline is None and not board.missing:
            deadline = now + ticket.timeout_s
            report("all ranks have reported")
        _look_at_launchers(board, started)
        if deadline is None and now > start:
            missing = board.missing
            names = ", ".join(f"{state.rank} on {state.host}" for state in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            why = _launcher_words(started)
            raise LaunchError(f"no word from rank {names}{more} within {ticket.start_s:.0f} s of the start{why}")
        # A rank ends its program itself when time is up, and reports that; this is for one that cannot.
        if deadline is not None and now > deadline + 30:
            alive = [f"{state.rank} on {state.host}" for state in board.ranks if not state.over]
            raise LaunchError(f"rank {', '.join(alive[:8])} did not end within {ticket.timeout_s:.0f} s")


def _look_at_launchers(board: Board, started: list[Started]) -> None:
    """Raises LaunchError if a launcher has ended, and not all of its ranks have."""
    for one in started:
        end = one.ended()
        if end is None:
            continue
        mine = [state for state in board.ranks if state.host in one.hosts]
        late = time.monotonic() + _LATE_S
        while not all(state.over for state in mine) and board.first_failure is None and time.monotonic() < late:
            board.serve(0.2)
        if board.first_failure is not None:
            return
        left = [f"{state.rank} on {state.host}" for state in mine if not state.over]
        if left:
            why = _launcher_words([one])
            raise LaunchError(f"{one.name} ended before rank {', '.join(left[:8])}: {end}{why}")


def _causes(board: Board, started: Sequence[Started]) -> str:
    """Launchers that have ended, if the first failure may come from that: a rank that was killed or is lost."""
    state = board.first_failure
    if state is None or (state.status is not None and state.status > 0):
        return ""
    until = time.monotonic() + 1.0
    while not any(one.ended() for one in started) and time.monotonic() < until:
        board.serve(0.1)
    ends = [(one, one.ended()) for one in started]
    return "".join(f"\n{one.name} has ended: {end}" for one, end in ends if end is not None)


def _describe(state: RankState, logs: str) -> str:
    path = rank_log(logs, state.rank)
    if state.fault is not None:
        return f"rank {state.rank} on {state.host} failed: {state.fault} ({LOG_THERE}{path})"
    assert state.status is not None
    if state.status < 0:
        try:
            how = f"signal {-state.status} ({signal.Signals(-state.status).name})"
        except ValueError:
            how = f"signal {-state.status}"
    else:
        how = f"exit status {state.status}"
    return f"rank {state.rank} on {state.host} ended with {how}; {LOG_THERE}{path}\n{_indented(state.tail)}"


def _launcher_words(started: Sequence[Started]) -> str:
    """What is to be done about launchers that came to nothing, and the ends of their logs."""
    advice = [one.advice() for one in started]
    words = []
    for one in started:
        try:
            text = read_end(one.log, 4096).decode(errors="replace").rstrip()
        except (OSError, StorageError):
            continue
        lines = [line for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        if lines:
            words.append(f"\n{one.log}:\n" + _indented("\n".join(lines)))
    return "".join([*(f"\n{one}" for one in advice if one), *words[:4]])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


# -- after ---------------------------------------------------------------------------------------------------------


def _farewell(board: Board, started: Sequence[Started], patience_s: float) -> None:
    """Let launchers end by themselves after their ranks: torchrun and srun clean up then."""
    until = time.monotonic() + patience_s
    while any(one.ended() is None for one in started) and time.monotonic() < until:
        board.serve(0.1)


def _end_all(board: Board, started: Sequence[Started], grace_s: float) -> None:
    """End ranks by their lifelines, then launchers, whatever has happened."""
    try:
        board.stop()
        until = time.monotonic() + grace_s + 2
        while board.connected and time.monotonic() < until:
            board.serve(0.2)
        if not board.all_over:
            _farewell(board, started, _LATE_S)
    finally:
        # Also a launcher that cannot be ended must not keep the others alive.
        faults = []
        jobs = [state.slurm_job for state in board.ranks if state.slurm_job is not None]
        for one in started:
            one.slurm_jobs = jobs
            one.ask()
        for one in started:
            try:
                one.end()
            except Exception as error:
                faults.append(f"{one.name}: {error}")
        board.close()
        if faults and sys.exc_info()[0] is None:
            raise LaunchError(f"launchers could not be ended: {'; '.join(faults)}; see the processes of their hosts")
