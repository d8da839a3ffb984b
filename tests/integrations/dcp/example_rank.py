"""Ranks that run the FSDP2 example, forked from one process that has imported torch. Run as: example_rank.py."""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch

import lastgood.integrations.dcp  # noqa: F401 - imported once for all ranks
from tests.integrations.forked_ranks import serve

EXAMPLE = Path(__file__).parents[3] / "examples" / "fsdp2" / "train.py"


def die_after(checkpoint):
    """Some time after a checkpoint is complete, wherever the training is then."""
    while not (checkpoint / ".metadata").exists():
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.2))
    os.kill(os.getpid(), signal.SIGKILL)


def one_rank(rank, asked):
    """In a forked process: train."""
    torch.set_num_threads(1)
    if rank == asked.get("victim"):
        threading.Thread(target=die_after, args=(Path(asked["place"], "step-15"),), daemon=True).start()
    sys.argv = [str(EXAMPLE), "--folder", asked["place"], "--steps", str(asked["steps"]), "--every", "5"]
    yield "begun"
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    yield "ended"


if __name__ == "__main__":
    serve(one_rank)
