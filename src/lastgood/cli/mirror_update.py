"""`lastgood mirror update`: a mirror node whose other stages are processes of their own (docs/flowcheck.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli import _mirror_node as node
from lastgood.cli._mirror_stages import EXTRACTED_RING, MOST_MESSAGE_BYTES, RING_S

if TYPE_CHECKING:
    from lastgood.mirror.handover.turn import Stages
    from lastgood.mirror.job.description import JobDescription
    from lastgood.mirror.node.settings import NodeSettings

__all__ = ["update"]


def update(
    job: node.Job,
    directory: node.Directory,
    ring: Annotated[Path, typer.Option(help="The ring that `lastgood mirror extract` fills.")] = EXTRACTED_RING,
    listen: node.Listen = "127.0.0.1:7300",
    token_file: node.TokenFile = None,
    slots: node.Slots = 4,
    memory: node.Memory = "0",
    log_memory: node.LogMemory = "1GiB",
    threads: node.Threads = 1,
    cpus: node.Cpus = None,
    spill_every: node.SpillEvery = 0,
    resync_from: node.ResyncFrom = None,
    agents: node.Agents = None,
    fresh: node.Fresh = False,
    once: Annotated[bool, typer.Option("--once", help="End with the stages before it, instead of serving on.")] = False,
) -> None:
    """Repeat each update from the gradients that `mirror extract` gives, and serve the newest states, as `mirror run`.

    Serves on if the stages before it end. Ends with SIGTERM or Ctrl-C.
    """

    def stages(_described: JobDescription, _settings: NodeSettings) -> Stages:
        from lastgood.mirror.handover.apart import StagesBefore
        from lastgood.mirror.handover.pipe import EXTRACTED, PipeReader

        return StagesBefore(PipeReader(ring, EXTRACTED, most_bytes=MOST_MESSAGE_BYTES, wait_s=RING_S))

    node.serve_node(
        job,
        directory,
        stages,
        f"takes what is extracted from {ring}",
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
