"""One rank of data_parallel.py: reads work as lines of JSON, and answers each with one line.

python data_parallel_rank.py PLAN.json RANK
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.checkpointers.gemini.system import Gemini
from lastgood.processes import die_with_parent, keep_stdout
from lastgood.state import state_digest
from lastgood.training.loop import configure_compute

TIMEOUT_S = 120.0
BATCHES = 4
"""Made once; they stay on the device."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))


class Decoder(nn.Module):
    """Predicts the next of some tokens."""

    def __init__(self, width: int, heads: int, blocks: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length + 1) of int64 to the loss."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(given) + self.places(torch.arange(given.shape[1], device=given.device))
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class Trainer:
    """A decoder under DistributedDataParallel and AdamW; with a system, that keeps every `interval`-th step."""

    def __init__(self, asked: dict[str, Any], system: str | None, seed: int = 0) -> None:
        rank, device, shape = dist.get_rank(), asked["device"], asked["model"]
        torch.manual_seed(seed)
        self.module = Decoder(**shape).to(device)
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        self.state = {"model": self.module, "optimizer": self.optimizer}
        size = (BATCHES, asked["batch"], shape["length"] + 1)
        random = torch.Generator().manual_seed(1000 + rank)
        self.tokens = torch.randint(shape["vocabulary"], size, generator=random).to(device)
        self.interval = asked["interval"]
        self.steps = 0
        self.checkpointer: Any = None
        if system is not None:
            self.checkpointer = checkpointer_of(asked, system)
            self.checkpointer.events_kept = None
            self.checkpointer.watch(self.model)
            self.checkpointer.start(self.state)

    def step(self, *, saves: bool = True) -> None:
        """One iteration, and its save if it is time for one."""
        self.model(self.tokens[self.steps % BATCHES]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if saves and self.checkpointer is not None and self.steps % self.interval == 0:
            self.checkpointer.save(self.steps)

    def drain(self) -> float:
        """Wait until it is known what became of every save; the seconds that took."""
        began = time.perf_counter()
        if self.checkpointer is not None:
            self.checkpointer.drain(TIMEOUT_S)
        return time.perf_counter() - began


def checkpointer_of(asked: dict[str, Any], system: str) -> Checkpointer:
    """It is not started."""
    if system == "checkmate":
        return Checkmate(asked["directory"], **asked["knobs"])
    return Gemini(asked["directory"], machines=dist.get_world_size(), machine=dist.get_rank(), **asked["knobs"])


def compare(asked: dict[str, Any]) -> dict[str, Any]:
    """Iterations with the system and without it, in turn, and whether what it holds at the end is what was trained."""
    system = asked["system"]
    sides = {"without": Trainer(asked, None), "with": Trainer(asked, system)}
    kept = sides["with"]
    for trainer in sides.values():
        for _ in range(asked["quiet_steps"]):  # which Gemini profiles
            trainer.step(saves=False)
        for _ in range(asked["warm_up"]):
            trainer.step()
        trainer.drain()
    warm = len(kept.checkpointer.events)
    rows = []
    for number, side in asked["order"]:
        trainer = sides[side]
        for _ in range(2):
            trainer.step()
        rows.append({"round": number, "side": side, **timed(trainer, asked["iterations"], asked["device"])})
    events = kept.checkpointer.events[warm:]
    found = {
        "rows": rows,
        "parameters": sum(parameter.numel() for parameter in kept.module.parameters()),
        "outcomes": [event.outcome.value for event in events],
        "checkpoint_s": [event.finished_s - event.requested_s for event in events if event.finished_s is not None],
        "errors": sorted({event.error for event in events if event.error}),
        "facts": kept.checkpointer.storage_facts(),
    }
    kept.step(saves=False)
    while kept.steps % asked["interval"]:
        kept.step(saves=False)
    kept.checkpointer.save(kept.steps)
    kept.drain()
    digest = state_digest(kept.state)
    kept.checkpointer.close()
    dist.barrier()
    fresh = Trainer(asked, None, seed=1)
    began = time.perf_counter()
    step = checkpointer_of(asked, system).restore(fresh.state)
    found["restore_s"] = time.perf_counter() - began
    found["restored_equal"] = (step, state_digest(fresh.state)) == (kept.steps, digest)
    dist.barrier()
    return found


def timed(trainer: Trainer, iterations: int, device: str) -> dict[str, float]:
    """Seconds of the iterations, of those in which updates waited for a copy, and of the drain after them."""
    synchronize(device)
    waited = stalled_s(trainer)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(iterations):
        trainer.step()
    synchronize(device)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "update_stall_s": stalled_s(trainer) - waited, "drain_s": trainer.drain()}


def stalled_s(trainer: Trainer) -> float:
    return 0.0 if trainer.checkpointer is None else float(trainer.checkpointer.update_stall_s)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def answer(found: Any) -> None:
    """To data_parallel.py."""
    print(json.dumps(found), flush=True)


def main() -> None:
    die_with_parent()
    keep_stdout()
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    warnings.filterwarnings("ignore")
    if plan["cores"]:
        os.sched_setaffinity(0, plan["cores"][rank])
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    configure_compute(1, deterministic=False)
    cuda = plan["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{plan['meeting']}",
        rank=rank,
        world_size=plan["ranks"],
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    for line in sys.stdin:
        asked = json.loads(line)
        answer(compare({**asked, "device": plan["device"]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
