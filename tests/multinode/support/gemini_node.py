"""A rank of a data-parallel training with Gemini and peers of its own, on a node of a testbed.

Run as: gemini_node.py RANK MASTER PORT DIRECTORY WIDTH STEPS. Says on its standard output: ``resumed STEP DIGEST
COPIES`` (how many peers hold that step of this rank's), ``saved STEP DIGEST`` before a save begins, ``durable STEP`` or
``failed STEP WHY`` after it, and last, where STEPS is not 0, ``facts JSON``.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "checkpointers" / "support"))

import torch
import torch.distributed as dist
from small_training import SmallTraining

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.gemini.ddp_hook import marked_all_reduce
from lastgood.checkpointers.gemini.system import Gemini
from lastgood.errors import NoCheckpoint


def main(rank: int, master: str, port: str, directory: Path, width: int, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=master, MASTER_PORT=port, GLOO_SOCKET_IFNAME="eth0")
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    training = SmallTraining(width)
    parallel = torch.nn.parallel.DistributedDataParallel(training.model, bucket_cap_mb=0.2)
    training.plain["of rank"] = rank
    gemini = Gemini(directory, machines=2, machine=rank, peers="own", buffer_bytes=1 << 20, peer_timeout_s=5.0)
    gemini.events_kept = None
    parallel.register_comm_hook(gemini.traffic, marked_all_reduce)
    try:
        step = gemini.restore(training.state)
        copies, _ = gemini._peers.holding(rank, [0, 1])
        print("resumed", step, training.digest(), [one.step for one in copies].count(step), flush=True)
    except NoCheckpoint as none:
        print("resumed 0", none, flush=True)
        torch.manual_seed(100 + rank)  # each rank has data and generators of its own
    gemini.start(training.state)
    told, last = 0, training.step_number + steps

    def tell_events() -> None:
        nonlocal told
        while told < len(gemini.events) and gemini.events[told].outcome is not Outcome.PENDING:
            event = gemini.events[told]
            print(event.outcome.value, event.step, event.error or "", flush=True)
            told += 1

    while not steps or training.step_number < last:
        loss = (parallel(torch.randn(4, width)) - 1).square().mean()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
        training.plain["step"] += 1
        if training.step_number % 8 == 0:
            print("saved", training.step_number, training.digest(), flush=True)
            gemini.save(training.step_number)
        tell_events()
    gemini.drain()
    tell_events()
    print("facts", json.dumps(gemini.storage_facts()), flush=True)
    gemini.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
