"""StellaTrain's engine over a link without a limit: ResNet-18's iterations, against forward and backward alone.

Two ranks of one thread each train on this machine over loopback; both sides take turns, on both ranks at once.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Comparison, Report, TextTable, command_line, interleaved, main, say, spread
from torch import nn

RANKS = 2
WARM = 4
GOALS = {0: 0.85, 1: 0.95}  # staleness 1 hides the exchange: within 1.05 of compute
LIMIT_S = 300.0


class Training:
    """One rank's: a batch of eight small pictures, always the same, since nothing is to be learnt."""

    def __init__(self, rank: int) -> None:
        from torchvision.models import resnet18

        torch.manual_seed(0)
        self.model: nn.Module = resnet18(num_classes=10)
        dice = torch.Generator().manual_seed(rank)
        self._pictures = torch.randn((8, 3, 32, 32), generator=dice)
        self._labels = torch.randint(10, (8,), generator=dice)

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self._pictures), self._labels)

    def step(self) -> None:
        """Alone."""
        self.model.zero_grad()
        self.loss().backward()


class Engined(Training):
    """The same with the engine."""

    def __init__(self, rank: int, staleness: int, options: argparse.Namespace) -> None:
        from lastgood.sparse.engine import Engine

        super().__init__(rank)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.engine = Engine(self.model, optimizer, options.compression, options.compressor, staleness)

    def step(self) -> None:
        self.engine.backward(self.loss())
        self.engine.step()


def work(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints seconds of wall clock and of CPU for an iteration of each side and round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sides: dict[str, Training] = {"alone": Training(rank)}
    for staleness in GOALS:
        sides[f"staleness {staleness}"] = Engined(rank, staleness, options)
    for training in sides.values():
        for _ in range(WARM):
            training.step()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _, name in interleaved(list(sides), options.rounds, options.seed):
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            sides[name].step()
        seconds = torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        wall, cpu = (seconds / options.steps).tolist()
        found[name].append((wall, cpu))
    dist.barrier()
    for training in sides.values():
        if isinstance(training, Engined):
            training.engine.close()
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def measure(options: argparse.Namespace, folder: Path) -> Report:
    del folder
    if options.quick:
        options.steps = 2
    say(f"two ranks: {options.rounds} rounds of {options.steps} iterations")
    found = _run(options)
    report = Report(
        settings={"compressor": options.compressor, "compression": options.compression, "steps": options.steps}
    )
    times = TextTable("One iteration: medians (lowest..highest)", ("side", "ms", "ms of CPU"))
    for name, values in found.items():
        wall, cpu = ([one[at] for one in values] for at in (0, 1))
        times.rows.append((name, spread(wall, 1e3, 1), spread(cpu, 1e3, 1)))
        report.results[f"{name}, s"] = wall
    report.tables.append(times)
    speeds = {name: [1 / one[0] for one in values] for name, values in found.items()}
    for staleness, goal in GOALS.items():
        name = f"staleness {staleness}"
        report.comparisons.append(
            Comparison("ResNet-18", "iterations/s", name, speeds[name], "alone", speeds["alone"], goal)
        )
    return report


def _run(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = [f"--{name}={getattr(options, name)}" for name in ("rounds", "steps", "seed", "compressor", "compression")]
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, __file__, "--rank", *given],
                env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, rank in enumerate(ranks):
        if rank.returncode:
            raise RuntimeError(f"rank {number} ended with {rank.returncode}")
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return {name: [(wall, cpu) for wall, cpu in values] for name, values in result.items()}


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=6)
    parser.add_argument("--steps", type=int, default=15, help="iterations of each side in a round (default: 15)")
    parser.add_argument("--compressor", default="v16", help="of the engine (default: v16)")
    parser.add_argument("--compression", type=float, default=0.99, help="the share that is not sent (default: 0.99)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    if "--rank" in sys.argv:
        work(parser.parse_args())
    else:
        main(parser, measure, __file__)
