"""How long a shadow's complete update takes: a model's parameters in buckets, spread over shadows, on some threads.

``python -m lastgood.experiments.optbench.bench`` is one shadow's process of it.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from lastgood._lazy import torch
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.machine.facts import boot_id
from lastgood.experiments.machine.lock import TURN_S, machine_turn
from lastgood.files import PRIVATE, write_result
from lastgood.models import FrozenModel
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import ClipNorm, GroupRule, UpdateRule
from lastgood.optim.spec import GroupSpec, OptimizerSpec
from lastgood.processes import die_with_parent
from lastgood.text import parse_model
from lastgood.units import MIB, format_bytes
from lastgood.wire.frames import available_memory_bytes
from lastgood.workloads.optimizer_shapes import model_shapes

__all__ = ["BenchOrder", "BenchResult", "BenchRow", "buckets_of", "main", "needed_bytes", "run_bench"]

Report = Callable[[str], None]

_MEETING_S: Final = TURN_S + 600.0  # ranks wait for the one that waits for its machine's turn
_TENSORS_PER_PARAMETER: Final = {"sgd": 3, "adam": 4, "adamw": 4}  # itself, its gradient, its state
_FLOAT_BYTES: Final = 4


class BenchOrder(FrozenModel):
    """What is timed."""

    model: str
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    implementation: Literal["fused", "foreach", "single"] = "fused"
    arithmetic: Literal["cpu", "cuda"] = "cpu"
    threads: tuple[int, ...] = Field(min_length=1, max_length=64)
    steps: int = Field(default=5, ge=1, le=10000)
    bucket_bytes: int = Field(default=25 << 20, ge=1 << 10, le=1 << 40)


class BenchRow(FrozenModel):
    """One number of threads: seconds of each update, the slowest shadow's, and their median."""

    threads: int
    update_s: list[float]
    median_s: float
    parameters_per_s: float


class BenchResult(FrozenModel):
    """All of it."""

    order: BenchOrder
    parameters: int
    buckets: int
    shards: int
    hosts: list[str]
    shard_bytes: list[int]
    """Memory of each shard: parameters, gradients and state."""
    rows: list[BenchRow]


def buckets_of(shapes: Sequence[tuple[int, ...]], bucket_bytes: int) -> list[list[int]]:
    """Parameters in reverse order of registration, cut when a bucket of whole parameters is full (as DDP's are)."""
    buckets: list[list[int]] = []
    room = 0
    for place in reversed(range(len(shapes))):
        size = math.prod(shapes[place]) * _FLOAT_BYTES
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(place)
        room -= size
    return buckets


def needed_bytes(shapes: Sequence[tuple[int, ...]], optimizer: str) -> int:
    """Memory for these parameters, float32, with their gradients and state."""
    return sum(math.prod(shape) for shape in shapes) * _FLOAT_BYTES * _TENSORS_PER_PARAMETER[optimizer]


