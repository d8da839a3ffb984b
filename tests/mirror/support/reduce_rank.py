"""One rank of a row of all-reduces: ``python -m tests.mirror.support.reduce_rank OUT COUNT OPTIONS``.

OPTIONS has `calls`, a list of elements and dtype. Rank 0 writes `truth.npz`: `mine.N` (its input), `sum.N`; as bytes.
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


def content(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().copy()


def main(out: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    kept = {}
    for number, (elements, dtype) in enumerate(options["calls"]):
        tensor = torch.randn(elements, dtype=torch.float64).to(getattr(torch, dtype))
        kept[f"mine.{number}"] = content(tensor)
        dist.all_reduce(tensor)
        kept[f"sum.{number}"] = content(tensor)
    if rank == 0:
        np.savez(out / "truth.npz", **kept)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[3]))
