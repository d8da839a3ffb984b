"""The launchers that exist, each called so that it starts one wrapper (rank_main.py) for every slot of a hostfile."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lastgood.cluster.hostfile import Hostfile, render_hostfile
from lastgood.cluster.launch.order import TICKET_FILE, How, Ticket
from lastgood.cluster.ssh.remote import Remote, RemoteProcess
from lastgood.errors import ConfigError, HostError
from lastgood.files import open_log, read_bounded, write_atomically
from lastgood.processes import die_with_parent

__all__ = ["Started", "Way", "deepspeed_env_text", "way"]

_RANK_MAIN: Final = "lastgood.cluster.launch.wrapper"
_EACH_SLOT: Final = """
first=$1 slots=$2 world=$3
shift 3
IFS= read -r ticket || exit 125
for ((slot = 0; slot < slots; slot++)); do
    RANK=$((first + slot)) LOCAL_RANK=$slot WORLD_SIZE=$world "$@" - <<<"$ticket" &
done
wait
"""
_WITH_TICKET: Final = """
IFS= read -r ticket || exit 125
file=$(umask 077; mktemp) || exit 125
printf '%s\\n' "$ticket" > "$file"
exec 4< "$file"
rm -f -- "$file"
"$@" "/proc/$$/fd/4"
"""
"""Ranks that share one standard input open the ticket through this shell, in a file that has no name any more."""
_TICKET_S: Final = 60.0
_MAX_ENV_FILE_BYTES: Final = 64 << 10
_END_S: Final = 10.0
_LOOK_S: Final = 60.0
_PING_S: Final = 20.0


@dataclass(frozen=True)
class Way:
    """What all launchers are given. `address` and `port` are where ranks meet; srun's are not known before they run."""

    hosts: Hostfile
    ticket: Ticket
    python: str
    remote: Remote
    log_dir: Path
    launcher_args: Sequence[str]
    address: str | None
    port: int | None

    @property
    def rank_command(self) -> list[str]:
        """What a launcher starts for each slot; the last word is still missing: where the ticket is to be read."""
        return [self.python, "-m", _RANK_MAIN]


class Started(ABC):
    """A launcher that runs: one for the whole job, or one for each host."""

    def __init__(self, name: str, log: Path, hosts: Sequence[str]) -> None:
        self.name = name
        self.log = log
        self.hosts = hosts
        self.slurm_jobs: Sequence[str] = ()
        """Slurm jobs that its ranks have named, if it was srun that made them."""

    @abstractmethod
    def ended(self) -> str | None:
        """None while it runs; then how it ended."""

    def advice(self) -> str:
        """What its own words do not say if it came to nothing: what was tried, where, and what to do; or nothing."""
        return ""

    @abstractmethod
    def ask(self) -> None:
        """Ask it to end, without waiting."""

    @abstractmethod
    def end(self) -> None:
        """End it and wait for that, bounded."""


class _Local(Started):
    """A launcher that is started here. With `scancel` the Slurm jobs of its ranks are cancelled at its end."""

    def __init__(
        self,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        given: Way,
        *,
        cwd: Path | None = None,
        scancel: bool = False,
        advise: Callable[[Sequence[str]], str] | None = None,
        cleaned: Callable[[], object] = lambda: None,
        ticket: bytes = b"",
    ) -> None:
        super().__init__(name, given.log_dir / f"{name}.log", given.hosts.names)
        self._cleaned = cleaned
        self._scancel = scancel
        self._advise = advise
        self._polite = name == "srun"
        parent, number = os.getpid(), signal.SIGTERM if self._polite else signal.SIGKILL
        with open_log(self.log) as log, tempfile.TemporaryFile() as given_to_it:
            log.write(f"{shlex.join(command)}\n".encode())
            log.flush()
            given_to_it.write(ticket)
            given_to_it.seek(0)
            self._process = subprocess.Popen(
                command,
                stdin=given_to_it,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=cwd or given.log_dir,
                env=dict(env),
                start_new_session=True,
                # srun gives its nodes back when it is asked to end. What was started on hosts ends by its lifeline.
                preexec_fn=lambda: die_with_parent(parent, number),
            )

    def ended(self) -> str | None:
        status = self._process.poll()
        if status is None:
            return None
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def advice(self) -> str:
        return "" if self._advise is None else self._advise(self.hosts)

    def ask(self) -> None:
        # srun gives its nodes back when it is asked to end, and not when it is killed. DeepSpeed's runner is not asked:
        # with pdsh it would end processes on all hosts by the words of their command lines, and with mpirun leave that.
        if self._polite:
            self._process.terminate()

    def end(self) -> None:
        if self._polite:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        if self._scancel:
            for job in sorted(set(self.slurm_jobs)):
                subprocess.run(["scancel", "--quiet", job], capture_output=True, timeout=30, check=False)
        # The whole group: DeepSpeed's runner has a pdsh or an mpirun, and that has an ssh for each host.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)
        self._cleaned()


