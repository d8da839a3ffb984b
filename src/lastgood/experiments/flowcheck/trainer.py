"""One rank of the training that FlowCheck's figure watches: ``python -m lastgood.experiments.flowcheck.trainer ORDER``.

ORDER is JSON (`TrainerOrder`); RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. Rank 0 saves, if a system is
named, and writes a line for each step: its number, its seconds, its loss, and the monotonic clock at its end; before
them a line when all ranks are there (``ready``), and one when the state is restored (``restored STEP``).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import NoCheckpoint
from lastgood.experiments.flowcheck.model import loss_of, make
from lastgood.experiments.records.flowcheck import GptShape
from lastgood.experiments.systems.papers import FLOWCHECK
from lastgood.models import FrozenModel
from lastgood.processes import die_with_parent
from lastgood.text import parse_model
from lastgood.units import MIB

__all__ = ["TrainerOrder", "main"]


class TrainerOrder(FrozenModel):
    """What a rank does."""

    shape: GptShape
    steps: int
    threads: int
    system: str | None
    """Saves after each step, on rank 0; None: nothing is saved."""
    directory: str
    """For checkpoints."""
    restore: bool = False
    """Begin with the newest checkpoint, if there is one."""
    node: str | None = None
    """HOST:PORT of the mirror node that a watched training restores from: nothing is saved then."""
    token_file: str | None = None
    steps_file: str
    parent: int
    """It ends with this process."""


def main(order_text: str) -> int:
    """See the module. Raises what goes wrong: its last words are in the log."""
    order = parse_model(TrainerOrder, order_text, "an order", most_bytes=MIB)
    die_with_parent(order.parent)
    torch.set_num_threads(order.threads)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    parts = make(order.shape)
    optimizer = parts["optimizer"]
    state = {"model": parts["model"], "optimizer": optimizer}
    with Path(order.steps_file if rank == 0 else os.devnull).open("a") as out:
        _say(out, "ready")
        checkpointer = _checkpointer(order) if rank == 0 else None
        done = _restored(order, state, checkpointer) if order.restore else 0
        model = DistributedDataParallel(parts["model"])
        if checkpointer is not None:
            checkpointer.start(state)
        _say(out, f"restored {done}")
        for step in range(done, order.steps):
            began = time.perf_counter()
            loss = loss_of(model, order.shape, step, rank)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), parts["clip_norm"])
            optimizer.step()
            if checkpointer is not None:
                checkpointer.save(step + 1)
            _say(out, f"{step} {time.perf_counter() - began!r} {float(loss).hex()}")
    if checkpointer is not None:
        checkpointer.drain()
        checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _say(out: IO[str], text: str) -> None:
    out.write(f"{text} {time.monotonic()!r}\n")
    out.flush()


def _restored(order: TrainerOrder, state: dict[str, Any], checkpointer: Checkpointer | None) -> int:
    """The step from which this training goes on. A mirror node is asked by each rank, a directory by rank 0 alone."""
    if order.node is not None:
        watched = checkpointer_class(FLOWCHECK)(order.directory, nodes=[order.node], token_file=order.token_file)
        try:
            return watched.restore(state)
        except NoCheckpoint:
            return 0
        finally:
            watched.close()
    found: list[Any] = [0, None]
    if checkpointer is not None:
        with suppress(NoCheckpoint):
            found = [checkpointer.restore(state), state["optimizer"].state_dict()]
    dist.broadcast_object_list(found)
    if checkpointer is None and found[0]:
        # DDP gives the others the weights.
        state["optimizer"].load_state_dict(found[1])
    return int(found[0])


def _checkpointer(order: TrainerOrder) -> Checkpointer | None:
    return None if order.system is None else checkpointer_class(order.system)(order.directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
