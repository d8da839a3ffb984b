"""How long StellaTrain's compressors take beside torch.topk and this machine's memory, in turn, in one process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import Field

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.experiments.machine.lock import machine_turn
from lastgood.models import FrozenModel
from lastgood.optim.threads import intra_op_threads
from lastgood.sparse.compressors import COMPRESSORS, keep_count, make_compressor
from lastgood.units import format_bytes
from lastgood.wire.frames import available_memory_bytes

__all__ = ["SparseOrder", "SparseResult", "SparseRow", "run_sparse_bench"]

Pass = Callable[[int], float]
"""One pass, by the number of its round; returns the share of the gradient's energy that it sends."""

_TENSORS: Final = 6  # gradient, residual, its other place, magnitudes, what topk makes of them
_SHIFT: Final = 4096  # elements by which each round's gradient lies elsewhere
_WARM_UP: Final = 2


class SparseOrder(FrozenModel):
    """What is timed."""

    elements: int = Field(ge=1000, le=1 << 32)
    compression: float = Field(ge=0, lt=1)
    rounds: int = Field(default=7, ge=1, le=1000)
    threads: int = Field(ge=1, le=1024)
    seed: int = 0


class SparseRow(FrozenModel):
    """One way: seconds of each round, their median, and how many medians of its own bound that is."""

    name: str
    seconds: list[float]
    median_s: float
    bound: str
    of_bound: float
    """The bound's median over this one's: 1 is as fast as memory allows."""
    energy_kept: float | None = None


class SparseResult(FrozenModel):
    """All of it."""

    order: SparseOrder
    count: int
    rows: list[SparseRow]


def run_sparse_bench(order: SparseOrder, report: Callable[[str], None]) -> SparseResult:
    """Time every way once a round, in an order that changes, on this machine's turn.

    Raises ConfigError before anything is allocated if it does not fit into memory.
    """
    needed, available = 4 * _TENSORS * order.elements, available_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"{order.elements} elements need {format_bytes(needed)} of memory, and {format_bytes(available)} are "
            "available"
        )
    with machine_turn(report), intra_op_threads(order.threads):
        ways = _ways(order)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        energy: dict[str, float] = {}
        turns = random.Random(order.seed)
        for number in range(-_WARM_UP, order.rounds):
            for name in turns.sample(list(ways), len(ways)):
                begin = time.perf_counter()
                energy[name] = ways[name](number + _WARM_UP)
                if number >= 0:
                    seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    rows = []
    for name, own in seconds.items():
        bound = "pass" if name == "pass" or name.endswith("residual") else "read"
        kept = energy[name] if name in COMPRESSORS else None
        rows.append(
            SparseRow(
                name=name,
                seconds=own,
                median_s=medians[name],
                bound=bound,
                of_bound=medians[bound] / medians[name],
                energy_kept=kept,
            )
        )
    return SparseResult(order=order, count=keep_count(order.elements, order.compression, 1), rows=rows)


def _ways(order: SparseOrder) -> Mapping[str, Pass]:
    """Each way by its name. Optimizers get their rows here."""
    elements, count = order.elements, keep_count(order.elements, order.compression, 1)
    generator = torch.Generator().manual_seed(order.seed)
    room = torch.empty(elements + _SHIFT * 8, dtype=torch.float32, device="cpu")
    # Heavy tails, as gradients have them: a quotient of two normal distributions, cut.
    room.normal_(generator=generator).div_(room.roll(7919).abs_().add_(0.2))
    spare = [torch.zeros(elements, dtype=torch.float32, device="cpu") for _ in range(2)]

    def gradient(number: int) -> torch.Tensor:
        # Another choice in each round: a repeated one would sit in the caches.
        begin = number % 8 * _SHIFT
        return room[begin : begin + elements]

    def read(number: int) -> float:
        torch.sum(gradient(number))
        return 1.0

    def add(number: int) -> float:
        spare[0].add_(gradient(number))
        return 1.0

    def topk(number: int) -> float:
        torch.topk(gradient(number).abs(), count, sorted=False)
        return 1.0

    ways: dict[str, Pass] = {"read": read, "pass": add, "torch.topk": topk}
    whole = float(torch.linalg.vector_norm(room[:elements]) ** 2)
    for name in COMPRESSORS:
        ways[name] = _alone(name, order, count, gradient, whole)
        ways[f"{name}, residual"] = _with_residual(name, order, count, gradient, spare)
    return ways


def _alone(name: str, order: SparseOrder, count: int, gradient: Callable[[int], torch.Tensor], whole: float) -> Pass:
    compressor = make_compressor(name, order.elements, seed=order.seed, threads=order.threads)
    kept: list[float] = []

    def once(number: int) -> float:
        sparse = compressor.compress(gradient(number), None, count)
        if not kept:  # in the warm-up
            kept.append(float(torch.linalg.vector_norm(sparse.values.float()) ** 2) / whole)
        return kept[0]

    return once


def _with_residual(
    name: str, order: SparseOrder, count: int, gradient: Callable[[int], torch.Tensor], residuals: list[torch.Tensor]
) -> Pass:
    compressor = make_compressor(name, order.elements, seed=order.seed, threads=order.threads)

    def once(number: int) -> float:
        compressor.compress(gradient(number), residuals[0], count, into=residuals[1])
        residuals.reverse()
        return 1.0

    return once
