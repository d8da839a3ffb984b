"""One rank's process of a run over several ranks: measures, or restores, and leaves its result as a file.

``python -m lastgood.experiments.rank_main ORDER``; a launcher has set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from lastgood.errors import LastgoodError
from lastgood.experiments.atomic import write_atomically
from lastgood.experiments.machine_lock import machine_lock
from lastgood.experiments.rank_results import LiveRank, MeasuredRank, RestoredRank
from lastgood.experiments.spec import RunSpec
from lastgood.processes import die_with_parent

__all__ = ["RankOrder", "boot_id", "main", "result_path"]


class RankOrder(BaseModel):
    """What a rank is told. It stands on a command line, which every user of its host can read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: RunSpec
    phase: Literal["measure", "restore"]
    folder: str
    """The run's scratch folder, of this name on every host."""
    data_dir: str
    token: str
    """Goes into the result, so that it is known for this launch's."""
    boot_id: str
    """Of the machine that holds the turn to measure: ranks on other machines take their own's."""
    parent: int | None = None
    """Process to end with, where no launcher sees to that."""


def boot_id() -> str:
    """The kernel's identity: one for all that shares processors, disks and locks."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def result_path(folder: Path, phase: str, rank: int) -> Path:
    """Where a rank leaves its result, on its own host."""
    return folder / "results" / f"{phase}-{rank:05d}.json"


def main(words: list[str] | None = None) -> int:
    """Do what the order says. 0, or 1 with a message on standard error; with a result it never returns."""
    (word,) = sys.argv[1:] if words is None else words
    order = RankOrder.model_validate_json(word)
    if order.parent is not None:
        die_with_parent(order.parent)
    try:
        _take_turn(order)
        result = _do(order)
    except LastgoodError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    write_atomically(result_path(Path(order.folder), order.phase, result.rank), result.model_dump_json().encode())
    _part_of_all()
    sys.stdout.flush()
    sys.stderr.flush()
    # No tidy end, as with a run of one rank: what was promised to be durable must not depend on one.
    os._exit(0)


def _take_turn(order: RankOrder) -> None:
    """The launching machine's turn is the run's. On any other machine nothing may be timed beside it either.

    Raises LockHeld, naming who measures there. The lock ends with this process.
    """
    if boot_id() != order.boot_id and os.environ.get("LOCAL_RANK", "0") == "0":
        machine_lock().acquire()


def _do(order: RankOrder) -> MeasuredRank | RestoredRank:
    # numpy's OpenBLAS reads it at import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from lastgood.experiments.measure import prove_restore, train_and_measure
    from lastgood.experiments.rank_part import JoinedPart

    spec, folder = order.spec, Path(order.folder)
    checkpoints, data_dir = folder / "checkpoints", Path(order.data_dir)
    checkpoints.mkdir(parents=True, exist_ok=True)
    part = JoinedPart.join(spec, int(os.environ.get("LOCAL_RANK", "0")), restoring=order.phase == "restore")
    own = {"token": order.token, "rank": part.rank, "host": socket.gethostname(), "boot_id": boot_id()}
    if order.phase == "restore":
        restored = prove_restore(spec, checkpoints, data_dir, _say, part)
        return RestoredRank(
            **own,
            step=restored.step,
            digest=restored.digest,
            next_losses=restored.next_losses,
            restore_s=restored.restore_s,
        )
    measured = train_and_measure(spec, checkpoints, data_dir, False, _say, part)
    live = measured.proof
    return MeasuredRank(
        **own,
        workload=measured.workload,
        clocks=measured.clocks,
        resources=measured.resources,
        counts=measured.counts,
        storage=measured.storage,
        notes=measured.notes,
        live=None if live is None else LiveRank(step=live.step, digest=live.digest, next_losses=live.next_losses),
    )


def _part_of_all() -> None:
    """Wait for the others: a rank that ends takes what it serves them (a store, the agreement) with it."""
    import torch

    torch.distributed.all_reduce(torch.zeros(1))


def _say(stage: str) -> None:
    sys.stdout.write(f"{stage}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
