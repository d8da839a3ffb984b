"""A rank of a training over gloo. Run as: last_step_rank.py DIRECTORY MEETING RANK.

It says each step, and at its end, as JSON, which checkpoint was its last.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from lastgood import PCcheck


def main(directory: str, meeting: str, rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", LASTGOOD_JOB_TOKEN="a token of the tests")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = PCcheck(directory, interval_steps=100_000)
    checkpointer.attach(model=model, optimizer=optimizer)
    step = 0
    try:
        while step < 3000:
            model(torch.ones(1, 4)).sum().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            step += 1
            print("step", step, flush=True)
            checkpointer.step()
            if step == 5:
                checkpointer.save(step)  # so it is known how long that takes
                checkpointer.drain()
    finally:
        last = checkpointer.events[-1]
        told = {"step": last.step, "latest": checkpointer.latest(), "outcome": last.outcome.value, "why": last.why}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
