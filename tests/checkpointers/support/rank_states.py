"""States and saves of the ranks of a job, made without processes."""

from __future__ import annotations

import numpy as np
import torch

from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.state import RngState
from lastgood.storage import Verdict
from tests.checkpointers.support.stored_helpers import open_store, put

JOB = b"j" * 16


def a_state(rank=0, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    if seed == 0:
        model(torch.ones(4, 40)).sum().backward()
        optimizer.step()
    torch.manual_seed(1000 + rank)
    return {
        "model": model,
        "optimizer": optimizer,
        "rng": RngState(),
        "plain": {"count": 3 if seed == 0 else 0, "array": np.arange(5) + seed, "moving": torch.full((3,), 1.0 + seed)},
    }


def save(job, rank, world, *steps, job_id=JOB, change=None, bad=()):
    """One life of a rank that saves these steps."""
    with open_store(rank_directory(job, rank), rank=rank, world_size=world, job_id=job_id) as store:
        for step in steps:
            state = a_state(rank)
            if change is not None:
                change(state)
            info = put(store, step, state)
            if step in bad:
                store.judge(info.sequence, Verdict(step, False, "loss"))