class _OnHost(Started):
    def __init__(self, name: str, log: Path, host: str, process: RemoteProcess) -> None:
        super().__init__(f"{name} on {host}", log, [host])
        self._process = process

    def ended(self) -> str | None:
        if self._process.poll() is None:
            return None
        try:
            return f"exit status {self._process.wait(_END_S)}"
        except HostError as error:
            return str(error)

    def ask(self) -> None:
        self._process.terminate()

    def end(self) -> None:
        self._process.close()


def way(how: How, given: Way) -> list[Started]:
    """Start the launcher(s). Raises ConfigError if one is not installed."""
    return {"torchrun": _torchrun, "ssh": _ssh, "deepspeed": _deepspeed, "openmpi": _openmpi, "srun": _srun}[how](given)


def _torchrun(given: Way) -> list[Started]:
    hosts = given.hosts.hosts
    return _on_hosts(
        "torchrun",
        given,
        [
            [
                *("bash", "-c", _WITH_TICKET, "lastgood-ticket"),
                *(given.python, "-m", "torch.distributed.run", "--max-restarts=0", "--no-python"),
                *(f"--nnodes={len(hosts)}", f"--node-rank={number}", f"--nproc-per-node={host.slots}"),
                *(f"--master-addr={given.address}", f"--master-port={given.port}"),
                *given.launcher_args,
                *given.rank_command,
            ]
            for number, host in enumerate(hosts)
        ],
    )


def _ssh(given: Way) -> list[Started]:
    """A shell on each host, and no launcher: each torchrun imports torch for some seconds before its ranks start."""
    if given.launcher_args:
        raise ConfigError(
            f"--launcher-arg {given.launcher_args[0]}: with --how ssh there is no launcher to give it to; leave it "
            "out, or take --how torchrun"
        )
    commands, first = [], 0
    for host in given.hosts.hosts:
        words = ["bash", "-c", _EACH_SLOT, "lastgood-slots", str(first), str(host.slots), str(given.hosts.slots)]
        commands.append([*words, *given.rank_command])
        first += host.slots
    return _on_hosts("ssh", given, commands)


def _on_hosts(name: str, given: Way, commands: Sequence[Sequence[str]]) -> list[Started]:
    """One command for each host, in their order."""
    started: list[Started] = []
    try:
        for host, command in zip(given.hosts.hosts, commands, strict=True):
            path = given.log_dir / f"{name}-{host.name}.log"
            with open_log(path) as log:
                process = given.remote.start(
                    host.name,
                    command,
                    env=given.ticket.env,
                    stdout=log,
                    stderr=log,
                    # A wrapper gives its program `grace_s`; whoever ends the wrapper waits a little longer.
                    grace_s=math.ceil(given.ticket.grace_s) + 2,
                    lines=[given.ticket.encode()],
                )
            started.append(_OnHost(name, path, host.name, process))
    except BaseException:
        for one in started:
            one.end()
        raise
    return started


