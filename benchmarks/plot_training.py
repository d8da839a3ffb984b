"""Draws what training.py measured: python benchmarks/plot_training.py RESULTS.json OUT.png (or .pdf, .svg).

Bars are medians of throughput over rounds, whiskers the lowest and highest round, as in every figure of the project.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

from lastgood.experiments.plots.style import BOUND_COLOUR, RC_PARAMS, WIDTHS_IN
from lastgood.experiments.systems.labels import NONE_COLOUR, panel_title, system_styles

_LABELS = {"plain_loop": "plain loop"}


def rates(runs: list[dict[str, Any]], system: str, interval: int) -> list[float]:
    """Iterations per second of training alone, one for each round."""
    return [run["steps"] / run["elapsed_s"] for run in runs if (run["system"], run["interval"]) == (system, interval)]


def draw(workload: str, result: dict[str, Any], where: dict[str, Any], out: Path) -> None:
    runs = result["runs"]
    intervals = sorted(map(int, result["bounds"]))
    systems = sorted({run["system"] for run in runs} - {"none"}, key=lambda name: (name == "pccheck", name))
    styles = system_styles(systems)
    none = statistics.median(rates(runs, "none", 0))
    with plt.rc_context(RC_PARAMS):
        figure, axes = plt.subplots(figsize=(WIDTHS_IN["single"], 2.3), layout="constrained")
        width = 0.8 / len(systems)
        for number, system in enumerate(systems):
            for place, interval in enumerate(intervals):
                values = rates(runs, system, interval)
                if not values:
                    continue
                middle = statistics.median(values)
                axes.bar(
                    place + (number - (len(systems) - 1) / 2) * width,
                    middle,
                    width * 0.92,
                    color=styles[system].colour,
                    label=_LABELS.get(system, styles[system].label) if place == 0 else None,
                    yerr=[[middle - min(values)], [max(values) - middle]],
                    error_kw={"elinewidth": 0.7, "capsize": 1.5},
                )
        axes.axhline(none, color=NONE_COLOUR, linewidth=0.9, label="no checkpoints")
        for place, interval in enumerate(intervals):
            bound = result["bounds"][str(interval)]["iterations_per_s"]
            label = "bound" if place == 0 else None
            axes.plot(
                [place - 0.45, place + 0.45], [bound] * 2, color=BOUND_COLOUR, linewidth=1.2, ls="--", label=label
            )
        axes.set_xticks(range(len(intervals)), [str(interval) for interval in intervals])
        axes.set_xlabel("iterations between checkpoints")
        axes.set_ylabel("iterations/s")
        axes.set_ylim(0, none * 1.3)
        axes.legend(loc="upper left", ncols=2, frameon=False)
        state = result["state_bytes"] / 1e9
        axes.set_title(
            f"{panel_title('', workload).removeprefix(': ')}, state {state:.3g} GB, {where['name']}",
            fontsize=7.5,
            loc="left",
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=200)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    measured = json.loads(options.results.read_text(encoding="utf-8"))
    for workload in measured["settings"]["workloads"]:
        several = len(measured["settings"]["workloads"]) > 1
        out = options.out.with_stem(f"{options.out.stem}_{workload}") if several else options.out
        where = {"name": measured["machine"]["name"] if isinstance(measured["machine"], dict) else measured["machine"]}
        draw(workload, measured["results"][workload], where, out)


if __name__ == "__main__":
    main()
