"""One rank of a plain DDP training that a mirror node follows; with torchrun's variables.

``python -m tests.mirror.support.followed_rank OUT STEPS OPTIONS``. Options: `kind` and `hook` of `simulated_life`,
`ddp` (arguments of DistributedDataParallel), `flowcheck` (what to give to FlowCheck; none: an undisturbed training),
`pause_s` (after each step), `agent` (what to give to `mirror_agent`), `save` (a folder: the ranks save each fifth step
there as the system ``pccheck`` does, or with `sync` rank 0 alone as ``sync`` does).

Rank 0 appends a line for each step to OUT/losses.txt: the step, and its loss to the bit.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lastgood import mirror_agent
from lastgood.checkpointers.flowcheck.system import FlowCheck
from lastgood.checkpointers.registry import checkpointer_class
from tests.mirror.support.simulated_life import make_training
from tests.mirror.support.training import hook


def main(out: Path, steps: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    training = make_training(options["kind"], options["hook"])
    state = {"model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler}
    checkpointer, done = None, 0
    if options.get("flowcheck"):
        checkpointer = FlowCheck(out / "job", **options["flowcheck"])
        done = checkpointer.attach(**state)
    agent = mirror_agent(state, **options["agent"]) if options.get("agent") else None
    saver = None
    if options.get("save") and (rank == 0 or not options.get("sync")):
        saver = checkpointer_class("sync" if options.get("sync") else "pccheck")(options["save"])
        saver.start({"model": training.model, "optimizer": training.optimizer})
    ddp = DistributedDataParallel(training.model, **options["ddp"])
    if options["hook"]:
        ddp.register_comm_hook(None, hook(options["hook"]))
    with (out / "losses.txt").open("a") as losses:
        while done < steps:
            generator = torch.Generator().manual_seed(1000 * done + rank)
            batch, target = torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)
            training.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(ddp(batch), target)
            loss.backward()
            if training.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip_norm)
            training.optimizer.step()
            if training.scheduler is not None:
                training.scheduler.step()
            done += 1
            if checkpointer is not None:
                assert checkpointer.step() == done
            if agent is not None:
                agent.step(done)
            if saver is not None and done % 5 == 0:
                saver.save(done)
            if rank == 0:
                losses.write(f"{done} {loss.item().hex()}\n")
                losses.flush()
            time.sleep(options.get("pause_s", 0.0))
    for one in (checkpointer, agent, saver):
        if one is not None:
            one.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
