"""One rank of a small DDP training whose gradients the ring carries; tests/gradients/tap/test_ring_hook.py starts it.

ring_rank.py FOLDER RANK RANKS PORT NEXT_ADDRESS SHADOWS STEPS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lastgood.gradients.layout.layout import GradientLayout, plan_layout
from lastgood.gradients.tap.ring_hook import RingReducer, ring_all_reduce
from lastgood.wire.ring_comm import RingComm
from lastgood.wire.ring_link import listen_ring

TOKEN = b"a token of thirty-two bytes long"
JOB = "0123456789abcdef" * 2


class Model(torch.nn.Module):
    """Some layers, and one that no optimizer updates though it gets gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(31, 40)
        self.stray = torch.nn.Linear(40, 40)
        self.last = torch.nn.Linear(40, 7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.stray(torch.relu(self.first(inputs)))))
        return out


def updated_parameters(model: Model) -> list[torch.nn.Parameter]:
    return [*model.first.parameters(), *model.last.parameters()]


def declared_layout(ranks: int, shadows: int) -> GradientLayout:
    parameters = [(str(number), tuple(one.shape), "float32") for number, one in enumerate(updated_parameters(Model()))]
    return plan_layout(parameters, {}, ranks=ranks, shadows=shadows, bucket_bytes=2000)


def train(hook: str, comm: RingComm, layout: GradientLayout, steps: int) -> dict[str, Any]:
    """Parameters behind the last step, and the gradients of each, reduced by DDP itself or by the ring."""
    torch.manual_seed(1)
    model = Model()
    updated = updated_parameters(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
    reducer = None
    if hook == "ring":
        reducer = RingReducer(comm, layout, updated)
        ddp.register_comm_hook(reducer, ring_all_reduce)
    optimizer = torch.optim.SGD(updated, lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + comm.rank)
    gradients = []
    for _ in range(steps):
        model.zero_grad()
        inputs = torch.randn(5, 31, generator=generator)
        with ddp.no_sync():
            ddp(inputs).square().mean().backward()
        ddp(inputs.flip(0) + 1).square().mean().backward()
        gradients.append([one.grad.clone() for one in updated if one.grad is not None])
        optimizer.step()
    results: dict[str, Any] = {"parameters": list(model.parameters()), "gradients": gradients}
    if reducer is not None:
        assert reducer.iteration == steps
        if comm.rank == 0:
            results["error"] = error_of(lambda: ddp(inputs).square().mean().backward())
        reducer.close()
    return results


def error_of(call: Callable[[], None]) -> str:
    """What is said to rank 0 when the other one has left the ring."""
    try:
        call()
    except Exception as error:
        # Its name too: DDP gives the error itself, or one of its own around it, as the reduction ends early or late.
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    folder = Path(sys.argv[1])
    rank, ranks, port, shadows, steps = (int(sys.argv[index]) for index in (2, 3, 4, 6, 7))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=240)
    )
    layout = declared_layout(ranks, shadows)
    comm = RingComm(
        rank,
        ranks,
        listener=listen_ring("127.0.0.1", port),
        next_address=sys.argv[5],
        token=TOKEN,
        job=JOB,
        epoch=1,
        layout=layout.digest,
        timeout_s=240.0,
    )
    results = {hook: train(hook, comm, layout, steps) for hook in ("gloo", "ring")}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
