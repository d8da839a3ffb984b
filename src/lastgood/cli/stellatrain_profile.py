"""`lastgood stellatrain profile` and `plot-profile`: how the loss lags behind, by batch size and compression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json, emit_table, reporter
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.sparse.control.profile import Profile

__all__ = ["plot_profile", "profile"]


def profile(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="JSON; goes on with what it holds already.")],
    workload: Annotated[str, typer.Option(help="A workload, for instance resnet18.")] = "resnet18",
    probes: Annotated[int, typer.Option(min=5, max=10_000, help="Points to be tried in all.")] = 15,
    part_samples: Annotated[int, typer.Option(min=8, help="Samples that each probe trains on.")] = 2048,
    least_samples: Annotated[int, typer.Option(min=1, help="Smallest batch, of all workers together.")] = 8,
    most_samples: Annotated[int, typer.Option(min=2, help="Largest one.")] = 64,
    least_compression: Annotated[float, typer.Option(help="Least share of the gradient that is not sent.")] = 0.9,
    most_compression: Annotated[float, typer.Option(help="Largest one.")] = 0.999,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Of each probe, with other weights and samples.")] = 1,
    compressor: Annotated[str, typer.Option(help="topk, threshold, v16 or randomk.")] = "v16",
    staleness: Annotated[int, typer.Option(min=0, max=1, help="Iterations between sending and applying.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Workers, for the price of a point.")] = 2,
    mbit_per_s: Annotated[float, typer.Option(help="Of their links, likewise.")] = 100.0,
    lambda_: Annotated[float, typer.Option("--lambda", help="Weight of the loss's lag, likewise.")] = 5.0,
    g_scale: Annotated[float, typer.Option(help="Scale of the lag, likewise.")] = 1.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compute with [default: torch's].")] = None,
    configfile: Annotated[
        Path | None, typer.Option(help="A configuration file [default: the checkout's config/laptop.yaml].")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override one key of the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile to stdout as JSON.")] = False,
) -> None:
    """Train a workload for a part of an epoch at many batch sizes and compressions, and fit the lag of its loss.

    The lag is the loss less that of the smallest batch without compression and staleness. Each probe is kept as it
    ends: called again, it goes on.
    """
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.plan.load import load_config
    from lastgood.sparse.control.profile import Wanted, begin_profile, write_profile

    overrides = parse_overrides(config or [])
    settings = load_config(configfile or find_root() / "config" / "laptop.yaml", overrides)
    try:
        wanted = Wanted(
            workload=workload,
            parameters=settings.workload_options(workload).parameters(),
            seed=settings.seed,
            compressor=compressor,
            staleness=staleness,
            part_samples=part_samples,
            repeats=repeats,
            least_samples=least_samples,
            most_samples=most_samples,
            least_compression=least_compression,
            most_compression=most_compression,
            nodes=nodes,
            mbit_per_s=mbit_per_s,
            lambda_=lambda_,
            g_scale=g_scale,
        )
    except ValueError as error:
        raise ConfigError(f"no profile has these options: {' '.join(str(error).split())[:300]}") from error
    held = begin_profile(out, wanted)
    report = reporter("profile")

    from lastgood._lazy import torch
    from lastgood.sparse.control.profiler import profile_on
    from lastgood.training.loop import configure_compute
    from lastgood.training.sparse_probe import Probed, probe

    configure_compute(threads or torch.get_num_threads(), deterministic=settings.device == "cpu")

    def probed(samples: int, compression: float, compressor: str, staleness: int) -> list[Probed]:
        return [
            probe(
                lambda: settings.model_copy(update={"seed": settings.seed + number}).build_workload(workload),  # noqa: B023 - called at once
                settings.device,
                samples=samples,
                compression=compression,
                compressor=compressor,
                staleness=staleness,
                part_samples=part_samples,
                first_sample=number * part_samples,
            )
            for number in range(repeats)
        ]

    def baseline() -> Sequence[float]:
        return [one.loss for one in probed(least_samples, 0.0, "none", 0)]

    def trial(samples: int, compression: float) -> tuple[Sequence[float], int, float]:
        found = probed(samples, compression, compressor, staleness)
        return [one.loss for one in found], found[0].steps, sum(one.step_s for one in found) / len(found)

    def keep(now: Profile) -> None:
        write_profile(out, now)
        if now.probes:
            one = now.probes[-1]
            report(
                f"{len(now.probes)} of {probes}: batches of {one.samples}, compression {one.compression:.4g}: "
                f"lag {one.lag:+.4g}, {one.step_s * 1e3:.0f} ms a step"
            )

    found = profile_on(held, probes, baseline, trial, keep)
    if as_json:
        emit_json(found.model_dump(mode="json"))
        return
    emit_table(
        f"{workload}: lag of the loss after {part_samples} samples",
        ("batch", "compression", "lag", "steps", "ms a step"),
        (
            (one.samples, f"{one.compression:.4f}", f"{one.lag:+.4f}", one.steps, f"{one.step_s * 1e3:.0f}")
            for one in sorted(found.probes, key=lambda one: (one.samples, one.compression))
        ),
    )


def plot_profile(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.", show_default=False)],
    out_stem: Annotated[Path, typer.Option(help="Path of the pictures without .pdf, .png, .svg.")],
) -> None:
    """Draw a profile's surface, how sure it is, and its probes, as PDF, PNG and SVG."""
    from lastgood.experiments.plots.profile import plot_profile as draw
    from lastgood.sparse.control.profile import read_profile

    for picture in draw(read_profile(path), str(path), out_stem):
        console.print(str(picture))
