"""What `lastgood mirror run` and `mirror update` share: the options of a mirror node, and how it is served."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.mirror.handover.turn import Stages
    from lastgood.mirror.job.description import JobDescription
    from lastgood.mirror.node.settings import NodeSettings

__all__ = [
    "Agents",
    "Cpus",
    "Directory",
    "Fresh",
    "Job",
    "Listen",
    "LogMemory",
    "Memory",
    "ResyncFrom",
    "Slots",
    "SpillEvery",
    "Threads",
    "TokenFile",
    "Watch",
    "serve_node",
    "watched_addresses",
    "watched_ranks",
]

_STATE_BYTES = 1 << 40

Job = Annotated[Path, typer.Option(help="What `lastgood mirror describe` wrote.")]
Directory = Annotated[Path, typer.Option("--dir", help="Folder of the node: its lock, status and spills.")]
Watch = Annotated[
    list[str],
    typer.Option(
        metavar="HOST[=RANK]", help="Host or address whose port is mirrored; again for each, as the ranks' own ones."
    ),
]
Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve; port 0: a free one.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the secret (mode 600); made if it is not there. [default: DIR/token]")
]
Slots = Annotated[int, typer.Option(min=2, help="Steps whose gradients are held beside the state.")]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="Limit for the state; 0: what is available.")]
LogMemory = Annotated[str, typer.Option(metavar="SIZE", help="For gradients that come while it is blind.")]
Threads = Annotated[int, typer.Option(min=1, help="Of the optimizer.")]
Cpus = Annotated[str | None, typer.Option(help="CPUs for the optimizer, as 0-3,8.")]
SpillEvery = Annotated[int, typer.Option(min=0, help="Steps between two that are made durable; 0: none.")]
ResyncFrom = Annotated[Path | None, typer.Option(help="Folder of ordinary checkpoints that a blind node goes on from.")]
Agents = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where agents in the training (mirror_agent) connect.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Take weights that are those of no held step for a new beginning.")
]


def serve_node(
    job: Path,
    directory: Path,
    make_stages: Callable[[JobDescription, NodeSettings], Stages],
    sees: str,
    *,
    listen: str,
    token_file: Path | None,
    slots: int,
    memory: str,
    log_memory: str,
    threads: int,
    cpus: str | None,
    spill_every: int,
    resync_from: Path | None,
    agents: str | None,
    fresh: bool,
    once: bool,
) -> None:
    """Follow what `make_stages` extracts, and serve it until SIGTERM or Ctrl-C; `sees` says what that is."""
    import logging
    import os

    from lastgood.checkpointers.export.newest import read_newest
    from lastgood.gradients.shadow.launch_env import own_cpus
    from lastgood.gradients.shadow.settings import ShadowSettings
    from lastgood.mirror.agent.door import AgentDoor
    from lastgood.mirror.job.description import read_job
    from lastgood.mirror.node.node import SPILL_FOLDER, MirrorNode
    from lastgood.mirror.node.resync import Resync
    from lastgood.mirror.node.settings import NodeSettings
    from lastgood.tokens import read_token
    from lastgood.units import option_bytes
    from lastgood.wire.gate import open_listener

    logging.getLogger("lastgood").setLevel(logging.INFO)
    described = read_job(job)
    token = token_file or directory / "token"
    settings = NodeSettings(spill_every=spill_every, log_bytes=option_bytes("--log-memory", log_memory), fresh=fresh)
    shadow = ShadowSettings(
        0,
        1,
        slots=slots,
        limit_bytes=option_bytes("--memory", memory),
        threads=threads,
        cpus=own_cpus(cpus, os.environ),
        spill_directory=directory / SPILL_FOLDER if spill_every else None,
    )
    with ExitStack() as stack:
        stages = stack.enter_context(closing(make_stages(described, settings)))
        node = stack.enter_context(
            closing(
                MirrorNode(
                    described,
                    directory,
                    stages,
                    token_file=token,
                    serves=_host_port("--listen", listen),
                    settings=settings,
                    shadow=shadow,
                    resync=Resync(read_newest, resync_from, directory),
                )
            )
        )
        if agents is not None:
            door = AgentDoor(open_listener(*_host_port("--agents", agents)), read_token(token), most_bytes=_STATE_BYTES)
            node.take_agents(stack.enter_context(closing(door)))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: node.stop())
        console.print(f"mirror node at {node.address}: {sees}")
        node.run(serve_on=not once)
        stands = node.status()
        console.print(f"mirror node: {stands.stands}; holds steps {', '.join(map(str, stands.held)) or 'none'}")
        if stands.blind:
            console.print(f"mirror node: {stands.blind}")


def watched_addresses(watch: list[str]) -> list[str]:
    """Of watched hosts: as written, of a node of the testbed, or as this machine resolves them. Raises ConfigError."""
    return [_address(one.partition("=")[0]) for one in watch]


def watched_ranks(watch: list[str]) -> dict[str, int]:
    """Ranks of watched addresses, of those that say it as HOST=RANK. Raises ConfigError."""
    found = {}
    for one in watch:
        host, sign, rank = one.partition("=")
        if sign and not (rank.isdecimal() and len(rank) < 8):
            raise ConfigError(f"--watch {one}: it is HOST, or HOST=RANK with the rank of the process there")
        if sign:
            found[_address(host)] = int(rank)
    return found


def _host_port(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"{option} {text}: it is HOST:PORT")
    return host.strip("[]"), int(port)


def _address(host: str) -> str:
    """The address of a watched host: as it is written, of a node of the testbed, or as this machine resolves it."""
    import ipaddress
    import socket

    from lastgood.cluster.testbed.testbed import Testbed
    from lastgood.errors import LastgoodError

    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return Testbed.load().address(host)
    except LastgoodError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--watch {host}: neither an address, nor a node of the testbed, nor a name that this machine knows"
        ) from error
