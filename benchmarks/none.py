"""Training under `none`, as `lastgood run` does it, against a plain script's loop over the same model and data.

Both sides train one model on, in blocks that take turns. The plain loop is what a user writes: batches from torch's
DataLoader (in a worker process on CUDA, pinned), forward, backward, step; the device is waited for at a block's end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Comparison, Report, cannot, command_line, interleaved, main, say
from runs import build

GOAL = 0.99


def measure(options: argparse.Namespace, folder: Path) -> Report:
    import torch

    from lastgood.checkpointers.registry import checkpointer_class
    from lastgood.experiments.plan.load import parse_config
    from lastgood.training.loop import TrainingLoop, configure_compute

    if options.device == "cuda" and not torch.cuda.is_available():
        cannot("--device cuda, and torch sees no CUDA device")
    chosen = "gpu" if options.device == "cuda" else "laptop"
    config = parse_config(options.config or Path(__file__).parent.parent / "config" / f"{chosen}.yaml")[0]
    report = Report(settings={"device": options.device, "threads": options.threads, "steps": options.steps})
    for name in options.workload or ["vgg16", "opt"]:
        say(f"{name}: building")
        configure_compute(options.threads, deterministic=False)
        workload = build(name, config, options.data_dir, options.device, options.seed)
        plain = plain_batches(workload.data, options.device)
        kind = checkpointer_class("none")
        loop = TrainingLoop(workload, kind(folder / name, kind.Options()), 0, options.device)
        loop.start()
        found: dict[str, list[float]] = {"lastgood": [], "plain": []}
        for number, side in interleaved(list(found), options.rounds + 1, options.seed):
            began = time.perf_counter()
            if side == "plain":
                plain_steps(workload, plain, options.steps, options.device)
            else:
                loop.train(options.steps)
            if number:  # the first round warms up
                found[side].append(options.steps / (time.perf_counter() - began))
        report.comparisons.append(
            Comparison(name, "it/s", "none", found["lastgood"], "plain loop", found["plain"], GOAL)
        )
        loop.checkpointer.close()
    return report


def plain_batches(stream: Any, device: str) -> Iterator[dict[str, Any]]:
    """The stream's batches by torch's DataLoader, endless."""
    import torch

    class Indexed(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = stream.batch(index)
            return found

    cuda = device == "cuda"
    order = iter(range(1 << 40))
    loader = torch.utils.data.DataLoader(
        Indexed(), batch_size=None, sampler=order, num_workers=1 if cuda else 0, pin_memory=cuda
    )
    return iter(loader)


def plain_steps(workload: Any, batches: Iterator[dict[str, Any]], steps: int, device: str) -> None:
    """What a script does."""
    import torch

    losses = []
    for _ in range(steps):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
        loss = workload.loss(batch)
        loss.backward()
        workload.optimizer.step()
        if workload.scheduler is not None:
            workload.scheduler.step()
        workload.optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    if device == "cuda":
        torch.cuda.synchronize()
    torch.stack(losses).tolist()


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of a block (default: 20)")
    parser.add_argument("--workload", action="append", help="default: vgg16 and opt; may be given again")
    parser.add_argument("--config", type=Path, help="default: config/laptop.yaml, on CUDA config/gpu.yaml")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    main(parser, measure, __file__)
