"""`lastgood mirror run`: FlowCheck's mirror node, all stages in one process (docs/flowcheck.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli import _mirror_node as node
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameSource
    from lastgood.mirror.handover.turn import Stages
    from lastgood.mirror.job.description import JobDescription
    from lastgood.mirror.node.settings import NodeSettings

__all__ = ["run"]

_RING_S = 60.0
"""How long `mirror dump` may take to make its ring."""


def run(
    job: node.Job,
    directory: node.Directory,
    watch: node.Watch,
    interface: Annotated[
        list[str] | None,
        typer.Option(help="Interface that mirrored frames come to; again for each of several. Needs root."),
    ] = None,
    pcap: Annotated[Path | None, typer.Option(help="A pcap or pcapng file instead of an interface.")] = None,
    ring: Annotated[
        Path | None,
        typer.Option(help="The ring that a `lastgood mirror dump` of its own fills, instead of an interface."),
    ] = None,
    listen: node.Listen = "127.0.0.1:7300",
    token_file: node.TokenFile = None,
    kernel_ring: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the kernel's ring: a step's traffic.")
    ] = "256MiB",
    slots: node.Slots = 4,
    memory: node.Memory = "0",
    log_memory: node.LogMemory = "1GiB",
    threads: node.Threads = 1,
    cpus: node.Cpus = None,
    spill_every: node.SpillEvery = 0,
    resync_from: node.ResyncFrom = None,
    agents: node.Agents = None,
    fresh: node.Fresh = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --pcap or --ring: end with it, instead of serving on.")
    ] = False,
) -> None:
    """Follow a training from its mirrored packets, and serve its newest states. Ends with SIGTERM or Ctrl-C."""
    from lastgood.units import option_bytes

    if sum(given is not None for given in (interface, pcap, ring)) != 1:
        raise ConfigError("name one of --interface, --pcap and --ring")
    watched, ranks = node.watched_addresses(watch), node.watched_ranks(watch)
    ring_bytes = option_bytes("--kernel-ring", kernel_ring)

    def stages(described: JobDescription, settings: NodeSettings) -> Stages:
        from lastgood.mirror.node.stages import local_stages

        return local_stages(_source(interface, pcap, ring, ring_bytes), described, watched, settings, ranks)

    node.serve_node(
        job,
        directory,
        stages,
        f"watches {', '.join(watched)} on {pcap or ring or ', '.join(interface or ())}",
        listen=listen,
        token_file=token_file,
        slots=slots,
        memory=memory,
        log_memory=log_memory,
        threads=threads,
        cpus=cpus,
        spill_every=spill_every,
        resync_from=resync_from,
        agents=agents,
        fresh=fresh,
        once=once,
    )


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
