"""A shadow's whole update (clip and step) against the bare optimizer of torch, and against DeepSpeed's CPUAdam."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Comparison, Report, TextTable, cannot, command_line, interleaved, main, say, sizes, spread

from lastgood.experiments.optbench.bench import buckets_of, needed_bytes
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import ClipNorm, GroupRule, UpdateRule
from lastgood.optim.spec import GroupSpec, OptimizerSpec
from lastgood.units import format_bytes
from lastgood.wire.frames import available_memory_bytes
from lastgood.workloads.optimizer_shapes import MODELS, model_shapes

BARE_GOAL = 0.8
DEEPSPEED_GOAL = 1.0
STEPS = 3
NUMBERS = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.05}


def measure(options: argparse.Namespace, folder: Path) -> Report:
    torch.set_num_threads(options.threads)
    shapes = model_shapes(options.model)
    # One set of tensors for each side, so that none finds the other's in the cache.
    needed = 5 * needed_bytes(shapes, "adamw")
    if needed > available_memory_bytes():
        cannot(f"{options.model} needs {format_bytes(needed)} here; take a smaller --model")
    order = [place for bucket in buckets_of(shapes, options.bucket[0]) for place in bucket]
    shapes = [shapes[place] for place in order]
    count = sum(math.prod(shape) for shape in shapes)
    sides = {
        "shadow": shadow(shapes, "cpu", None, options.threads),
        "shadow, clipped": shadow(shapes, "cpu", ClipNorm(0.75), options.threads),
        "shadow of CUDA, clipped": shadow(shapes, "cuda", ClipNorm(0.75), options.threads),
        "torch": bare_torch(shapes),
    }
    if importlib.util.find_spec("deepspeed"):
        say("building DeepSpeed's CPUAdam (once about 40 s)")
        sides["CPUAdam"] = deepspeed(shapes, folder)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        step()
    for _, name in interleaved(list(sides), options.rounds, options.seed):
        began = time.perf_counter()
        for _ in range(STEPS):
            sides[name]()
        found[name].append(count * STEPS / (time.perf_counter() - began) / 1e6)
    report = Report(settings={"model": options.model, "parameters": count, "threads": options.threads, "steps": STEPS})
    unit = "million parameters/s"
    for name in [name for name in sides if name.startswith("shadow")]:
        what = f"AdamW of {options.model}, {options.threads} threads"
        report.comparisons.append(Comparison(what, unit, name, found[name], "torch", found["torch"], BARE_GOAL))
        if "CPUAdam" in found:
            theirs = found["CPUAdam"]
            report.comparisons.append(Comparison(what, unit, name, found[name], "CPUAdam", theirs, DEEPSPEED_GOAL))
    if "CPUAdam" not in found:
        report.notes.append("DeepSpeed is not installed: not compared with its CPUAdam")
    report.results["million_parameters_per_s"] = found
    # Gradients lie ready in memory on every side: nothing is received or copied, here or in a shadow's slots.
    parts = TextTable("One update: medians (lowest..highest)", ("side", "ms"))
    for name, values in found.items():
        parts.rows.append((name, spread([count / value / 1e3 for value in values])))
    report.tables.append(parts)
    return report


def flat(shapes: list[tuple[int, ...]], size: float) -> list[torch.Tensor]:
    counts = [math.prod(shape) for shape in shapes]
    buffer = torch.linspace(-size, size, sum(counts))
    return [part.view(shape) for part, shape in zip(buffer.split(counts), shapes, strict=True)]


def shadow(shapes: list[tuple[int, ...]], arithmetic: str, clip: ClipNorm | None, threads: int) -> Callable[[], None]:
    parameters, gradients = flat(shapes, 0.02), flat(shapes, 0.001)
    spec = OptimizerSpec("adamw", "fused", arithmetic, (GroupSpec(tuple(range(len(shapes)))),), threads, "")
    optimizer = DenseOptimizer(spec, parameters, [0] * len(shapes), threads)
    made = 0

    def step() -> None:
        nonlocal made
        made += 1
        powers = tuple(beta**made for beta in NUMBERS["betas"])
        optimizer.step(list(gradients), UpdateRule((GroupRule(**NUMBERS, powers=((made, *powers),)),), clip=clip))

    return step


def bare_torch(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    parameters, gradients = flat(shapes, 0.02), flat(shapes, 0.001)
    optimizer = torch.optim.AdamW(parameters, fused=True, **NUMBERS)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return lambda: optimizer.step() and None


def deepspeed(shapes: list[tuple[int, ...]], folder: Path) -> Callable[[], None]:
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters, gradients = flat(shapes, 0.02), flat(shapes, 0.001)
    parameters = [torch.nn.Parameter(p) for p in parameters]
    optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, fp32_optimizer_states=True, **NUMBERS)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return lambda: optimizer.step() and None


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=11)
    parser.add_argument("--model", choices=MODELS, help="default: vit_h_14; with --quick resnet50")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every side (default: all)")
    parser.add_argument("--bucket", type=sizes, default=[25 << 20], help="size of a bucket (default: 25MiB)")
    chosen = parser.parse_known_args()[0]
    parser.set_defaults(model="resnet50" if chosen.quick else "vit_h_14")
    main(parser, measure, __file__)
