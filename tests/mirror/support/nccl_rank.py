"""One rank of a plain DDP training on a GPU of its own over NCCL's sockets; with torchrun's variables.

``python -m tests.mirror.support.nccl_rank OUT STEPS KIND GO``: rank 0 writes the state after the last step to OUT. The
ranks wait for the file GO before they begin, since all that passes must be captured.
"""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lastgood.mirror.job.factory import Training

CAP_MB = 0.03


def make_cuda_training(kind: str, device: str) -> Training:
    """As the ranks and the job description make it: SGD with momentum, or AdamW."""
    torch.manual_seed(5)
    layers = [
        torch.nn.Linear(64, 96),
        torch.nn.ReLU(),
        torch.nn.Linear(96, 96),
        torch.nn.ReLU(),
        torch.nn.Linear(96, 10),
    ]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return Training(model, optimizer, ddp={"bucket_cap_mb": CAP_MB})


def main(out: Path, steps: int, kind: str, go: Path) -> None:
    while not go.exists():
        time.sleep(0.05)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    training = make_cuda_training(kind, device)
    model = DistributedDataParallel(training.model, device_ids=[rank], bucket_cap_mb=CAP_MB)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        batch, target = (torch.randn(16, size, generator=generator).to(device) for size in (64, 10))
        training.optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), target).backward()
        training.optimizer.step()
    torch.cuda.synchronize()
    if rank == 0:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, out.with_suffix(".part"))
        out.with_suffix(".part").rename(out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
