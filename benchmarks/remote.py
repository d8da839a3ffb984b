"""What the remote tier costs a training under PCcheck, and what it sends of a state that changes in part.

The training has one thread, so a second core is free for whoever sends. The tier sends into a sink of ours that drops
what it gets; for the bytes, into a folder. *Changed* bytes are those of parameters that are trained and of their
optimizer state: nobody can send fewer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Comparison, Report, cannot, command_line, interleaved, main, say
from object_sink import running_sink
from torch import nn

from lastgood import PCcheck
from lastgood.checkpointers.events import Outcome
from lastgood.experiments.remote_runs.models import Trained, changed_bytes, make_model, take_step
from lastgood.units import MIB

WIDTH, LAYERS, BATCH = 1024, 16, 16
INTERVAL, EVERY, STEPS = 5, 4, 60
LIMIT_S = 300.0
GOALS = {"throughput": 0.97, "stall": 0.9, "bytes": 0.98}


def make(kind: Trained, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return make_model(kind, width, LAYERS)


def width_of(options: argparse.Namespace) -> int:
    return 64 if options.quick else WIDTH


def steps_of(options: argparse.Namespace) -> int:
    return EVERY * INTERVAL if options.quick else STEPS


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, ckpt: Any) -> None:
    for _ in range(steps):
        take_step(model, optimizer, BATCH)
        ckpt.step()


def measure(options: argparse.Namespace, folder: Path) -> Report:
    if importlib.util.find_spec("obstore") is None:
        cannot("obstore is missing: pip install 'lastgood[s3]'")
    torch.set_num_threads(1)
    report = Report(settings={"torch": torch.__version__, "interval": INTERVAL, "every": EVERY, "steps": STEPS})
    with running_sink() as url:
        os.environ.update(AWS_ACCESS_KEY_ID="nobody", AWS_SECRET_ACCESS_KEY="nothing")
        _cost(options, folder, url, report)
    kinds: tuple[Trained, ...] = ("all", "frozen", "lora")
    for kind in kinds:
        _bytes(options, folder / kind, kind, report)
    return report


def _cost(options: argparse.Namespace, folder: Path, url: str, report: Report) -> None:
    rates: dict[str, list[float]] = {"without": [], "with": []}
    stalls: dict[str, list[float]] = {"without": [], "with": []}
    sent: list[dict[str, Any]] = []
    for number, name in interleaved(list(rates), options.rounds, options.seed):
        say(f"cost: round {number + 1} of {options.rounds}: {name} the tier")
        remote = {"remote": f"s3://lastgood/{number}", "remote_every": EVERY, "remote_endpoint_url": url}
        given = {**remote, "remote_region": "us-east-1"} if name == "with" else {}
        model, optimizer = make("all", width_of(options))
        ckpt = PCcheck(folder / f"{name}-{number}", interval_steps=INTERVAL, **given)
        ckpt.attach(model=model, optimizer=optimizer)
        train(model, optimizer, 2 * INTERVAL, ckpt)  # slots are made
        ckpt.drain(LIMIT_S)
        begin = time.perf_counter()
        train(model, optimizer, steps_of(options), ckpt)
        ckpt.drain(LIMIT_S)
        rates[name].append(steps_of(options) / (time.perf_counter() - begin))
        events = [event for event in ckpt.events if event.outcome is Outcome.DURABLE and event.requested_s > begin]
        stalls[name].append(1 / statistics.median(event.copied_s - event.requested_s for event in events))
        if name == "with":
            _wait(lambda ckpt=ckpt: ckpt.storage_facts()["remote"]["sent"] > 0)
            sent.append(ckpt.storage_facts()["remote"])
        ckpt.close()
    report.results["cost"] = {"rates": rates, "copies_per_s": stalls, "facts": sent}
    report.comparisons.append(
        Comparison("training", "it/s", "with", rates["with"], "without", rates["without"], GOALS["throughput"])
    )
    report.comparisons.append(
        Comparison("copies", "1/s", "with", stalls["with"], "without", stalls["without"], GOALS["stall"])
    )


def _bytes(options: argparse.Namespace, folder: Path, kind: Trained, report: Report) -> None:
    """From the third checkpoint on, what did not change is known."""
    model, optimizer = make(kind, width_of(options))
    ckpt = PCcheck(folder / "slots", interval_steps=1, remote=str(folder / "objects"), remote_every=1)
    ckpt.attach(model=model, optimizer=optimizer)
    sent = [0]
    for number in range(4):
        train(model, optimizer, 1, ckpt)
        ckpt.drain(LIMIT_S)
        _wait(lambda number=number: ckpt.storage_facts()["remote"]["sent"] > number)
        sent.append(ckpt.storage_facts()["remote"]["sent_bytes"])
    facts = ckpt.storage_facts()["remote"]
    ckpt.close()
    changed = changed_bytes(model)
    last = sent[-1] - sent[-2]
    whole = (facts["sent_bytes"] + facts["kept_bytes"]) / 4
    report.results[kind] = {"state_bytes": whole, "changed_bytes": changed, "sent_bytes": last}
    sides = ("changed", [changed / MIB], "sent", [last / MIB])
    report.comparisons.append(Comparison(f"{kind}: a state of {whole / MIB:.0f} MiB", "MiB", *sides, GOALS["bytes"]))


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {LIMIT_S:.0f} s for a checkpoint to be sent")
        time.sleep(0.01)


if __name__ == "__main__":
    main(command_line(__doc__, rounds=5), measure, __file__)