def run_bench(order: BenchOrder, report: Report) -> BenchResult | None:
    """Time the updates, as one of the ranks that RANK and WORLD_SIZE name, or alone.

    Rank 0 returns the result, the others None. Takes each machine's turn to measure. Raises ConfigError for a model
    that is not known, or that does not fit into memory, before anything of it is allocated.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shapes = model_shapes(order.model)
    buckets = buckets_of(shapes, order.bucket_bytes)
    if world > len(buckets):
        raise ConfigError(
            f"{order.model} has {len(buckets)} buckets of {format_bytes(order.bucket_bytes)}, and there are {world} "
            "shards: give smaller buckets, or fewer slots"
        )
    with _meeting(world):
        places = [place for bucket in buckets[rank::world] for place in bucket]
        own = [shapes[place] for place in places]
        here = _everybody((boot_id(), socket.gethostname(), needed_bytes(own, order.optimizer)), world)
        _refuse_too_large(order, sum(size for boot, _, size in here if boot == here[rank][0]))
        boots = [boot for boot, _, _ in here]
        # The first rank of each machine takes its turn.
        with machine_turn(report) if boots.index(boots[rank]) == rank else nullcontext():
            # All have their turn before the first one measures.
            _everybody(None, world)
            rows = _measure(order, own, [len(bucket) for bucket in buckets[rank::world]], world)
            _everybody(None, world)
    if rank != 0:
        return None
    parameters = sum(math.prod(shape) for shape in shapes)
    return BenchResult(
        order=order,
        parameters=parameters,
        buckets=len(buckets),
        shards=world,
        hosts=list(dict.fromkeys(host for _, host, _ in here)),
        shard_bytes=[size for _, _, size in here],
        rows=[
            BenchRow(
                threads=threads,
                update_s=seconds,
                median_s=statistics.median(seconds),
                parameters_per_s=parameters / statistics.median(seconds),
            )
            for threads, seconds in rows
        ],
    )


@contextmanager
def _meeting(world: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=_MEETING_S))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _everybody(value: Any, world: int) -> list[Any]:
    """What every rank says, by rank."""
    found: list[Any] = [value]
    if world > 1:
        found = [None] * world
        torch.distributed.all_gather_object(found, value)
    return found


def _refuse_too_large(order: BenchOrder, needed: int) -> None:
    available = available_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"{order.model} with {order.optimizer} needs {format_bytes(needed)} on {socket.gethostname()}, which has "
            f"{format_bytes(available)} to give: spread it over more hosts (--nodes), or take a smaller model"
        )


def _measure(
    order: BenchOrder, shapes: Sequence[tuple[int, ...]], bucket_lengths: Sequence[int], world: int
) -> list[tuple[int, list[float]]]:
    parameters, gradients = _flat(shapes, bucket_lengths, 0.02), _flat(shapes, bucket_lengths, 0.001)
    spec = OptimizerSpec(
        order.optimizer, order.implementation, order.arithmetic, (GroupSpec(tuple(range(len(shapes)))),), 1, ""
    )
    found = []
    for threads in order.threads:
        optimizer = DenseOptimizer(spec, parameters, [0] * len(shapes), threads)
        seconds = []
        # The first step touches all memory of the state for the first time, and is not counted.
        for step in range(order.steps + 1):
            rule = _rule(order, step)
            _everybody(None, world)
            began = time.perf_counter()
            optimizer.step(list(gradients), rule)
            took = time.perf_counter() - began
            slowest = max(_everybody(took, world))
            if step > 0:
                seconds.append(slowest)
        found.append((threads, seconds))
    return found


def _flat(shapes: Sequence[tuple[int, ...]], bucket_lengths: Sequence[int], size: float) -> list[torch.Tensor]:
    """Tensors of these shapes, each bucket in one buffer, as gradients arrive and parameters are kept."""
    tensors: list[torch.Tensor] = []
    at = 0
    for length in bucket_lengths:
        inside = shapes[at : at + length]
        at += length
        counts = [math.prod(shape) for shape in inside]
        # Full mantissas, made quickly: what a step costs does not depend on the numbers.
        buffer = torch.linspace(-size, size, sum(counts))
        tensors += [part.view(shape) for part, shape in zip(buffer.split(counts), inside, strict=True)]
    return tensors


def _rule(order: BenchOrder, step: int) -> UpdateRule:
    """A step with a clipped norm, which costs a pass of its own if the optimizer does not do it."""
    betas = (0.9, 0.95) if order.optimizer != "sgd" else (0.0, 0.0)
    numbers = GroupRule(
        lr=3e-4,
        betas=betas,
        eps=1e-8,
        weight_decay=0.05 if order.optimizer != "adam" else 0.0,
        momentum=0.9 if order.optimizer == "sgd" else 0.0,
        powers=((step + 1, betas[0] ** (step + 1), betas[1] ** (step + 1)),),
    )
    return UpdateRule((numbers,), clip=ClipNorm(0.9990234375))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(arguments: list[str] | None = None) -> int:
    """One shadow's process: do what the order says. 0, or an error's exit code with its message on standard error.

    Arguments: the order, the file to which rank 0 writes the result on its own host, and, if no launcher sees to it,
    the process to end with. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
    """
    order, path, *parent = sys.argv[1:] if arguments is None else arguments
    for number in parent:
        die_with_parent(int(number))
    try:
        asked = parse_model(BenchOrder, order, "not an order for a rank", most_bytes=MIB)
        result = run_bench(asked, _say)
    except LastgoodError as error:
        sys.stderr.write(f"lastgood shadow bench: {error}\n")
        return error.exit_code
    if result is not None:
        write_result(Path(path), result.model_dump_json().encode(), mode=PRIVATE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
