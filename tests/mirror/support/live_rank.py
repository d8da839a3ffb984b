"""One rank of a training: ``python -m tests.mirror.support.live_rank OUT STEPS OPTIONS``, with torchrun's variables.

Rank 0 writes the truth: `truth.npz` with `init.*` (state after DDP's broadcast), `grad.S.*` (reduced gradients),
`buffer.S.*` (buffers after step S), `after.S.*` (state after it), and `ddp.json`, what DDP logs about its buckets.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mirror.support.training import batch, hook, make


def array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy().copy()


def main(out: Path, steps: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    model, optimizer, _ = make(options.get("width", 24))
    ddp = DistributedDataParallel(model, **options.get("ddp", {"bucket_cap_mb": 0.002}))
    if "hook" in options:
        ddp.register_comm_hook(None, hook(options["hook"]))
    kept = {f"init.{name}": array(value) for name, value in model.state_dict().items()}
    losses = []
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        if options.get("accumulate"):
            with ddp.no_sync():
                torch.nn.functional.cross_entropy(ddp(x.flip(1)), y).backward()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                kept[f"grad.{step}.{name}"] = array(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
        for name, value in model.state_dict().items():
            kept[f"after.{step}.{name}"] = array(value)
    kept["losses"] = np.array(losses)
    if rank == 0:
        np.savez_compressed(out / "truth.npz", **kept)
        log = {key: value for key, value in ddp._get_ddp_logging_data().items() if "bucket" in key}
        (out / "ddp.json").write_text(json.dumps(log, default=str))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
