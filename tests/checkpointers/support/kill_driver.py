"""Kills a training with SIGKILL at random instants, again and again, and restores in a fresh process each time.

Run as: kill_driver.py SYSTEM DIRECTORY ROUNDS SEED. Prints one line per round; exits 1, saying why, at the first wrong
restore. Every child is forked from a parent that has only imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._dynamo
from small_training import SmallTraining

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import NoCheckpoint
from lastgood.processes import die_with_parent

WIDTH = 512
fork = multiprocessing.get_context("fork")


def train(system, directory, pipe, parent):
    die_with_parent(parent)
    torch.set_num_threads(1)
    training = SmallTraining(WIDTH)
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


def restore(system, directory, pipe, parent):
    die_with_parent(parent)
    torch.set_num_threads(1)
    training = SmallTraining(WIDTH, seed=1)
    step = checkpointer_class(system)(directory).restore(training.state)
    pipe.send((step, training.digest()))


def child(function, *arguments):
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=function, args=(*arguments, theirs, os.getpid()))
    process.start()
    theirs.close()
    return process, ours


def receive(pipe, what):
    if not pipe.poll(60):
        sys.exit(f"waited 60 s for {what}")
    return pipe.recv()


def main(system, directory, rounds, seed):
    chance = random.Random(seed)
    digests, durable = {}, 0
    for number in range(rounds):
        process, pipe = child(train, system, directory)
        kind, step, digest = receive(pipe, "the trainer's restore")
        if kind != "restored" or (durable and (step < durable or digests[step] != digest)):
            sys.exit(f"round {number}: the trainer restored step {step}, durable was {durable}, or a wrong state")
        digests = {known: value for known, value in digests.items() if known <= step}
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            if not pipe.poll(0.001 if deadline else 60):
                if deadline is None:
                    sys.exit(f"round {number}: waited 60 s for the first durable checkpoint")
                continue
            kind, step, text = pipe.recv()
            if kind == "saving":
                digests[step] = text
            elif kind == "durable":
                durable = step
                deadline = deadline or time.monotonic() + chance.uniform(0, 0.25)
            elif kind != "superseded":
                sys.exit(f"round {number}: the checkpoint of step {step} is {kind}: {text}")
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        try:
            while True:  # what it had still said before the kill
                kind, step, text = pipe.recv()
                if kind == "saving":
                    digests[step] = text
                elif kind == "durable":
                    durable = step
        except (EOFError, OSError):
            pass
        process, pipe = child(restore, system, directory)
        step, digest = receive(pipe, "the restorer")
        process.join(60)
        if step < durable:
            sys.exit(f"round {number}: restored step {step}, but step {durable} had been reported durable")
        if digests.get(step) != digest:
            sys.exit(f"round {number}: step {step} came back with another state")
        durable = step
        print(f"round {number}: restored step {step}, exact", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
