"""A rank of a small job: adds its number to everyone's over gloo, and says what it got and where it runs."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
print(
    f"rank {rank} of {world}: sum {total.item():.0f}, interface {os.environ.get('GLOO_SOCKET_IFNAME')}, {sys.argv[1:]}"
)
print(f"colour {os.environ.get('COLOUR')!r}", file=sys.stderr)
dist.barrier()
dist.destroy_process_group()
