"""Where the ranks of a run live: processes of this machine, hosts of a hostfile, or a testbed of the run's own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from lastgood.cluster.hostfile import Host, Hostfile, read_hostfile
from lastgood.cluster.launch.job import launch
from lastgood.cluster.launch.lifelines import was_killed
from lastgood.cluster.launch.order import How
from lastgood.cluster.ssh.remote import Remote, SshOptions
from lastgood.cluster.testbed.state import parse_rate
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import ConfigError, HostError, LaunchError
from lastgood.experiments.records.dcp import DcpSpec
from lastgood.experiments.records.spec import RunSpec
from lastgood.files import open_log, read_end
from lastgood.ports import free_ports

__all__ = ["Place", "RankHosts", "find_place", "host_address"]

_POLL_S: Final = 0.1
_TAIL_BYTES: Final = 4096
_END_S: Final = 60.0
_COMMAND_S: Final = 60.0
_LOOPBACK: Final = re.compile(r"127\.|::1$")


@dataclass(frozen=True)
class RankHosts:
    """What a user says about hosts."""

    hostfile: Path | None = None
    """None: a testbed of the run's own for several nodes, processes of this machine for one."""
    ssh_config: Path | None = None
    how: How = "ssh"
    rate: str | None = None
    """Of every host's link, as ``1gbit``: a testbed's limit; of other hosts it is only written down."""


@dataclass(frozen=True)
class Place:
    """Hosts that are there."""

    launcher: How
    """What starts ranks if there is a `remote`."""
    hosts: Hostfile
    remote: Remote | None
    """None for processes of this machine."""
    link_bits_per_s: int | None

    @property
    def host_of_rank(self) -> list[str]:
        """Its host, by rank."""
        return [host.name for host in self.hosts.hosts for _ in range(host.slots)]

    def start(
        self,
        program: Sequence[str],
        env: Mapping[str, str],
        log_dir: Path,
        timeout_s: float,
        report: Callable[[str], None],
    ) -> None:
        """Run `program` on all ranks and wait for them.

        Raises LaunchError, naming rank, host and last lines, or HostError.
        """
        if self.remote is None:
            _run_here(program, env, self.hosts.slots, log_dir, timeout_s)
        else:
            launch(
                program,
                self.hosts,
                self.launcher,
                env=env,
                log_dir=log_dir,
                timeout_s=timeout_s,
                remote=self.remote,
                report=report,
            )


@contextmanager
def find_place(spec: RunSpec | DcpSpec, given: RankHosts, report: Callable[[str], None]) -> Iterator[Place]:
    """The hosts for a run. Raises ConfigError if they are not as many, or have not as many slots, as the spec says.

    A testbed has a guard: it is taken down when this process ends, however it ends.
    """
    rate = None if given.rate is None else parse_rate(given.rate)
    if given.hostfile is not None:
        hosts = read_hostfile(given.hostfile)
        if (len(hosts.hosts), hosts.slots) != (spec.nodes, spec.ranks):
            raise ConfigError(
                f"{given.hostfile}: {len(hosts.hosts)} hosts with {hosts.slots} slots in all; {spec.title()} is for "
                f"{spec.nodes} hosts and {spec.ranks} ranks"
            )
        yield Place(given.how, hosts, Remote(SshOptions.choose(given.ssh_config)), rate)
    elif given.how == "srun":
        raise ConfigError(
            f"--how srun: {spec.title()} needs --hostfile FILE with the names of {spec.nodes} of Slurm's nodes (NAME "
            "slots=N, one a line); without it ranks run on this machine, or on a testbed inside it, where no Slurm is"
        )
    elif spec.nodes == 1:
        yield Place(given.how, Hostfile((Host(socket.gethostname(), spec.ranks),), "this machine"), None, None)
    else:
        if spec.device == "cuda":
            raise ConfigError(
                f"{spec.title()}: nodes of a testbed would share this machine's GPUs, which NCCL refuses; give a "
                "hostfile, or one node with a slot for each GPU"
            )
        if spec.ranks % spec.nodes:
            raise ConfigError(
                f"a testbed's nodes have equal slots; {spec.ranks} ranks do not share {spec.nodes} evenly"
            )
        report(f"making a testbed of {spec.nodes} nodes")
        slots = spec.ranks // spec.nodes
        with Testbed.up(spec.nodes, name=f"r{os.getpid()}", rate=given.rate, slots=slots, guarded=True) as bed:
            yield Place(given.how, bed.hostfile, bed.remote(), rate)


def host_address(remote: Remote, host: str) -> str:
    """Where the other hosts reach it: where ssh reached it. Raises HostError for an address of that host alone."""
    words = remote.run(host, ["sh", "-c", 'echo "$SSH_CONNECTION"'], _COMMAND_S).text.split()
    if len(words) != 4 or _LOOPBACK.match(words[2]):
        raise HostError(
            f"{host}: ssh reaches it at {' '.join(words) or 'an unknown address'}, where other hosts do not"
        )
    return words[2]


def _run_here(program: Sequence[str], env: Mapping[str, str], ranks: int, log_dir: Path, timeout_s: float) -> None:
    """Ranks as processes of this machine, which end with this one: the program sees to that (`RankOrder.parent`)."""
    log_dir.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports()
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    deadline = time.monotonic() + timeout_s
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {**os.environ, **env, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open_log(_log_of(log_dir, rank)) as log:
                started.append(_start(program, own, log))
        left = dict(enumerate(started))
        while left:
            ended = {rank: status for rank, process in left.items() if (status := process.poll()) is not None}
            failed = [rank for rank, status in ended.items() if status]
            if failed:
                # Of several since the last look one that was killed is the cause: the others have lost touch with it.
                first = min(failed, key=lambda rank: not was_killed(ended[rank]))
                raise LaunchError(_how_it_ended(first, ended[first], _log_of(log_dir, first)))
            for rank in ended:
                del left[rank]
            if time.monotonic() > deadline:
                raise LaunchError(f"ranks {sorted(left)} on this machine did not end within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait(_END_S)


def _start(program: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)


def _log_of(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank-{rank:05d}.log"


def _how_it_ended(rank: int, status: int, log: Path) -> str:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    lines = read_end(log, _TAIL_BYTES).decode(errors="replace").splitlines()[-15:]
    tail = "\n".join(f"    {line}" for line in lines)
    return f"rank {rank} on {socket.gethostname()} ended with {how}; log: {log}\n{tail}"
