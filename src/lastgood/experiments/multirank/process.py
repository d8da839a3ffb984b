"""One rank's process of a run over several ranks: measures, lives, or restores, and leaves its result as a file.

``python -m lastgood.experiments.multirank.process ORDER``; a launcher has set RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lastgood.errors import LastgoodError
from lastgood.experiments.machine.facts import boot_id
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.multirank.order import RankOrder, killed_path, result_path
from lastgood.experiments.multirank.results import AfterKill, MeasuredRank, RestoredRank
from lastgood.files import PRIVATE, write_result
from lastgood.processes import die_with_parent
from lastgood.text import parse_model
from lastgood.units import MIB

if TYPE_CHECKING:
    from lastgood.experiments.multirank.part import JoinedPart
    from lastgood.experiments.runs.measure import AfterMeasurement, Measurement
    from lastgood.experiments.runs.progress import Board
    from lastgood.training.loop import TrainingLoop

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Do what the order says. 0, or 1 with a message on standard error; with a result it never returns."""
    (text,) = sys.argv[1:] if arguments is None else arguments
    order = parse_model(RankOrder, text, "not an order for a rank", most_bytes=MIB)
    if order.parent is not None:
        die_with_parent(order.parent)
    try:
        _hold_machine(order)
        _leave(order, _do(order))
    except LastgoodError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    import torch

    # Together: a rank that ends takes what it serves the others (a store, the agreement) with it.
    torch.distributed.all_reduce(torch.zeros(1))
    sys.stdout.flush()
    sys.stderr.flush()
    # No tidy end, as with a run of one rank: what was promised to be durable must not depend on one.
    os._exit(0)


def _leave(order: RankOrder, result: MeasuredRank | AfterKill | RestoredRank) -> None:
    path = result_path(Path(order.folder), order.name, result.rank)
    write_result(path, result.model_dump_json().encode(), mode=PRIVATE)


def _hold_machine(order: RankOrder) -> None:
    """The launching machine's turn is the run's. On any other machine nothing may be timed beside it either.

    Raises LockHeld, naming who measures there. The lock ends with this process.
    """
    if boot_id() != order.boot_id and os.environ.get("LOCAL_RANK", "0") == "0":
        machine_lock().acquire()


def _do(order: RankOrder) -> MeasuredRank | AfterKill | RestoredRank:
    # numpy's OpenBLAS reads it at import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from lastgood.experiments.multirank.part import JoinedPart
    from lastgood.experiments.runs.measure import prove_restore, train_and_measure

    spec, folder = order.spec, Path(order.folder)
    checkpoints, data_dir = folder / "checkpoints", Path(order.data_dir)
    checkpoints.mkdir(parents=True, exist_ok=True)
    part = JoinedPart.join(spec, int(os.environ.get("LOCAL_RANK", "0")), restoring=order.phase != "measure")
    own = {"token": order.token, "rank": part.rank, "host": socket.gethostname(), "boot_id": boot_id()}
    if order.phase == "restore":
        return RestoredRank(**own, **dict(prove_restore(spec, checkpoints, data_dir, _say, part)))
    if order.phase == "live":
        return _live(order, part, own)
    measured = train_and_measure(
        spec, checkpoints, data_dir, False, _say, part, _after_measurement(order, part, own) if spec.kills else None
    )
    return _measured(measured, part, own)


def _measured(measured: Measurement, part: JoinedPart, own: dict[str, Any]) -> MeasuredRank:
    pairs = measured.pairs if part.rank == 0 else None
    return MeasuredRank(**own, **measured.facts(), pairs=pairs, live=measured.proof)


def _after_measurement(order: RankOrder, part: JoinedPart, own: dict[str, Any]) -> AfterMeasurement:
    """Leaves the measurement as the result, and trains until the kill."""

    def after_measurement(loop: TrainingLoop, measurement: Measurement) -> NoReturn:
        _leave(order, _measured(measurement, part, own))
        clocks = measurement.clocks
        _await_kill(order, part, loop, clocks.elapsed_s / clocks.measured_steps)

    return after_measurement


def _live(order: RankOrder, part: JoinedPart, own: dict[str, Any]) -> AfterKill:
    """Restores, and is killed again, or takes the live half of the proof if the spec asks for one."""
    from lastgood.experiments.multirank.after_kill import resume_after_kill
    from lastgood.experiments.runs.measure import live_proof

    folder = Path(order.folder)
    checkpoints, data_dir = folder / "checkpoints", Path(order.data_dir)
    found, loop = resume_after_kill(order.spec, checkpoints, data_dir, _say, part, _board(order, part))
    last = order.kill_after_steps is None
    result = AfterKill(**own, **dict(found), live=live_proof(loop, part) if last and order.spec.proof else None)
    if not last:
        _leave(order, result)
        _await_kill(order, part, loop, order.step_s)
    return result


def _await_kill(order: RankOrder, part: JoinedPart, loop: TrainingLoop, step_s: float) -> NoReturn:
    from lastgood.experiments.multirank.after_kill import train_until_killed

    assert order.kill_after_steps is not None
    _say(f"training until it is killed, in {order.kill_after_steps * step_s:.1f} s")
    marker = killed_path(Path(order.folder), order.token, part.rank)
    train_until_killed(order.spec, loop, _board(order, part), order.kill_after_steps, step_s, marker, part)


def _board(order: RankOrder, part: JoinedPart) -> Board:
    from lastgood.experiments.runs.progress import Board

    return Board(Path(order.folder) / "results" / f"board-{part.rank:05d}")


def _say(stage: str) -> None:
    sys.stdout.write(f"{stage}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
