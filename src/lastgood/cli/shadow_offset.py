"""`lastgood shadow offset`: where the chunks of a ring all-reduce lie, and which link carries the final sum of each."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from lastgood.cli._output import emit_json, emit_table
from lastgood.errors import ConfigError
from lastgood.units import format_bytes, option_bytes
from lastgood.wire.ring import Cover

__all__ = ["offset"]

_MAX_ROWS = 1_000_000
_DEFAULT_ELEMENT_BYTES = 4


def offset(
    numbers: Annotated[
        list[int], typer.Argument(metavar="NELEM [ELEM_SIZE] NRANKS", help="ELEM_SIZE is 4 by default.")
    ],
    channels: Annotated[int, typer.Option(help="Channels that NCCL may use for this call.")] = 1,
    nccl: Annotated[
        str | None, typer.Option(metavar="VERSION", help="NCCL's version, as 2.28; needed with several channels.")
    ] = None,
    protocol: Annotated[str, typer.Option(help="NCCL's protocol: simple or ll.")] = "simple",
    buffsize: Annotated[str, typer.Option(metavar="SIZE", help="NCCL_BUFFSIZE.")] = "4MiB",
    threads: Annotated[int, typer.Option(help="NCCL_NTHREADS, which shapes the chunks of NCCL up to 2.19.")] = 512,
    cover: Annotated[Cover, typer.Option(help="Which final sends are marked.")] = Cover.BALANCED,
    as_json: Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")] = False,
) -> None:
    """Print which sends of a ring all-reduce are marked as final: link, step, chunk, place in the buffer.

    Each element is in exactly one of them. See docs/wire-format.md for what is certain and what is derived.
    """
    from lastgood.wire.nccl import nccl_layout

    if len(numbers) not in (2, 3):
        raise ConfigError(f"lastgood shadow offset takes NELEM [ELEM_SIZE] NRANKS, not {len(numbers)} numbers")
    elements, ranks = numbers[0], numbers[-1]
    element_bytes = numbers[1] if len(numbers) == 3 else _DEFAULT_ELEMENT_BYTES
    layout = nccl_layout(
        elements,
        element_bytes,
        ranks,
        channels=channels,
        version=nccl,
        protocol=protocol,
        buffer_bytes=option_bytes("--buffsize", buffsize),
        threads=threads,
    )
    sends = list(islice(layout.marked(cover), _MAX_ROWS + 1))
    if len(sends) > _MAX_ROWS:
        raise ConfigError(f"that table has more than {_MAX_ROWS} rows; ask for fewer elements")
    sends.sort(key=lambda send: (send.rank, send.chunk.channel, send.chunk.loop, send.step))
    load = dict.fromkeys(range(ranks), 0)
    for send in sends:
        load[send.rank] += send.chunk.elements * element_bytes
    if as_json:
        emit_json(
            {
                "elements": elements,
                "element_bytes": element_bytes,
                "ranks": ranks,
                "channels": len(layout.ranges),
                "nccl": nccl,
                "protocol": protocol,
                "cover": cover.value,
                "marked_bytes": [
                    {"from": rank, "to": (rank + 1) % ranks, "bytes": nbytes} for rank, nbytes in load.items()
                ],
                "marked": [
                    {
                        "from": send.rank,
                        "to": (send.rank + 1) % ranks,
                        "channel": send.chunk.channel,
                        "loop": send.chunk.loop,
                        "step": send.step,
                        "chunk": send.chunk.index,
                        "first_element": send.chunk.start,
                        "elements": send.chunk.elements,
                        "offset_bytes": send.chunk.start * element_bytes,
                        "bytes": send.chunk.elements * element_bytes,
                    }
                    for send in sends
                ],
            }
        )
        return
    used = len(layout.ranges)
    emit_table(
        f"{elements} elements of {element_bytes} bytes, {ranks} ranks, {used} channels, {cover.value} cover",
        ("link", "channel", "loop", "step", "chunk", "elements", "offset", "bytes"),
        (
            (
                f"{send.rank} to {(send.rank + 1) % ranks}",
                send.chunk.channel,
                send.chunk.loop,
                send.step,
                send.chunk.index,
                f"{send.chunk.start}-{send.chunk.start + send.chunk.elements - 1}",
                send.chunk.start * element_bytes,
                send.chunk.elements * element_bytes,
            )
            for send in sends
        ),
    )
    shares = ", ".join(
        f"{rank} to {(rank + 1) % ranks}: {format_bytes(nbytes)}" for rank, nbytes in load.items() if nbytes
    )
    typer.echo(f"marked on each link: {shares or 'nothing'}")
