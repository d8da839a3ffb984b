"""`lastgood mirror generate`: RoCEv2 traffic of a ring's all-reduces, with its truth beside it (docs/flowcheck.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lastgood.cli._output import console
from lastgood.errors import ConfigError

__all__ = ["generate"]


def generate(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A new pcapng file.")] = None,
    interface: Annotated[str | None, typer.Option(help="Send the frames there instead. Needs root.")] = None,
    truth: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights and reduced gradients, a new npz file.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same frames.")] = 0,
    ranks: Annotated[int, typer.Option(help="Ranks in the ring.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 4,
    parameters: Annotated[
        str, typer.Option(metavar="SHAPES", help="Of the model, in the module's order, as 64x32,64.")
    ] = "256x128,256,128x256,128",
    watch: Annotated[str, typer.Option(metavar="RANKS", help="Ranks whose ports are mirrored, as 0,1.")] = "0",
    protocol: Annotated[Literal["simple", "ll"], typer.Option(help="NCCL's protocol.")] = "simple",
    nccl: Annotated[str, typer.Option(metavar="VERSION", help="NCCL's version.")] = "2.28",
    channels: Annotated[int, typer.Option(help="Channels that NCCL may use.")] = 1,
    mtu: Annotated[int, typer.Option(help="Payload of a packet, in bytes.")] = 4096,
    adaptive: Annotated[
        Literal["none", "write", "packets"],
        typer.Option(help="Adaptive routing: data as one write, or one for each packet, then the immediate."),
    ] = "none",
    queue_pairs: Annotated[int, typer.Option(min=1, help="Of each connection; messages take turns on them.")] = 1,
    split_data: Annotated[bool, typer.Option("--split-data", help="Cut each message over them instead.")] = False,
    ipv4: Annotated[bool, typer.Option("--ipv4", help="Instead of IPv6.")] = False,
    vlan: Annotated[list[int] | None, typer.Option(help="VLAN tag; twice for two, the outer one first.")] = None,
    rate: Annotated[float, typer.Option(metavar="BITS", help="Bits a second.")] = 1e9,
    first_cap: Annotated[str, typer.Option(metavar="SIZE", help="Of the first rebuilt bucket.")] = "1MiB",
    cap: Annotated[str, typer.Option(metavar="SIZE", help="Of the others.")] = "25MiB",
    loss: Annotated[float, typer.Option(metavar="P", help="Share of frames that the mirror loses.")] = 0.0,
    burst: Annotated[float, typer.Option(metavar="N", help="Mean length of a loss, in frames.")] = 1.0,
    duplication: Annotated[float, typer.Option(metavar="P", help="Frames that come twice.")] = 0.0,
    reordering: Annotated[float, typer.Option(metavar="P", help="Frames that come late.")] = 0.0,
    corruption: Annotated[float, typer.Option(metavar="P", help="Frames with a wrong bit.")] = 0.0,
    nak_every: Annotated[int, typer.Option(metavar="N", help="One in N messages is asked for again; 0: none.")] = 0,
) -> None:
    """Make the RoCEv2 frames of a data-parallel training: as a mirror of some ranks' ports shows them."""
    import numpy as np

    from lastgood.files import storage_errors
    from lastgood.mirror.generate.faults import FaultyMirror, MirrorFaults
    from lastgood.mirror.generate.life import seeded_life
    from lastgood.mirror.generate.output import send_frames, write_pcapng
    from lastgood.mirror.generate.traffic import RingTraffic, Wire, truth_arrays
    from lastgood.units import option_bytes

    if (out is None) == (interface is None):
        raise ConfigError("name one of --out and --interface")
    life = seeded_life(
        seed,
        ranks=ranks,
        steps=steps,
        shapes=_shapes(parameters),
        first_cap_bytes=option_bytes("--first-cap", first_cap),
        cap_bytes=option_bytes("--cap", cap),
    )
    wire = Wire(
        protocol=protocol,
        version=nccl,
        channels=channels,
        mtu=mtu,
        adaptive="" if adaptive == "none" else adaptive,
        six=not ipv4,
        vlans=tuple(vlan or ()),
        queue_pairs=queue_pairs,
        split_data=split_data,
    )
    traffic = RingTraffic(ranks, wire, _numbers("--watch", watch, ","), seed, nak_every)
    faults = MirrorFaults(loss, burst, duplication, reordering, corruption=corruption)
    mirror = FaultyMirror(faults, seed + 1)
    frames = mirror.frames(traffic.frames(life.collectives()))
    if truth is not None:
        with storage_errors(truth, "writing the truth"), truth.open("xb") as file:
            np.savez(file, **truth_arrays(life, wire))  # type: ignore[arg-type] # numpy's stub takes them for options
    if out is not None:
        count = write_pcapng(out, frames, bits_per_s=rate)
    else:
        count = send_frames(str(interface), frames, bits_per_s=rate)
    did = ", ".join(f"{number} {name}" for name, number in sorted(mirror.counters.items()) if name != "frames")
    console.print(f"mirror generate: {count} frames to {out or interface}{': ' + did if did else ''}")


def _shapes(text: str) -> list[tuple[int, ...]]:
    return [_numbers("--parameters", shape, "x") for shape in text.split(",")]


def _numbers(option: str, text: str, between: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(between))
    except ValueError as error:
        raise ConfigError(f"{option} takes whole numbers with {between!r} between, not {text!r}") from error
