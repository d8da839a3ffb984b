"""One rank of sparse_overlap.py: reads work as a line of JSON, and answers it with one line.

python sparse_overlap_rank.py PLAN.json RANK
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_rank import BATCHES, TIMEOUT_S, Decoder, answer, synchronize
from harness import interleaved

from lastgood.processes import die_with_parent, keep_stdout
from lastgood.sparse.engine import Engine
from lastgood.training.loop import configure_compute

WARM = 4
SETTLE = 2
"""Iterations before a block, which are not timed."""
LEAST_ITERATIONS = 3


class Training:
    """A decoder; with a staleness the engine trains it, else its gradients are thrown away."""

    def __init__(self, asked: dict[str, Any], staleness: int | None) -> None:
        torch.manual_seed(0)
        self.module = Decoder(**asked["model"]).to(asked["device"])
        self.engine: Engine | None = None
        if staleness is not None:
            optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.9)
            given = (asked["compression"], asked["compressor"], staleness)
            self.engine = Engine(self.module, optimizer, *given, threads=asked["threads"], timeout_s=TIMEOUT_S)

    def step(self, loss: torch.Tensor) -> None:
        """Backward, and what the engine does."""
        if self.engine is None:
            loss.backward()
            self.module.zero_grad(set_to_none=True)
        else:
            self.engine.backward(loss)
            self.engine.step()

    def facts(self) -> dict[str, float]:
        """Since it began."""
        facts = None if self.engine is None else self.engine.facts()
        exchange = None if facts is None else facts["exchange"]
        return {
            "waited_s": 0.0 if facts is None else facts["waited_s"],
            "sent_bytes": 0 if exchange is None else exchange.sent_bytes,
        }


class Side:
    """A training, and where its gradients come from: a batch of tokens, or `given` ones, which cost nothing."""

    def __init__(self, training: Training, tokens: torch.Tensor | None, given: list[torch.Tensor]) -> None:
        self.training = training
        self._tokens, self._given = tokens, given
        self._steps = 0
        self.iterations = 1
        """Of a block."""

    def _loss(self) -> torch.Tensor:
        module = self.training.module
        if self._tokens is not None:
            loss: torch.Tensor = module(self._tokens[self._steps % BATCHES])
            return loss
        products = [(value * wanted).sum() for value, wanted in zip(module.parameters(), self._given, strict=True)]
        return torch.stack(products).sum()

    def run(self, iterations: int, device: str) -> dict[str, float]:
        """Seconds, and what the engine did in them. All ranks run at once."""
        synchronize(device)
        dist.barrier()
        before, began = self.training.facts(), time.perf_counter()
        for _ in range(iterations):
            self.training.step(self._loss())
            self._steps += 1
        synchronize(device)
        seconds, after = time.perf_counter() - began, self.training.facts()
        return {"iterations": iterations, "seconds": seconds, **{key: after[key] - before[key] for key in after}}


def sides_of(asked: dict[str, Any]) -> dict[str, Side]:
    """By name; those of one staleness share a training."""
    rank, device, shape = dist.get_rank(), asked["device"], asked["model"]
    alone, free = Training(asked, None), Training(asked, None)
    engines = {staleness: Training(asked, staleness) for staleness in (0, 1)}
    dice = torch.Generator().manual_seed(1000 + rank)
    given = [1e-3 * torch.randn(value.shape, generator=dice).to(device) for value in free.module.parameters()]
    sides = {"gradients": Side(free, None, given), "exchange": Side(Training(asked, 0), None, given)}
    for batch in asked["batches"]:
        size = (BATCHES, batch, shape["length"] + 1)
        tokens = torch.randint(shape["vocabulary"], size, generator=dice).to(device)
        sides[f"compute {batch}"] = Side(alone, tokens, given)
        for staleness, training in engines.items():
            sides[f"staleness {staleness} {batch}"] = Side(training, tokens, given)
    return sides


def overlap(asked: dict[str, Any]) -> dict[str, Any]:
    """All sides in turn, as often as the limit allows."""
    began, device = time.monotonic(), asked["device"]
    sides = sides_of(asked)
    for side in sides.values():
        side.run(WARM, device)
        found = side.run(LEAST_ITERATIONS, device)
        wanted = asked["block_s"] * LEAST_ITERATIONS / slowest(found["seconds"])
        side.iterations = max(LEAST_ITERATIONS, min(asked["most_iterations"], round(wanted)))
    rows: list[dict[str, Any]] = []
    order = list(interleaved(list(sides), asked["rounds"], asked["seed"]))
    took_s = 0.0
    for number in range(asked["rounds"]):
        started = time.monotonic()
        if number and slowest(started - began) + took_s > asked["limit_s"]:
            break
        for name in [name for round_, name in order if round_ == number]:
            sides[name].run(SETTLE, device)
            rows.append({"round": number, "side": name, **sides[name].run(sides[name].iterations, device)})
        took_s = slowest(time.monotonic() - started)
    module = sides["exchange"].training.module
    dist.barrier()
    for training in {id(side.training): side.training for side in sides.values()}.values():
        if training.engine is not None:
            training.engine.close()
    return {
        "rows": rows,
        "rounds": rows[-1]["round"] + 1,
        "parameters": sum(value.numel() for value in module.parameters()),
        "layers": len(list(module.parameters())),
    }


def slowest(seconds: float) -> float:
    """Of all ranks, so that all come to the same conclusion."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def main() -> None:
    die_with_parent()
    keep_stdout()
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    warnings.filterwarnings("ignore")
    if plan["cores"]:
        os.sched_setaffinity(0, plan["cores"][rank])
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    configure_compute(1, deterministic=False)
    if plan["device"] == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{plan['port']}",
        rank=rank,
        world_size=plan["ranks"],
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    for line in sys.stdin:
        answer(overlap({**json.loads(line), "device": plan["device"]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
