"""How much of its exchange StellaTrain's engine hides: a decoder on two ranks with a GPU each, over loopback.

Five trainings take turns in the same processes: forward and backward alone; with the engine at staleness 0 and 1; and,
to know what there is to hide, the engine with gradients that cost nothing, and those alone. The exchange is all between
a gradient and the new weights on the device: the copy to the host, compression, the ring, the step and the copy back.

hidden = 1 - (iteration with the engine - iteration without it) / exchange

Without two CUDA devices, or with --device cpu, the ranks train on CPUs: that shows that it works, and no more.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from checkmate import Ranks
from data_parallel import LARGE, RANKS, SMALL, has_two_devices, numbers
from harness import Comparison, Report, TextTable, command_line, main, say, spread

from lastgood.ports import free_ports
from lastgood.units import format_bytes

STALENESS = (0, 1)
MOST_ITERATIONS = 50
"""In a block of one side."""


def measure(options: argparse.Namespace, folder: Path) -> Report:
    device = options.device or ("cuda" if has_two_devices() else "cpu")
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // RANKS
    own = [cores[:half], cores[half : 2 * half]] if half >= options.threads else []
    (port,) = free_ports()
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "directory", "full_rounds")}
    report = Report(settings={**settings, "device": device, "ranks": RANKS, "cores": own})
    asked = {name: settings[name] for name in ("rounds", "seed", "compressor", "compression", "threads", "batches")}
    asked |= {"model": options.model, "block_s": options.block_s, "limit_s": options.limit_s}
    say(f"batches {options.batches}: forward and backward alone, staleness 0 and 1, and the exchange alone, in turn")
    plan = {"ranks": RANKS, "device": device, "cores": own, "port": port}
    with Ranks(folder, plan, "sparse_overlap_rank.py") as ranks:
        ranks.ask(**asked, most_iterations=MOST_ITERATIONS)
        of_ranks = ranks.answers()
    report.results["ranks"] = of_ranks
    report.results["overlap"] = [overlap_of(of_ranks, batch) for batch in options.batches]
    for one in report.results["overlap"]:
        add(report, one)
    first = of_ranks[0]
    report.notes.append(
        f"{first['parameters']:,} parameters in {first['layers']} layers; {1 - options.compression:.3g} of the "
        f"gradients is sent, by {options.compressor}: {format_bytes(sent_bytes(first))} an iteration by each rank"
    )
    if first["rounds"] < options.rounds:
        report.notes.append(f"{first['rounds']} of {options.rounds} rounds: --limit-s {options.limit_s:g}")
    if device == "cpu":
        report.notes.append("on CPUs: these numbers say nothing of GPUs")
    return report


def step_s(of_ranks: list[dict[str, Any]], side: str, key: str = "seconds") -> list[float]:
    """Of an iteration in each round, by the rank that took longer."""
    own = [[row[key] / row["iterations"] for row in rank["rows"] if row["side"] == side] for rank in of_ranks]
    return [max(one) for one in zip(*own, strict=True)]


def sent_bytes(rank: dict[str, Any]) -> int:
    rows = [row for row in rank["rows"] if row["side"] == "exchange"]
    return round(statistics.median(row["sent_bytes"] / row["iterations"] for row in rows))


def overlap_of(of_ranks: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Seconds of iterations round by round, and the shares that are hidden."""
    compute = step_s(of_ranks, f"compute {batch}")
    exchange = [
        with_it - without
        for with_it, without in zip(step_s(of_ranks, "exchange"), step_s(of_ranks, "gradients"), strict=True)
    ]
    found: dict[str, Any] = {"batch": batch, "compute_s": compute, "exchange_s": exchange}
    found["exchange_waited_s"] = step_s(of_ranks, "exchange", "waited_s")
    for staleness in STALENESS:
        side = f"staleness {staleness} {batch}"
        found[f"staleness_{staleness}_s"] = steps = step_s(of_ranks, side)
        found[f"staleness_{staleness}_waited_s"] = step_s(of_ranks, side, "waited_s")
        found[f"staleness_{staleness}_hidden"] = [
            1 - (step - alone) / whole for step, alone, whole in zip(steps, compute, exchange, strict=True)
        ]
    return found


def add(report: Report, one: dict[str, Any]) -> None:
    """A batch's table and comparisons."""
    batch, rows = one["batch"], []
    for name, title in (
        ("compute_s", "forward and backward"),
        ("exchange_s", "exchange alone"),
        *((f"staleness_{staleness}_s", f"staleness {staleness}") for staleness in STALENESS),
    ):
        waited, hidden = one.get(name.replace("_s", "_waited_s")), one.get(name.replace("_s", "_hidden"))
        rows.append(
            (
                title,
                spread(one[name], 1e3, 1),
                "" if waited is None else spread(waited, 1e3, 1),
                "" if hidden is None else spread(hidden),
            )
        )
    columns = ("side", "ms an iteration", "of them waiting for the other rank, ms", "hidden share of the exchange")
    report.tables.append(TextTable(f"Batch {batch}: medians (lowest..highest)", columns, rows))
    alone = [1 / seconds for seconds in one["compute_s"]]
    for staleness in STALENESS:
        ours = [1 / seconds for seconds in one[f"staleness_{staleness}_s"]]
        report.comparisons.append(
            Comparison(f"batch {batch}, staleness {staleness}", "it/s", "engine", ours, "compute alone", alone)
        )
        hidden = statistics.median(one[f"staleness_{staleness}_hidden"])
        report.notes.append(f"batch {batch}, staleness {staleness}: {hidden:.2f} of the exchange is hidden")


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there are two devices")
    parser.add_argument("--batches", type=numbers, help="rows of a rank's batch (default: 32,96; with --quick 4)")
    parser.add_argument("--compression", type=float, default=0.99, help="the share that is not sent (default: 0.99)")
    parser.add_argument("--compressor", default="v16", help="of the engine (default: v16)")
    parser.add_argument("--threads", type=int, help="of a rank's engine (default: 4; with --quick 1)")
    parser.add_argument("--block-s", type=float, help="of a side in a round (default: 1.2; with --quick 0.05)")
    parser.add_argument(
        "--limit-s", type=float, default=70.0, help="no round begins that would end later (default: 70)"
    )

    def with_defaults(options: argparse.Namespace, folder: Path) -> Report:
        options.model = SMALL if options.quick else LARGE
        options.batches = options.batches or ([4] if options.quick else [32, 96])
        options.threads = options.threads or (1 if options.quick else 4)
        options.block_s = options.block_s or (0.05 if options.quick else 1.2)
        return measure(options, folder)

    main(parser, with_defaults, __file__)
