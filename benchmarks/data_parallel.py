"""What Checkmate and Gemini cost a data-parallel training of a decoder, two ranks with a GPU each, over NCCL.

Checkmate keeps every step in shadows, processes on the cores that the ranks leave; Gemini every few steps in the other
rank's peer. Each is compared with the same training without it, in turn, in the same processes. At the end a state of
other numbers is restored from what the system holds, and compared with the live one to the bit. Without two CUDA
devices, or with --device cpu, the ranks train on CPUs over Gloo: that shows that it works, and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Comparison, Report, TextTable, command_line, interleaved, main, say

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkmate import Ranks

from lastgood.units import GIB, MIB, format_bytes
from tests.gradients.support.shadow_processes import shadow_processes

RANKS = 2
GOALS = {"checkmate": 0.97, "gemini": None}
CORES_EACH = 4
"""Of a rank: one computes, the others send and copy."""
THREADS_OF_A_SHADOW = 4
LARGE = {"width": 768, "heads": 12, "blocks": 12, "length": 512, "vocabulary": 8192}
SMALL = {"width": 32, "heads": 2, "blocks": 2, "length": 16, "vocabulary": 64}


def has_two_devices() -> bool:
    import torch

    return torch.cuda.device_count() >= RANKS


def cores_of_ranks() -> list[list[int]]:
    """A few for each rank, if there are at least as many left for shadows."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * RANKS * CORES_EACH:
        return []
    return [cores[CORES_EACH * rank : CORES_EACH * (rank + 1)] for rank in range(RANKS)]


@contextlib.contextmanager
def shadows_for(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Shadows of one training, and what it is told of them."""
    folder.mkdir()
    threads = ["--threads", str(options.shadow_threads)]
    with shadow_processes(folder, options.shadows, *threads) as shadows:
        yield {
            "shadows": [shadow.address for shadow in shadows],
            "token_file": str(folder / "token"),
            "seed_bytes_per_step": GIB,
            "queue_bytes": options.queue_mib * MIB,
            "bucket_bytes": options.bucket_kib * 1024,
        }


def measure(options: argparse.Namespace, folder: Path) -> Report:
    device = options.device or ("cuda" if has_two_devices() else "cpu")
    cores = cores_of_ranks()
    if cores:  # what is started here stays on the others
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {core for own in cores for core in own})
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "directory", "full_rounds")}
    report = Report(settings={**settings, "device": device, "ranks": RANKS, "cores": cores, "model": options.model})
    table = TextTable("Systems", ("system", "batch", "durable", "failed", "checkpoint, s", "gaps", "restore, s", ""))
    plan = {"ranks": RANKS, "device": device, "cores": cores, "meeting": str(folder / "meeting")}
    with Ranks(folder, plan, "data_parallel_rank.py") as ranks:
        for system in options.systems:
            for batch in options.batches:
                compare(ranks, folder, system, batch, options, report, table)
    report.tables.append(table)
    report.notes.append(
        f"each rank has {CORES_EACH} cores, shadows and peers have the others" if cores else "all share the cores"
    )
    if device == "cpu":
        report.notes.append("on CPUs over Gloo: these numbers say nothing of GPUs")
    return report


def compare(
    ranks: Ranks,
    folder: Path,
    system: str,
    batch: int,
    options: argparse.Namespace,
    report: Report,
    table: TextTable,
) -> None:
    """One system at one batch, against training without it."""
    say(f"{system}, batch {batch}: with it and without it, in turn")
    name = f"{system}-{batch}"
    every = 1 if system == "checkmate" else options.interval
    asked = {
        "system": system,
        "batch": batch,
        "interval": every,
        "iterations": options.iterations,
        "warm_up": max(options.warm_up, every),
        "quiet_steps": 0 if system == "checkmate" else options.quiet_steps,
        "order": list(interleaved(("without", "with"), options.rounds, options.seed)),
        "directory": str(folder / f"job-{name}"),
        "model": options.model,
    }
    with contextlib.ExitStack() as stack:
        if system == "checkmate":
            asked["knobs"] = stack.enter_context(shadows_for(folder / f"shadows-{name}", options))
        else:
            asked["knobs"] = {"peer_idle_s": 600.0}
        ranks.ask(**asked)
        of_ranks = ranks.answers()
    report.results[name] = of_ranks

    def rates(side: str) -> list[float]:
        """Iterations per second of each round, by the slower rank."""
        own = [[row["seconds"] for row in rank["rows"] if row["side"] == side] for rank in of_ranks]
        return [options.iterations / max(one) for one in zip(*own, strict=True)]

    what = f"{system} every {every}, batch {batch}"
    report.comparisons.append(
        Comparison(what, "it/s", "with", rates("with"), "without", rates("without"), GOALS[system])
    )
    outcomes = [one for rank in of_ranks for one in rank["outcomes"]]
    took = [one for rank in of_ranks for one in rank["checkpoint_s"]]
    equal = all(rank["restored_equal"] for rank in of_ranks)
    table.rows.append(
        (
            system,
            str(batch),
            str(outcomes.count("durable")),
            str(outcomes.count("failed")),
            f"{statistics.median(took):.3f}" if took else "",
            str(len(of_ranks[0]["facts"].get("profiled_gaps_s", []))) if system == "gemini" else "",
            f"{max(rank['restore_s'] for rank in of_ranks):.2f}",
            "restored: equal" if equal else "restored: DIFFERENT",
        )
    )
    parameters = of_ranks[0]["parameters"]
    report.notes.append(f"{what}: {parameters:,} parameters, {format_bytes(12 * parameters)} of state on each rank")
    for error in sorted({error for rank in of_ranks for error in rank["errors"]}):
        report.notes.append(f"{what}: {error}")


def _systems(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(GOALS):
        raise argparse.ArgumentTypeError(f"must be some of {','.join(GOALS)}, not {text}")
    return found


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not all(0 < one <= 4096 for one in found):
        raise argparse.ArgumentTypeError(f"must be from 1 to 4096: {text}")
    return found


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--systems", type=_systems, default=list(GOALS), help="default: checkmate,gemini")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there are two devices")
    parser.add_argument("--batches", type=numbers, help="rows of a rank's batch (default: 32; with --quick 4)")
    parser.add_argument("--iterations", type=int, help="in a round (default: 20; with --quick 4)")
    parser.add_argument("--interval", type=int, help="of Gemini's checkpoints (default: 10; with --quick 2)")
    parser.add_argument("--shadows", type=int, help="default: 4; with --quick 2")

    def with_defaults(options: argparse.Namespace, folder: Path) -> Report:
        quick = options.quick
        options.model = SMALL if quick else LARGE
        options.batches = options.batches or ([4] if quick else [32])
        options.iterations = options.iterations or (4 if quick else 20)
        options.interval = options.interval or (2 if quick else 10)
        options.shadows = options.shadows or (2 if quick else 4)
        options.shadow_threads = 1 if quick else THREADS_OF_A_SHADOW
        options.quiet_steps = 4 if quick else 24
        options.warm_up = 3 if quick else 20
        options.queue_mib = 4 if quick else 256
        options.bucket_kib = 8 if quick else 25 * 1024
        return measure(options, folder)

    main(parser, with_defaults, __file__)
