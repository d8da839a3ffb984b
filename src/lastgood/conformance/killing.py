"""Kills a training with SIGKILL at random instants, again and again, and restores in a fresh process each time.

    python -m lastgood.conformance.killing SYSTEM DIRECTORY ROUNDS SEED

Prints one line per round; exits 1, saying why, at the first wrong restore. Every child is forked from a parent that has
only imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer would import it in every child

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.conformance.training import SmallTraining
from lastgood.errors import NoCheckpoint
from lastgood.processes import die_with_parent

__all__ = ["main"]

_WIDTH = 512
_WAIT_S = 60
_fork = multiprocessing.get_context("fork")


def _train(system: str, directory: Path, pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    training = SmallTraining(_WIDTH)
    checkpointer = checkpointer_class(system)(directory)
    checkpointer.events_kept = None
    try:
        pipe.send(("restored", checkpointer.restore(training.state), training.digest()))
    except NoCheckpoint:
        pipe.send(("restored", 0, ""))
    checkpointer.start(training.state)
    told = 0
    for _ in range(100_000):
        training.step()
        pipe.send(("saving", training.step_number, training.digest()))
        checkpointer.save(training.step_number)
        while told < len(checkpointer.events) and checkpointer.events[told].outcome is not Outcome.PENDING:
            event = checkpointer.events[told]
            pipe.send((event.outcome.value, event.step, event.error))
            told += 1


def _restore(system: str, directory: Path, pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    training = SmallTraining(_WIDTH, seed=1)
    step = checkpointer_class(system)(directory).restore(training.state)
    pipe.send((step, training.digest()))


def _child(function: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=function, args=(*arguments, theirs, os.getpid()))
    process.start()
    theirs.close()
    return process, ours


def _receive(pipe: Connection, what: str) -> Any:
    if not pipe.poll(_WAIT_S):
        sys.exit(f"waited {_WAIT_S} s for {what}")
    try:
        return pipe.recv()
    except EOFError:
        sys.exit(f"{what} never came: its process ended by an error")


def main(system: str, directory: Path, rounds: int, seed: int) -> None:
    """Kill and restore so often. Raises SystemExit, with the reason, at the first wrong restore."""
    chance = random.Random(seed)
    digests: dict[int, str] = {}
    durable = 0
    for number in range(rounds):
        process, pipe = _child(_train, system, directory)
        kind, step, digest = _receive(pipe, "the trainer's restore")
        if kind != "restored" or (durable and (step < durable or digests[step] != digest)):
            sys.exit(f"round {number}: the trainer restored step {step}, durable was {durable}, or a wrong state")
        digests = {known: value for known, value in digests.items() if known <= step}
        deadline: float | None = None
        while deadline is None or time.monotonic() < deadline:
            if not pipe.poll(0.001 if deadline else _WAIT_S):
                if deadline is None:
                    sys.exit(f"round {number}: waited {_WAIT_S} s for the first durable checkpoint")
                continue
            kind, step, text = _receive(pipe, "what the trainer says")
            if kind == "saving":
                digests[step] = text
            elif kind == "durable":
                durable = step
                deadline = deadline or time.monotonic() + chance.uniform(0, 0.25)
            elif kind != "superseded":
                sys.exit(f"round {number}: the checkpoint of step {step} is {kind}: {text}")
        os.kill(process.pid, signal.SIGKILL)
        process.join(_WAIT_S)
        try:
            while True:  # what it had still said before the kill
                kind, step, text = pipe.recv()
                if kind == "saving":
                    digests[step] = text
                elif kind == "durable":
                    durable = step
        except (EOFError, OSError):
            pass
        process, pipe = _child(_restore, system, directory)
        step, digest = _receive(pipe, "the restorer's state")
        process.join(_WAIT_S)
        if step < durable:
            sys.exit(f"round {number}: restored step {step}, but step {durable} had been reported durable")
        if digests.get(step) != digest:
            sys.exit(f"round {number}: step {step} came back with another state")
        durable = step
        print(f"round {number}: restored step {step}, exact", flush=True)  # noqa: T201 - its parent counts these lines


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
