"""One rank of a data-parallel training with Gemini. Run as: gemini_rank.py RANK WORLD PORT DIRECTORY STEPS DEVICE.

Says on its standard output: ``saved STEP DIGEST`` before a save begins, ``durable STEP`` or ``failed STEP WHY`` after
it, and last, where STEPS is not 0, ``facts JSON``.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from small_training import SmallTraining

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.gemini.ddp_hook import marked_all_reduce
from lastgood.checkpointers.gemini.system import Gemini
from lastgood.processes import die_with_parent, keep_stdout

WIDTH = 256


def main(rank, world, port, directory, steps, device):
    die_with_parent()
    keep_stdout()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    backend = "gloo" if device == "cpu" else "nccl"
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120))
    training = SmallTraining(WIDTH, device=device)
    parallel = torch.nn.parallel.DistributedDataParallel(training.model, bucket_cap_mb=0.2)
    training.plain["of rank"] = rank
    gemini = Gemini(directory, machines=world, machine=rank, buffer_bytes=1 << 20)
    parallel.register_comm_hook(gemini.traffic, marked_all_reduce)
    gemini.start(training.state)
    torch.manual_seed(100 + rank)  # each rank has data and generators of its own
    told = 0
    while not steps or training.step_number < steps:
        loss = (parallel(torch.randn(4, WIDTH, device=device)) - 1).square().mean()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
        training.plain["step"] += 1
        if training.step_number % 8 == 0:
            print("saved", training.step_number, training.digest(), flush=True)
            gemini.save(training.step_number)
        while told < len(gemini.events) and gemini.events[told].outcome is not Outcome.PENDING:
            event = gemini.events[told]
            print(event.outcome.value, event.step, event.error or "", flush=True)
            told += 1
    gemini.drain()
    print("facts", json.dumps(gemini.storage_facts()), flush=True)
    gemini.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
