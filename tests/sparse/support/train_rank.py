"""One rank of a training with the sparse engine, as a process: SYSTEM DIRECTORY STALENESS INTERVAL STEPS.

Rank, ranks and rank 0's address come from torch.distributed's environment. Says each step and its loss on a line.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lastgood import Gemini, PCcheck, SyncCheckpointer
from lastgood.sparse import Engine
from tests.sparse.support.workers import loss_of, make


def main():
    system, directory, staleness, interval, steps = sys.argv[1:6]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    model, optimizer = make()
    engine = Engine(model, optimizer, 0.9, "v16", int(staleness), timeout_s=20)
    resume = {}
    if system == "pccheck":
        checkpointer = PCcheck(directory, interval_steps=int(interval))
    elif system == "gemini":
        machines = {"machines": dist.get_world_size(), "machine": rank}
        checkpointer = Gemini(directory, interval_steps=int(interval), buffer_bytes=1 << 20, **machines)
    else:
        checkpointer = SyncCheckpointer(Path(directory, str(rank)), interval_steps=int(interval))
    if system != "pccheck":  # whose ranks agree; the others go on from the newest step that all of them have
        newest = torch.tensor(checkpointer.latest() or 0)
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        if newest:
            resume = {"resume_step": int(newest)}
    step = checkpointer.attach(model=model, optimizer=engine.optimizer, engine=engine, **resume)
    print("began", step, flush=True)
    while step < int(steps):
        loss = loss_of(model, rank, step)
        engine.backward(loss)
        if engine.step():
            step = checkpointer.step()
        print(step, float(loss.detach()).hex(), flush=True)
    checkpointer.close()
    engine.close()
    dist.destroy_process_group()


main()
