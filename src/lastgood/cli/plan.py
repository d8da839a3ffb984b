"""`lastgood plan`: the runs of a figure, which of them are done, and how long the others will take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json, emit_table
from lastgood.units import format_seconds

if TYPE_CHECKING:
    from lastgood.experiments.config.schema import Config
    from lastgood.experiments.figures.workflow_plan import PlannedRun
    from lastgood.experiments.plan.grid import Grid
    from lastgood.experiments.records.base import Spec

__all__ = ["plan"]


def plan(
    figure: Annotated[
        str, typer.Argument(help="A figure, as fig8; a panel, as fig8_vgg16; all or paper; or test_simple.")
    ],
    more: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Further overrides.")] = None,
    configfile: Annotated[
        Path | None, typer.Option(help="A configuration file [default: the checkout's config/laptop.yaml].")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override one key of the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan to stdout as JSON.")] = False,
    probe: Annotated[
        bool,
        typer.Option(
            help="If nothing was measured yet, look at this machine for up to 20 s, once, to predict times "
            "[default: if the configuration names no other `machine`]."
        ),
    ] = True,
) -> None:
    """List the runs of FIGURE in the order in which `snakemake FIGURE` makes them, with predicted times.

    Takes the overrides as snakemake does: lastgood plan fig8 --config models=vgg16 intervals=1,10
    """
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.figures.workflow_plan import (
        left_out,
        load_prediction_grid,
        plan_target,
        predict_runs,
        workflow_seconds,
    )
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.plan.load import load_config
    from lastgood.text import parse_json
    from lastgood.units import MIB

    root = find_root()
    overrides = parse_overrides([*(config or []), *(more or [])])
    settings = load_config(configfile or root / "config" / "laptop.yaml", overrides)
    for name, reason in left_out(settings).items():
        typer.echo(f"{name} is left out: {reason}", err=True)
    target = plan_target(settings, figure)
    results = Path(settings.results_dir)
    figures = [panels[0][0] for panels in target.panels]
    grids = {one: load_prediction_grid(root, one) for one in dict.fromkeys(figures)}

    def predicted() -> list[PlannedRun]:
        return predict_runs(target.specs, results, [grids[one] for one in figures])

    runs = predicted()
    if probe and settings.machine is None and not any(run.source == "records" for run in runs):
        grids = _probed(grids, figures, target.specs, settings)
        runs = predicted()
    left = [run for run in runs if not run.done]
    minutes = sum(run.seconds for run in left) / 60
    in_all_s = workflow_seconds(runs, target.panels, results)
    if as_json:
        emit_json(
            {
                "figure": figure,
                "runs": [
                    {
                        "record": str(run.record),
                        "done": run.done,
                        "predicted_s": round(run.seconds, 1),
                        "predicted_from": run.source,
                        "spec": parse_json(run.spec.canonical_json(), "a spec", most_bytes=MIB),
                    }
                    for run in runs
                ],
                "runs_left": len(left),
                "minutes_left": round(minutes, 1),
                "minutes_of_workflow": round(in_all_s / 60, 1),
            }
        )
        return
    emit_table(
        f"Runs of {figure}, in order",
        ("", "run", "steps", "proof", "state", "seconds", "from"),
        (
            (
                number,
                run.spec.title(),
                getattr(run.spec, "measured_steps", ""),
                "yes" if run.spec.proof else "",
                "done" if run.done else "to do",
                f"{run.seconds:.0f}",
                run.source,
            )
            for number, run in enumerate(runs, start=1)
        ),
    )
    done = len(runs) - len(left)
    rest = ": nothing is left to be measured"
    if left:
        rest = (
            f", {len(left)} left: about {format_seconds(in_all_s)} in the workflow, {format_seconds(minutes * 60)} of "
            "it in runs"
        )
    console.print(f"{len(runs)} runs, {done} done{rest}")


def _probed(grids: dict[str, Grid], figures: Sequence[str], specs: Sequence[Spec], settings: Config) -> dict[str, Grid]:
    """`grids`, if nothing else is known of this machine, by a look at it, which is kept beside its records."""
    from lastgood.errors import LastgoodError
    from lastgood.experiments.runs.probe import load_probe, probe_file, probe_machine, with_probe_of_kind

    path = probe_file(settings)

    def report(text: str) -> None:
        console.print(text, markup=False)

    try:
        scratch = settings.scratch_folder
        found = load_probe(path, specs, scratch) or probe_machine(specs, Path(settings.data_dir), scratch, path, report)
    except LastgoodError as error:
        report(f"no probe of this machine: {error}")
        return grids
    if found is None:
        return grids
    return with_probe_of_kind(grids, figures, specs, found, settings.scale)
