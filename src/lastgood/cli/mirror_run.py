"""`lastgood mirror run`: FlowCheck's mirror node, all stages in one process (docs/flowcheck.md)."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameSource

__all__ = ["run"]

_STATE_BYTES = 1 << 40
_RING_S = 60.0
"""How long `mirror dump` may take to make its ring."""


def run(
    job: Annotated[Path, typer.Option(help="What `lastgood mirror describe` wrote.")],
    directory: Annotated[Path, typer.Option("--dir", help="Folder of the node: its lock, status and spills.")],
    watch: Annotated[
        list[str], typer.Option(help="Host or address whose port is mirrored; again for each, as the ranks' own ones.")
    ],
    interface: Annotated[
        list[str] | None,
        typer.Option(help="Interface that mirrored frames come to; again for each of several. Needs root."),
    ] = None,
    pcap: Annotated[Path | None, typer.Option(help="A pcap or pcapng file instead of an interface.")] = None,
    ring: Annotated[
        Path | None,
        typer.Option(help="The ring that a `lastgood mirror dump` of its own fills, instead of an interface."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve; port 0: a free one.")
    ] = "127.0.0.1:7300",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the secret (mode 600); made if it is not there. [default: DIR/token]")
    ] = None,
    kernel_ring: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the kernel's ring: a step's traffic.")
    ] = "256MiB",
    slots: Annotated[int, typer.Option(min=2, help="Steps whose gradients are held beside the state.")] = 4,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Limit for the state; 0: what is available.")] = "0",
    log_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="For gradients that come while it is blind.")
    ] = "1GiB",
    threads: Annotated[int, typer.Option(min=1, help="Of the optimizer.")] = 1,
    cpus: Annotated[str | None, typer.Option(help="CPUs for the optimizer, as 0-3,8.")] = None,
    spill_every: Annotated[int, typer.Option(min=0, help="Steps between two that are made durable; 0: none.")] = 0,
    resync_from: Annotated[
        Path | None, typer.Option(help="Folder of ordinary checkpoints that a blind node goes on from.")
    ] = None,
    agents: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where agents in the training (mirror_agent) connect.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Take weights that are those of no held step for a new beginning.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --pcap or --ring: end with it, instead of serving on.")
    ] = False,
) -> None:
    """Follow a training from its mirrored packets, and serve its newest states. Ends with SIGTERM or Ctrl-C."""
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
    from lastgood.mirror.node.stages import conversation_for, parser_for
    from lastgood.tokens import read_token
    from lastgood.units import option_bytes
    from lastgood.wire.gate import open_listener

    logging.getLogger("lastgood").setLevel(logging.INFO)
    if sum(given is not None for given in (interface, pcap, ring)) != 1:
        raise ConfigError("name one of --interface, --pcap and --ring")
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
    watched = [_address(one) for one in watch]
    with ExitStack() as stack:
        source = stack.enter_context(
            closing(_source(interface, pcap, ring, option_bytes("--kernel-ring", kernel_ring)))
        )
        node = stack.enter_context(
            closing(
                MirrorNode(
                    described,
                    directory,
                    source,
                    parser_for(described),
                    conversation_for(described, watched),
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
            node.door = stack.enter_context(closing(door))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: node.stop())
        place = pcap or ring or ", ".join(interface or ())
        console.print(f"mirror node at {node.address}: watches {', '.join(watched)} on {place}")
        node.run(serve_on=not once)
        stands = node.status()
        console.print(f"mirror node: {stands.stands}; holds steps {', '.join(map(str, stands.held)) or 'none'}")
        if stands.blind:
            console.print(f"mirror node: {stands.blind}")


def _source(interfaces: list[str] | None, pcap: Path | None, ring: Path | None, ring_bytes: int) -> FrameSource:
    if pcap is not None:
        from lastgood.mirror.capture.files import CaptureFile

        return CaptureFile(pcap)
    if ring is not None:
        from lastgood.mirror.capture.ring import RingReader

        return RingReader(ring, wait_s=_RING_S)
    from lastgood.mirror.capture.interface import InterfaceSource

    assert interfaces  # one of the three was given
    first, *others = interfaces
    return InterfaceSource(first, also=others, ring_bytes=ring_bytes)


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
