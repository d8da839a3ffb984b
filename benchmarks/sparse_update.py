"""The sparse optimizer's steps, of other elements in each round, against torch's fused dense steps of a tensor."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from harness import Comparison, Report, TextTable, command_line, interleaved, main, say, spread

from lastgood.sparse.blocks import BLOCK_WIDTH, SparseGradient
from lastgood.sparse.optimizer import SparseOptimizer

SHARE = 0.01
MERGED_RANKS = 4
MERGED_GOAL = 0.5  # at most twice the time
WARM_LAZY_STEPS = 30
KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, {1: 5.0, BLOCK_WIDTH: 20.0}),
    "adam": (torch.optim.Adam, {"lr": 0.001}, {1: 5.0, BLOCK_WIDTH: 15.0}),
}


def chosen(source: np.random.Generator, elements: int, width: int, ranks: int) -> list[SparseGradient]:
    """`SHARE` of all places, each sent by one of `ranks`."""
    places = elements // width
    union = np.unique(source.integers(0, places, max(1, round(places * SHARE)))).astype(np.uint32)
    senders = source.integers(0, ranks, len(union))
    parts = [np.ascontiguousarray(union[senders == rank]) for rank in range(ranks)]
    return [SparseGradient(elements, width, part, torch.randn(len(part) * width)) for part in parts]


class Dense:
    """torch's fused step."""

    def __init__(self, kind: str, elements: int) -> None:
        made, numbers, _ = KINDS[kind]
        self._parameter = torch.nn.Parameter(torch.randn(elements))
        self._parameter.grad = torch.randn(elements)
        self._optimizer = made([self._parameter], fused=True, **numbers)
        self._optimizer.step()

    def time_ms(self) -> float:
        began = time.perf_counter()
        self._optimizer.step()
        return (time.perf_counter() - began) * 1e3


class Sparse:
    """Ours; what is sent is drawn before the clock starts."""

    def __init__(self, kind: str, mode: str, width: int, ranks: int, options: argparse.Namespace) -> None:
        made, numbers, _ = KINDS[kind]
        self._parameter = torch.nn.Parameter(torch.randn(options.elements))
        self._sparse = SparseOptimizer(made([self._parameter], **numbers), mode=mode, threads=options.threads)
        self._source = np.random.default_rng(options.seed)
        self._width, self._ranks, self._iteration = width, ranks, 0
        for _ in range(2 if mode == "plain" else WARM_LAZY_STEPS):
            self.time_ms()

    def time_ms(self) -> float:
        gathered = chosen(self._source, self._parameter.numel(), self._width, self._ranks)
        began = time.perf_counter()
        self._sparse.apply(self._parameter, gathered, iteration=self._iteration)
        self._iteration += 1
        return (time.perf_counter() - began) * 1e3


def measure(options: argparse.Namespace, folder: Path) -> Report:
    del folder
    if options.quick:
        options.elements = min(options.elements, 100_000)
    torch.set_num_threads(options.threads)
    report = Report(settings={"elements": options.elements, "threads": options.threads, "share": SHARE})
    times = TextTable("One step: medians (lowest..highest)", ("side", "ms"))
    for kind in KINDS:
        for mode in ("plain", "lazy"):
            say(f"{kind}, {mode}")
            found = _of_mode(kind, mode, options)
            _compare(report, kind, mode, found)
            times.rows.extend((f"{kind}, {mode}, {name}", spread(values)) for name, values in found.items())
            report.results[f"{kind}, {mode}, ms"] = found
    report.tables.append(times)
    report.notes.append("lazy steps make up, element by element, all that the dense optimizer does: no goal is set")
    return report


def _of_mode(kind: str, mode: str, options: argparse.Namespace) -> dict[str, list[float]]:
    sides: dict[str, Dense | Sparse] = {"dense": Dense(kind, options.elements)}
    for width in (1, BLOCK_WIDTH):
        for ranks in (1, MERGED_RANKS):
            sides[_name(width, ranks)] = Sparse(kind, mode, width, ranks, options)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _, name in interleaved(list(sides), options.rounds, options.seed):
        found[name].append(sides[name].time_ms())
    return found


def _name(width: int, ranks: int) -> str:
    what = "single elements" if width == 1 else f"blocks of {width}"
    return f"{what} of {ranks} rank{'s' if ranks > 1 else ''}"


def _compare(report: Report, kind: str, mode: str, found: dict[str, list[float]]) -> None:
    goals = KINDS[kind][2]
    speeds = {name: [1e3 / value for value in values] for name, values in found.items()}
    for width in (1, BLOCK_WIDTH):
        one, merged = (_name(width, ranks) for ranks in (1, MERGED_RANKS))
        pairs: Sequence[tuple[str, str, float]] = [(one, "dense", goals[width]), (merged, one, MERGED_GOAL)]
        for ours, theirs, goal in pairs:
            report.comparisons.append(
                Comparison(
                    f"{kind}, {mode}",
                    "steps/s",
                    ours,
                    speeds[ours],
                    theirs,
                    speeds[theirs],
                    goal if mode == "plain" else None,
                )
            )


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=15)
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the tensor (default: 25 million)")
    parser.add_argument("--threads", type=int, default=1, help="of both sides (default: 1)")
    main(parser, measure, __file__)
