"""`lastgood stellatrain replay`: the controller on a bandwidth trace, beside the best fixed setting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import emit_json, emit_table
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.sparse.control.replay import Outcome

__all__ = ["replay"]

_SHOWN = 5


def replay(
    trace: Annotated[Path, typer.Argument(help="CSV of second, mbit_per_s and, if links differ, node.")],
    nodes: Annotated[int, typer.Option(help="How many workers.")] = 2,
    elements: Annotated[int, typer.Option(help="Of the gradient [default: ResNet-18].")] = 11_181_642,
    samples: Annotated[int, typer.Option(help="Of all batches together.")] = 64,
    most_samples: Annotated[int | None, typer.Option(help="The batch may grow up to that.")] = None,
    alpha_ms: Annotated[str, typer.Option(metavar="MS,..", help="Computing for each sample, of each worker.")] = "10",
    beta_ms: Annotated[str, typer.Option(metavar="MS,..", help="Computing for each iteration.")] = "50",
    least_compression: Annotated[float, typer.Option(help="Never less, whatever links give.")] = 0.0,
    overlap: Annotated[float, typer.Option(help="Part of the computing that hides an exchange.")] = 1.0,
    surface: Annotated[
        Path | None, typer.Option(help="JSON of samples, compressions, lags [default: an assumed one].")
    ] = None,
    lambda_: Annotated[float, typer.Option("--lambda", help="Weight of the loss's lag.")] = 5.0,
    g_scale: Annotated[float, typer.Option(help="Scale of the lag.")] = 1.0,
    noise: Annotated[float, typer.Option(help="Relative spread of computing times.")] = 0.05,
    every: Annotated[int, typer.Option(help="Iterations between decisions.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the chance in computing times and in the search.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")] = False,
) -> None:
    """Simulate a training whose links follow a trace: the controller, and fixed settings beside it.

    Useful samples are samples less what the loss's lag makes a training repeat. Nothing is measured here.
    """
    from lastgood.sparse.control.controller import ControllerSettings
    from lastgood.sparse.control.replay import ASSUMED_SURFACE, Plant, read_surface, read_trace
    from lastgood.sparse.control.replay import replay as run

    if not 0 <= noise <= 0.5:
        raise ConfigError(f"--noise {noise}: 0 to 0.5")
    found = read_trace(trace, nodes)
    plant = Plant(_each("--alpha-ms", alpha_ms, nodes), _each("--beta-ms", beta_ms, nodes), noise)
    try:
        settings = ControllerSettings(
            elements=elements,
            samples=samples,
            most_samples=most_samples,
            least_compression=least_compression,
            overlap=overlap,
            lambda_=lambda_,
            g_scale=g_scale,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(f"these options cannot be: {' '.join(str(error).split())[:300]}") from error
    measured = ASSUMED_SURFACE if surface is None else read_surface(surface)
    controlled, fixed = run(found, plant, settings, measured, every=every, seed=seed)
    gain = controlled.useful_per_s / fixed[0].useful_per_s
    if as_json:
        emit_json(
            {
                "trace": str(trace),
                "seed": seed,
                "surface": "assumed" if surface is None else str(surface),
                "gain_over_best_fixed": gain,
                "controller": {
                    **_row(controlled),
                    "settings": [one.model_dump(mode="json") for one in controlled.settings],
                },
                "fixed": [_row(one) for one in fixed],
            }
        )
        return
    emit_table(
        f"{trace.name}: {found.length_s:g} s, {nodes} workers, seed {seed}; the controller makes {gain:.2f} of the "
        "best fixed setting",
        ("setting", "useful samples/s", "samples/s", "s/iteration", "waiting", "changes"),
        ((one.name, *_cells(one)) for one in (controlled, *fixed[:_SHOWN], *fixed[_SHOWN:][-1:])),
    )


def _row(one: Outcome) -> dict[str, Any]:
    return {
        "name": one.name,
        "iterations": one.iterations,
        "seconds": one.seconds,
        "samples": one.samples,
        "useful_samples_per_s": one.useful_per_s,
        "waited_s": one.waited_s,
    }


def _cells(one: Outcome) -> tuple[str, ...]:
    return (
        f"{one.useful_per_s:.1f}",
        f"{one.samples / one.seconds:.1f}",
        f"{one.seconds / one.iterations:.3f}",
        f"{one.waited_s / one.seconds:.0%}",
        str(max(0, len(one.settings) - 1)),
    )


def _each(option: str, text: str, nodes: int) -> tuple[float, ...]:
    """Milliseconds of each worker in seconds; one number is for all."""
    try:
        found = [float(word) / 1e3 for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers as 10,20, not {text[:80]!r}") from error
    if len(found) == 1:
        found *= nodes
    if len(found) != nodes or not all(0 <= one < 1e4 for one in found):
        raise ConfigError(f"{option} {text[:80]}: one number for all workers, or {nodes}, each 0 to 1e7")
    return tuple(found)
