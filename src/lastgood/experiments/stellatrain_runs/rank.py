"""One rank of the training over links: ``python -m lastgood.experiments.stellatrain_runs.rank ORDER``.

ORDER is JSON (`LinksOrder`); RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from lastgood.errors import ConfigError
from lastgood.experiments.records.stellatrain import LinkBlock, Way
from lastgood.experiments.stellatrain_runs.order import LinksOrder, LinksResult
from lastgood.experiments.stellatrain_runs.ways import build_model, make_training
from lastgood.files import PRIVATE, write_result
from lastgood.text import parse_model
from lastgood.units import MIB

__all__ = ["main", "sent_bytes", "steps_of_block"]

_LIMIT_S: Final = 300.0
"""For one wait of ranks for each other."""
_LEAST_STEPS: Final = 2
_AVERAGED: Final[Way] = "post-local"


def main(order_text: str) -> int:
    """See the module. Raises what goes wrong: its last words are in the log."""
    order = parse_model(LinksOrder, order_text, "an order", most_bytes=MIB)
    torch.set_num_threads(order.settings.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT_S))
    blocks = []
    for number, ways in enumerate(order.rounds):
        for way in ways:
            blocks.append(_block(order, number, way))
            if dist.get_rank() == 0:
                sys.stdout.write(f"round {number + 1}, {way}: {blocks[-1].steps_per_s:.3g} iterations/s\n")
                sys.stdout.flush()
    if dist.get_rank() == 0:
        parameters = sum(one.numel() for one in build_model(order.settings).parameters())
        result = LinksResult(parameters=parameters, blocks=blocks)
        write_result(Path(order.result), result.model_dump_json().encode(), mode=PRIVATE)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _block(order: LinksOrder, number: int, way: Way) -> LinkBlock:
    settings = order.settings
    device = os.environ["GLOO_SOCKET_IFNAME"]
    training = make_training(way, settings, order.seed + number)
    try:
        for _ in range(settings.warmup):
            began = time.perf_counter()
            training.step()
        last = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        multiple = settings.average_every if way == _AVERAGED else 1
        steps = steps_of_block(float(last), settings.block_s, settings.most_steps, multiple)
        dist.barrier()
        before, began = sent_bytes(device), time.perf_counter()
        for _ in range(steps):
            training.step()
        seconds, sent = time.perf_counter() - began, sent_bytes(device) - before
    finally:
        training.close()
    most = torch.tensor([seconds, float(sent)], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    del training
    gc.collect()  # DDP and its hooks refer to each other
    return LinkBlock(
        rate_bits_per_s=order.rate_bits_per_s,
        way=way,
        round=number,
        steps=steps,
        seconds=float(most[0]),
        sent_bytes=int(most[1]),
    )


def steps_of_block(step_s: float, block_s: float, most: int, multiple: int) -> int:
    """How many iterations of `step_s` make a block of about `block_s`: from 2 to `most`, raised to a multiple."""
    steps = min(most, max(_LEAST_STEPS, round(block_s / step_s)))
    return multiple * math.ceil(steps / multiple)


def sent_bytes(device: str, table: Path = Path("/proc/self/net/dev")) -> int:
    """What this node's `device` has sent since it is there, by the kernel. Raises ConfigError if there is none."""
    for line in table.read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise ConfigError(f"this node has no network device {device}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
