"""`lastgood trace`: traces of clusters whose machines come and go; make one, look at one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.experiments.traces.trace import SpotTrace

__all__ = ["app"]

app = App(help="Traces of clusters whose machines come and go: make one, look at one.")


@app.command()
def make(
    kind: Annotated[
        Literal["poisson", "weibull", "bursts"],
        typer.Option(help="How failures fall: one by one, ageing, or in bursts."),
    ],
    out: Annotated[Path, typer.Option(help="The trace file to write.")],
    mtbf_h: Annotated[
        float | None,
        typer.Option(help="poisson, bursts: hours between two failures (bursts) of the cluster in the mean."),
    ] = None,
    shape: Annotated[
        float | None, typer.Option(help="weibull: below 1 failures cluster, above 1 they come evenly.")
    ] = None,
    scale_h: Annotated[float | None, typer.Option(help="weibull: the scale in hours.")] = None,
    burst: Annotated[float | None, typer.Option(help="bursts: machines that fail at once, in the mean.")] = None,
    hours: Annotated[float, typer.Option(help="Length of the trace.")] = 24.0,
    period_s: Annotated[float, typer.Option(help="Seconds between samples.")] = 63.0,
    gpus: Annotated[int, typer.Option(help="GPUs of the full cluster; a machine has four.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same trace.")] = 0,
) -> None:
    """Make a trace by the rules of chance. The file appears complete or not at all."""
    from lastgood.experiments.traces import synthetic as trace_make

    given = {"mtbf_h": mtbf_h, "shape": shape, "scale_h": scale_h, "burst": burst}
    makers: dict[str, tuple[Callable[..., SpotTrace], tuple[str, ...]]] = {
        "poisson": (trace_make.poisson_trace, ("mtbf_h",)),
        "weibull": (trace_make.weibull_trace, ("shape", "scale_h")),
        "bursts": (trace_make.bursts_trace, ("mtbf_h", "burst")),
    }
    function, needs = makers[kind]
    _check_given(kind, given, needs)
    chosen = {name: given[name] for name in needs}
    trace = function(**chosen, hours=hours, period_s=period_s, gpus=gpus, seed=seed)
    trace.write(out)
    console.print(f"{out}: {len(trace.gpus)} samples, {trace.failures} failures")


@app.command()
def show(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace file.", show_default=False)],
    window_s: Annotated[
        float | None, typer.Option(help="Also show the stretch that a measured run of so many seconds lives through.")
    ] = None,
    failures: Annotated[int, typer.Option(min=1, help="Failures of that run, at most.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")] = False,
) -> None:
    """Say how long a trace is, how many failures it holds, and when."""
    from lastgood.experiments.traces.trace import load_trace
    from lastgood.units import format_seconds

    found = load_trace(trace)
    times = found.failure_times_s()
    facts: dict[str, object] = {
        "samples": len(found.gpus),
        "period_s": found.period_s,
        "duration_s": found.duration_s,
        "failures": found.failures,
        "mean_between_failures_s": found.duration_s / found.failures if found.failures else None,
        "gpus_least": min(found.gpus),
        "gpus_most": max(found.gpus),
        "sha256": found.digest,
    }
    stretch = found.stretch(window_s, failures) if window_s is not None else None
    if stretch is not None:
        facts |= {
            "stretch_start_s": stretch.start_s,
            "stretch_s": stretch.length_s,
            "compression": stretch.factor,
            "window_failures_s": list(stretch.failures_s),
        }
    if as_json:
        emit_json({**facts, "failure_times_s": list(times)})
        return
    emit_table(str(trace), ("", ""), ((name, value) for name, value in facts.items()))
    emit_table(
        "Failures",
        ("from", "to", "failures"),
        ((format_seconds(hour * 3600), format_seconds((hour + 1) * 3600), count) for hour, count in _by_hour(times)),
    )


def _by_hour(times: tuple[float, ...]) -> list[tuple[int, int]]:
    counts = Counter(int(time // 3600) for time in times)
    return [(hour, count) for hour, count in sorted(counts.items()) if hour < 10_000]


def _check_given(kind: str, given: dict[str, float | None], needs: tuple[str, ...]) -> None:
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if name in needs and value is None:
            raise ConfigError(f"--kind {kind} needs {option}")
        if name not in needs and value is not None:
            raise ConfigError(f"--kind {kind} does not take {option}")
