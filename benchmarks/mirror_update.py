"""A mirror node's update, from the last bucket of a step to the new state, against the bare update of as many tensors.

The node is the follower and the shadow of `lastgood mirror run`, in this process; gradients come as the extractor gives
them, in DDP's buckets. Time runs from the moment at which the last bucket of a step is complete: until the step can be
given back (`held`), and until all buckets have applied it. The other side is what `lastgood shadow bench` times.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import numpy as np
import torch
from harness import Comparison, Report, TextTable, cannot, command_line, interleaved, main, say, spread
from optimizers import shadow

from lastgood.experiments.optbench.bench import buckets_of, needed_bytes
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.mirror.conversation.places import Buckets, Expect, Incarnation
from lastgood.mirror.extract.slots import Filled
from lastgood.mirror.job.ddp import bucket_bytes, initial_buckets, likely_buckets
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.factory import Training
from lastgood.mirror.node.follower import Follower
from lastgood.mirror.node.service import MirrorService
from lastgood.mirror.node.settings import NodeSettings
from lastgood.optim.rule import ClipNorm
from lastgood.units import MIB, format_bytes
from lastgood.wire.frames import available_memory_bytes
from lastgood.wire.gate import open_listener
from lastgood.workloads.optimizer_shapes import MODELS, model_shapes

GOAL = 1 / 1.25
POLL_S = 1e-4
PATIENCE_S = 120.0


class Node:
    """Follows a made-up training; each `step` returns two times."""

    def __init__(self, shapes: list[tuple[int, ...]], clip: float | None, threads: int, token: bytes) -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.full(shape, 0.01)) for shape in shapes])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=True)
        self._job = describe(Training(model, optimizer, clip_norm=clip), ranks=2)
        self._service = MirrorService(ShadowSettings(0, 1, threads=threads), token, open_listener())
        self._thread = Thread(target=self._service.run, daemon=True)
        self._thread.start()
        self._follower = Follower(self._job, self._service.core, self._service.ear, NodeSettings(), "ab" * 16)
        self._collectives = itertools.count()
        self._step = 0
        weights = np.concatenate([one.detach().numpy().reshape(-1) for one in model])
        names = tuple(one.name for one in self._job.parameters)
        first = Buckets(0, initial_buckets(self._job), False)
        self._follower.hear([Incarnation(0, True), first, self._filled("parameters", weights, tensors=names, step=-1)])
        later = likely_buckets(self._job)
        self._sizes = {0: self._sizes_of(first.buckets), 1: self._sizes_of(later)}
        self._later = Buckets(1, later, True)
        most = max(itertools.chain(*self._sizes.values()))
        self._content = np.linspace(-1e-3, 1e-3, most // 4, dtype=np.float32)

    def _sizes_of(self, buckets: tuple[tuple[int, ...], ...]) -> list[int]:
        return [bucket_bytes(self._job, bucket) for bucket in buckets]

    def _filled(self, kind: str, content: np.ndarray, **more: object) -> Filled:
        expect = Expect(next(self._collectives), kind, content.nbytes, "float32", **more)  # type: ignore[arg-type]
        return Filled(expect, content.view(np.uint8))

    def step(self) -> tuple[float, float]:
        """One update: seconds from its last bucket until it can be given back, and until it is applied."""
        number = self._step
        self._step += 1
        if number == 1:
            self._follower.hear([self._later])
        sizes = self._sizes[min(number, 1)]
        events = [
            self._filled("gradient", self._content[: nbytes // 4], step=number, bucket=bucket)
            for bucket, nbytes in enumerate(sizes)
        ]
        self._follower.hear(events[:-1])
        core, iteration = self._service.core, number + 1
        began = time.perf_counter()
        self._follower.hear(events[-1:])
        held = self._wait(lambda: iteration in [one.iteration for one in core.status().memory], began)
        applied = self._wait(lambda: core.status().applied >= iteration, began)
        if self._follower.blind is not None:
            cannot(f"the node is {self._follower.blind}")
        return held, applied

    def _wait(self, done: object, began: float) -> float:
        assert callable(done)
        while not done():
            if time.perf_counter() - began > PATIENCE_S:
                cannot("the node has not applied a step")
            time.sleep(POLL_S)
        return time.perf_counter() - began

    def close(self) -> None:
        self._follower.close()
        self._service.stop()
        self._thread.join(PATIENCE_S)


@contextmanager
def node_of(shapes: list[tuple[int, ...]], clip: float | None, threads: int) -> Iterator[Node]:
    node = Node(shapes, clip, threads, b"a token of a benchmark, long enough")
    try:
        yield node
    finally:
        node.close()


def measure(options: argparse.Namespace, _folder: Path) -> Report:
    torch.set_num_threads(options.threads)
    shapes = model_shapes(options.model)
    needed = 4 * needed_bytes(shapes, "adamw")
    if needed > available_memory_bytes():
        cannot(f"{options.model} needs {format_bytes(needed)} here; take a smaller --model")
    order = [place for bucket in buckets_of(shapes, 25 * MIB) for place in bucket]
    count = sum(math.prod(shape) for shape in shapes)
    report = Report(settings={"model": options.model, "parameters": count, "threads": options.threads})
    parts = TextTable(
        "From the last bucket on: medians (lowest..highest)", ("way", "held, ms", "applied, ms", "update alone, ms")
    )
    for name, clip in (("clipped", 1.0), ("plain", None)):
        say(f"{options.model}, {name}")
        bare = shadow([shapes[place] for place in order], "cpu", ClipNorm(0.75) if clip else None, options.threads)
        found: dict[str, list[float]] = {"held": [], "applied": [], "update": []}
        with node_of(shapes, clip, options.threads) as node:
            for _ in range(2):  # memory is touched for the first time
                node.step()
                bare()
            for _, side in interleaved(["node", "update"], options.rounds, options.seed):
                if side == "node":
                    held, applied = node.step()
                    found["held"].append(held)
                    found["applied"].append(applied)
                else:
                    began = time.perf_counter()
                    bare()
                    found["update"].append(time.perf_counter() - began)
        for moment in ("applied", "held"):
            ours = [count / seconds / 1e6 for seconds in found[moment]]
            theirs = [count / seconds / 1e6 for seconds in found["update"]]
            what = f"AdamW of {options.model}, {name}, {options.threads} threads"
            goal = GOAL if moment == "applied" else None
            report.comparisons.append(
                Comparison(what, "million parameters/s", f"last bucket to {moment}", ours, "update alone", theirs, goal)
            )
        parts.rows.append((name, *(spread(found[moment], 1e3) for moment in ("held", "applied", "update"))))
        report.results[name] = {"seconds": found}
    report.tables.append(parts)
    report.notes.append("The norm of all gradients is computed by the node, and given to the update alone.")
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=11)
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="default: resnet50")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both sides (default: all)")
    main(parser, measure, __file__)
