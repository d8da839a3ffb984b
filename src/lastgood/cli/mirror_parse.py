"""`lastgood mirror parse|extract`: stages of a mirror node as processes of their own (docs/flowcheck.md)."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._mirror_node import Job, Watch, watched_addresses, watched_ranks
from lastgood.cli._mirror_stages import (
    EXTRACTED_RING,
    MOST_MESSAGE_BYTES,
    PARSED_RING,
    RING_S,
    Core,
    OutSize,
    Patience,
    pin,
    print_line,
    stop_by_signal,
)
from lastgood.cli._output import console
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.mirror.capture.frames import FrameSource

__all__ = ["extract", "parse"]


def parse(
    job: Job,
    ring: Annotated[
        Path | None,
        typer.Option(help="Ring that `lastgood mirror dump` fills [default: /dev/shm/lastgood-frames]."),
    ] = None,
    pcap: Annotated[Path | None, typer.Option(help="A pcap or pcapng file instead of that ring.")] = None,
    out: Annotated[Path, typer.Option(help="Ring that `lastgood mirror extract` reads.")] = PARSED_RING,
    out_size: OutSize = "64MiB",
    core: Core = None,
    patience: Patience = 60.0,
) -> None:
    """Make messages of frames, both directions of each connection, for `lastgood mirror extract`.

    While the next stage takes nothing, frames wait in the ring of `mirror dump`, which counts those that find no room.
    Ends with that ring, with SIGTERM or Ctrl-C, and prints all counters as a line of JSON.
    """
    from lastgood.mirror.capture.memory import check_memory
    from lastgood.mirror.handover.apart import run_parse
    from lastgood.mirror.handover.pipe import PARSED, PipeWriter
    from lastgood.mirror.job.description import read_job
    from lastgood.mirror.node.stages import parser_for
    from lastgood.units import option_bytes

    if ring is not None and pcap is not None:
        raise ConfigError("name one of --ring and --pcap")
    described, nbytes = read_job(job), option_bytes("--out-size", out_size)
    check_memory({"ring": nbytes})
    if core is not None:
        pin(core)
    stop = stop_by_signal()
    with ExitStack() as stack:
        source = stack.enter_context(closing(_source(ring, pcap)))
        writer = stack.enter_context(closing(PipeWriter(out, nbytes, PARSED, patience_s=patience)))
        console.print(f"mirror parse: messages go to {out}; end it with Ctrl-C")
        print_line(run_parse(source, parser_for(described), writer, stop))


def extract(
    job: Job,
    watch: Watch,
    ring: Annotated[Path, typer.Option(help="The ring that `lastgood mirror parse` fills.")] = PARSED_RING,
    out: Annotated[Path, typer.Option(help="Ring that `lastgood mirror update` reads.")] = EXTRACTED_RING,
    out_size: OutSize = "64MiB",
    core: Core = None,
    patience: Patience = 60.0,
) -> None:
    """Put gradients, weights and buffers together from messages, for `lastgood mirror update`.

    Ends with the stage before it, with SIGTERM or Ctrl-C, and prints all counters as a line of JSON.
    """
    from lastgood.mirror.capture.memory import check_memory
    from lastgood.mirror.handover.apart import run_extract
    from lastgood.mirror.handover.pipe import EXTRACTED, PARSED, PipeReader, PipeWriter
    from lastgood.mirror.job.description import read_job
    from lastgood.mirror.node.settings import NodeSettings
    from lastgood.mirror.node.stages import extractor_for
    from lastgood.units import option_bytes

    described, watched = read_job(job), watched_addresses(watch)
    nbytes = option_bytes("--out-size", out_size)
    check_memory({"ring": nbytes})
    if core is not None:
        pin(core)
    stop = stop_by_signal()
    with ExitStack() as stack:
        reader = stack.enter_context(closing(PipeReader(ring, PARSED, most_bytes=MOST_MESSAGE_BYTES, wait_s=RING_S)))
        writer = stack.enter_context(closing(PipeWriter(out, nbytes, EXTRACTED, patience_s=patience)))
        console.print(f"mirror extract: watches {', '.join(watched)}; gradients go to {out}; end it with Ctrl-C")
        extractor = extractor_for(described, watched, NodeSettings(), watched_ranks(watch))
        print_line(run_extract(reader, extractor, writer, stop))


def _source(ring: Path | None, pcap: Path | None) -> FrameSource:
    if pcap is not None:
        from lastgood.mirror.capture.files import CaptureFile

        return CaptureFile(pcap)
    from lastgood.mirror.capture.ring import DEFAULT_RING, RingReader

    return RingReader(DEFAULT_RING if ring is None else ring, wait_s=RING_S)
