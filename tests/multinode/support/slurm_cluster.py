"""A real Slurm on this machine: munged, slurmctld and several slurmd, each in a PID namespace of its own.

A namespace ends with its first process, and that with the test's process, however it ends. So nothing is left behind,
and a node can be lost as a whole: its slurmd, its job steps and their processes, all at once.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lastgood.ports import free_ports
from lastgood.processes import die_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "squeue", "scontrol", "scancel", "unshare")
START_S = 120.0
NODE_TIMEOUT_S = 20
"""Seconds after which slurmctld takes a silent node for dead."""
PLACE = Path("/etc/slurm")
"""Where Slurm's commands look for their configuration without SLURM_CONF. The plug-in's jobs lose that variable."""
# The init of a namespace must reap what its daemons leave; a shell that waits does. The cover is a mount that only this
# namespace sees: the machine's own configuration stays as it is.
INIT = 'mount --bind "$1" "$2" && shift 2 && { "$@" & wait $!; }'


def why_not() -> str | None:
    """Why no cluster can be started here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (install/test_prerequisites.sh)"
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    if not PLACE.is_dir():
        return f"there is no folder {PLACE}, which Debian's package slurm-client makes"
    probe = subprocess.run([*_NAMESPACE, "true"], capture_output=True, text=True, timeout=60)
    return None if probe.returncode == 0 else f"no PID namespaces here: {probe.stderr.strip()}"


_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class SlurmCluster:
    """`nodes` nodes called node1, node2, ... with `cpus` CPUs each, all on this machine; a context manager.

    The daemons' files are in `folder`, whose path must be short: a Unix socket's name has at most 107 bytes.
    """

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        self._cpus = cpus
        self._config = folder / "etc" / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """What Slurm's commands need in their environment to find this cluster."""
        return {"SLURM_CONF": str(self._config), "PATH": _search_path()}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(self, *argv: str, timeout_s: float = 150, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command that talks to the cluster; `extra` are environment variables."""
        return subprocess.run(
            argv, env={**os.environ, **self.env, **extra}, capture_output=True, text=True, timeout=timeout_s
        )

    def submit(self, *argv: str, folder: Path, **extra: str) -> str:
        """`sbatch`, called in `folder`; returns the job's number."""
        done = self.call("sbatch", "--parsable", f"--chdir={folder}", *argv, **extra)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def exit_status(self, job: str, timeout_s: float = 150.0) -> int:
        """Wait for a job's end, and return its exit status. (`sbatch --wait` looks every ten seconds only.)"""
        self.wait_for_state(job, "COMPLETED", "FAILED", timeout_s=timeout_s)
        (status,) = re.findall(r"ExitCode=(\d+):0", self.call("scontrol", "show", "job", job).stdout)
        return int(status)

    def state_of(self, job: str) -> str:
        """A job's state, such as RUNNING."""
        return self.call("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").stdout.strip()

    def wait_for(self, what: str, found: Callable[[], bool], timeout_s: float = 150.0) -> None:
        """Wait until `found()`. Fails with the daemons' last lines when the time is up."""
        deadline = time.monotonic() + timeout_s
        while not found():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {timeout_s:.0f} s\n{self._last_lines()}")
            time.sleep(0.1)

    def wait_for_state(self, job: str, *states: str, timeout_s: float = 150.0) -> str:
        """Wait until a job is in one of `states`, and say which."""
        self.wait_for(f"{' or '.join(states)} of job {job}", lambda: self.state_of(job) in states, timeout_s)
        return self.state_of(job)

    def kill_node(self, name: str) -> None:
        """Lose a node, with all that runs on it."""
        self._end(name)

    def start_node(self, name: str) -> None:
        """Start a node, or start it again."""
        self._spawn(name, ["slurmd", "-D", "-N", name, "-f", str(self._config)])

    def wait_for_nodes(self) -> None:
        """Wait until every node can take jobs."""

        def idle() -> bool:
            done = self.call("sinfo", "--noheader", "--Node", "--format=%N %T")
            return sorted(done.stdout.splitlines()) == [f"{name} idle" for name in self.nodes]

        self.wait_for(f"idle {', '.join(self.nodes)}", idle, START_S)

    def stop(self) -> None:
        """End all daemons and all that they started."""
        for name in reversed(list(self._processes)):
            self._end(name)

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for name in ("state", "spool", "etc"):
            (self.folder / name).mkdir()
        self._config.write_text(self._config_text(), encoding="utf-8")
        sock = self.folder / "munge.sock"
        files = [("--key-file", key), ("--socket", sock), ("--pid-file", self.folder / "munged.pid")]
        files += [("--log-file", self.folder / "munged.log"), ("--seed-file", self.folder / "munged.seed")]
        # --force: the folder of a test is not as closed as munged would have it.
        self._spawn("munged", ["munged", "--foreground", "--force", *(f"{key}={value}" for key, value in files)])
        self.wait_for("socket of munged", sock.exists, START_S)
        self._spawn("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self._config)])
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes()

    def _config_text(self) -> str:
        folder = self.folder
        host = socket.gethostname().partition(".")[0]
        ports = free_ports(1 + len(self.nodes))
        lines = [
            "ClusterName=lastgood-test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder / 'munge.sock'}",
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SlurmdParameters=config_overrides",
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={folder / 'spool'}/%n",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={folder / 'slurmctld.log'}",
            f"SlurmdLogFile={folder}/slurmd.%n.log",
            f"SlurmdTimeout={NODE_TIMEOUT_S}",
            "SlurmctldTimeout=30",
            "ReturnToService=2",
            "KillWait=2",
        ]
        for name, port in zip(self.nodes, ports[1:], strict=True):
            lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus}")
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"

    def _spawn(self, name: str, argv: list[str]) -> None:
        parent = os.getpid()
        environment: Mapping[str, str] = {**os.environ, **self.env}
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*_NAMESPACE, "sh", "-c", INIT, "sh", self._config.parent, PLACE, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                preexec_fn=lambda: die_with_parent(parent),  # single-threaded tests only
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            # Kills `unshare`; the kernel kills the namespace's first process with it, and then the namespace.
            process.kill()
            process.wait(timeout=60)

    def _last_lines(self) -> str:
        texts = []
        for log in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")]):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            texts += [f"--- {log.name}", *lines]
        return "\n".join(texts)
