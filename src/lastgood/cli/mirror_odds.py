"""`lastgood mirror odds`: how often a mirror's losses cost a step, and which ranks to watch (docs/flowcheck.md)."""

from __future__ import annotations

from typing import Annotated

import typer

from lastgood.cli._output import emit_json, emit_table
from lastgood.errors import ConfigError

__all__ = ["odds"]

_SHOWN = 8


def odds(
    ranks: Annotated[int, typer.Option(help="Ranks in the ring.")],
    gradient: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of gradients that a step reduces.")],
    loss: Annotated[float, typer.Option(metavar="P", help="Share of packets that the mirror loses.")] = 1e-9,
    mtu: Annotated[int, typer.Option(help="Payload of a packet, in bytes.")] = 4096,
    ll: Annotated[bool, typer.Option("--ll", help="NCCL's protocol LL: half of each packet is data.")] = False,
    watch: Annotated[
        str | None, typer.Option(metavar="RANKS", help="Watched ranks, as 0,4 [default: what is best].")
    ] = None,
    count: Annotated[int, typer.Option(help="Without --watch: how many ranks may be watched.")] = 1,
    burst: Annotated[float, typer.Option(metavar="N", help="Mean length of a loss, for the simulation.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Simulate so many steps too.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")] = False,
) -> None:
    """Print the probability that a step is lost, for watched ranks or for the best choices of them.

    The formula takes the losses of different copies as independent; the simulation also knows bursts.
    """
    from lastgood.mirror.odds import Loss, RingJob, Watching, chunk_copies, lost_step_probability, propose, simulate
    from lastgood.units import option_bytes

    job = RingJob(ranks, option_bytes("--gradient", gradient), mtu // 2 if ll else mtu)
    how = Loss(loss, burst)
    if watch is None:
        choices = propose(job, count, loss)[:_SHOWN]
    else:
        watched = _ranks(watch)
        copies = chunk_copies(ranks, watched)
        times = {number: copies.count(number) for number in sorted(set(copies))}
        choices = [Watching(watched, times, lost_step_probability(job, watched, loss))]
    simulated = [simulate(job, one.watched, how, steps, seed) if steps else None for one in choices]
    if as_json:
        emit_json(
            {
                "ranks": ranks,
                "packets": job.ranks * job.chunk_packets,
                "loss": loss,
                "choices": [
                    {
                        "watched": list(one.watched),
                        "copies": {str(times): chunks for times, chunks in one.copies.items()},
                        "lost_step_probability": one.probability,
                        "simulated": share,
                    }
                    for one, share in zip(choices, simulated, strict=True)
                ],
            }
        )
        return
    emit_table(
        f"{ranks} ranks, {job.ranks * job.chunk_packets} packets of final gradients a step, loss {loss:g}",
        ("watched ranks", "chunks by copies", "lost steps", *(["simulated"] if steps else [])),
        (
            (
                ", ".join(map(str, one.watched)),
                ", ".join(f"{chunks} come {times}x" for times, chunks in one.copies.items()),
                f"{one.probability:.2g}",
                *([f"{share:.2g}"] if share is not None else []),
            )
            for one, share in zip(choices, simulated, strict=True)
        ),
    )


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--watch takes ranks as 0,4, not {text!r}") from error