def _deepspeed(given: Way) -> list[Started]:
    if shutil.which("pdsh") is None:
        raise ConfigError("DeepSpeed's launcher needs pdsh on this machine (Debian, Ubuntu: apt-get install pdsh)")
    if shlex.quote(given.python) != given.python:
        raise ConfigError(
            f"DeepSpeed's launcher puts {given.python!r} into a shell's command as it is, where it falls apart: use a "
            "Python at a path without blanks and other signs of a shell, or --how torchrun or openmpi"
        )
    # pdsh splits options for its ssh at blanks and puts the host's name for %h.
    options = [word.replace("%", "%%") for word in _plain_ssh_options(given.remote, "pdsh")]
    env = {"PDSH_SSH_ARGS": " ".join([*options, "%h"])}
    return [_runner(given, "pdsh", given.launcher_args, given.ticket.env, env)]


def _openmpi(given: Way) -> list[Started]:
    if shutil.which("mpirun") is None or shutil.which("ompi_info") is None:
        raise ConfigError(
            "DeepSpeed's launcher needs Open MPI's mpirun, here and on every host (Debian, Ubuntu: apt-get install "
            "openmpi-bin)"
        )
    # Ranks in the hostfile's order, each free to use every core: mpirun would spread and pin them.
    words = ["--map-by", "slot", "--rank-by", "slot", "--bind-to", "none"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    parameters = {
        "plm_rsh_agent": " ".join(["ssh", *_plain_ssh_options(given.remote, "mpirun")]),
        # Every host is reached from here, where the keys are, and not from one another.
        "plm_rsh_no_tree_spawn": "1",
        # A daemon of a host that was cut off ends as soon as its ranks do (launch_board.py), not after eight minutes.
        "oob_tcp_keepalive_time": "10",
        "oob_tcp_keepalive_intvl": "5",
        "oob_tcp_keepalive_probes": "3",
        # What a daemon that was killed leaves of its files is with the logs, and not in /tmp.
        "orte_tmpdir_base": str(given.log_dir),
    }
    words += [word for name, value in parameters.items() for word in ("--mca", name, value)]
    # DeepSpeed takes mpirun's options as one word, which it splits as a shell does.
    arguments = [f"--launcher_args={shlex.join([*words, *given.launcher_args])}"]
    # The ticket brings `--env`: mpirun starts ranks without a launcher of DeepSpeed's between them.
    return [_runner(given, "openmpi", arguments, {}, {})]


def _runner(
    given: Way, backend: str, arguments: Sequence[str], exported: Mapping[str, str], env: Mapping[str, str]
) -> Started:
    """DeepSpeed's runner. `exported` goes into its environment file, `env` to what it calls."""
    _check_deepspeed(given.python)
    hostfile = given.log_dir / "hostfile"
    write_atomically(hostfile, render_hostfile(given.hosts.hosts).encode())
    env_file = given.log_dir / "deepspeed_env"
    # It holds what the user's own has, which may be secret.
    write_atomically(env_file, deepspeed_env_text(exported).encode())
    # It leaves ranks no standard input, mpirun only rank 0's: a file of this user's on each host, until all have come.
    ticket = f"{TICKET_FILE}{secrets.token_hex(16)}"
    hosts = given.hosts.names
    command = [
        *(given.python, "-m", "deepspeed.launcher.runner", f"--hostfile={hostfile}", "--force_multi", "--no_ssh_check"),
        *(f"--launcher={backend}", f"--master_addr={given.address}", f"--master_port={given.port}"),
        *arguments,
        *("--module", "--no_local_rank", *given.rank_command[2:], ticket),
    ]
    env = {**os.environ, **given.ticket.env, "DS_ENV_FILE": str(env_file), **env}

    def clean() -> None:
        # The ranks have removed it, unless they never came.
        given.remote.run_everywhere(hosts, ["rm", "-f", "--", ticket], _TICKET_S)

    try:
        given.remote.write_everywhere(hosts, ticket, given.ticket.encode().encode(), _TICKET_S)
        # It puts its folder's name into commands and into PYTHONPATH, and with a blank in it neither works.
        return _Local("deepspeed", command, env, given, cwd=Path("/"), cleaned=clean)
    except BaseException:
        clean()
        raise


def _check_deepspeed(python: str) -> None:
    """Raises ConfigError if `python` has no DeepSpeed here: its own words are a traceback in the launcher's log."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"DeepSpeed's launcher needs {python} on this machine: {error}") from error
    if done.returncode:
        raise ConfigError(
            f"DeepSpeed's launcher is not installed for {python}: pip install 'lastgood[deepspeed]' there, or choose "
            "--how torchrun"
        )


def deepspeed_env_text(env: Mapping[str, str]) -> str:
    """A file as DeepSpeed's ``.deepspeed_env``: what the user's own two say, and then `env`.

    DeepSpeed writes ``export NAME="VALUE"`` into a command for a shell on each host and sends it through pdsh, without
    quoting; so what a shell and pdsh would change is escaped here. (deepspeed/launcher/runner.py, multinode_runner.py)
    """
    lines = []
    for folder in (Path.home(), Path.cwd()):
        path = folder / ".deepspeed_env"
        if path.is_file():
            text = read_bounded(path, _MAX_ENV_FILE_BYTES, follow=True, too_large=ConfigError).decode()
            lines += [line for line in text.splitlines() if "=" in line]
    for name, value in env.items():
        escaped = "".join(f"\\{sign}" if sign in '\\"$`' else sign for sign in value).replace("%", "%%")
        lines.append(f"{name}={escaped}")
    return "".join(f"{line}\n" for line in lines)


def _plain_ssh_options(remote: Remote, whom: str) -> list[str]:
    """Our options of ssh. Raises ConfigError for one that a program which splits at blanks would tear apart."""
    _, *words, _, _, _ = remote.command("host", ["true"])
    for word in words:
        if len(word.split()) != 1:
            raise ConfigError(f"{whom} cannot pass on {word!r}, which has blanks: move the ssh configuration elsewhere")
    return words


def _srun(given: Way) -> list[Started]:
    if shutil.which("srun") is None:
        raise ConfigError(
            "there is no srun on this machine; launch from a machine that submits jobs to Slurm, or take --how ssh or "
            "--how torchrun"
        )
    # One line for each rank: Slurm's way to say which rank is where.
    placement = given.log_dir / "slurm_hostfile"
    names = [host.name for host in given.hosts.hosts for _ in range(host.slots)]
    write_atomically(placement, "".join(f"{name}\n" for name in names).encode())
    command = ["srun", f"--nodes={len(given.hosts.hosts)}", f"--ntasks={len(names)}", "--distribution=arbitrary"]
    command += ["--kill-on-bad-exit=1", "--mpi=none", "--job-name=lastgood", "--chdir=/"]
    inside = "SLURM_JOB_ID" in os.environ
    if not inside:
        # Slurm's own bound, for the case that nobody is left to end the job.
        seconds = given.ticket.start_s + given.ticket.timeout_s + 60
        command.append(f"--time={math.ceil(seconds / 60)}")
    env = {**os.environ, "SLURM_HOSTFILE": str(placement)}
    words = [*command, *given.launcher_args, *given.rank_command, "-"]
    # srun gives each rank all of its own standard input.
    ticket = given.ticket.encode().encode()
    return [_Local("srun", words, env, given, scancel=not inside, advise=_why_no_slurm, ticket=ticket)]


def _why_no_slurm(hosts: Sequence[str]) -> str:
    """That no Slurm answers this machine, and what to do; nothing if one does, as ``scontrol ping`` finds out."""
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, timeout=_PING_S)
    except FileNotFoundError:
        return ""  # it comes with srun; without it nothing is known
    except subprocess.TimeoutExpired:
        said = f"no answer within {_PING_S:.0f} s"
    else:
        if done.returncode == 0:
            return ""
        words = done.stdout.splitlines()[:1] or done.stderr.splitlines()[-1:] or [b"it says nothing"]
        said = words[0].decode(errors="replace")[:200]
    named = f"{', '.join(hosts[:8])}{f' and {len(hosts) - 8} more' if len(hosts) > 8 else ''}"
    return (
        f"no Slurm controller answers {socket.gethostname()}, from where srun was to start ranks on {named} "
        f"(`scontrol ping`: {said}). --how srun needs a running Slurm that takes jobs from this machine: `sinfo` must "
        "list these nodes; if its configuration is not in Slurm's own place, SLURM_CONF names it. Without a Slurm, "
        "take --how ssh or --how torchrun, and hosts that ssh reaches"
    )
