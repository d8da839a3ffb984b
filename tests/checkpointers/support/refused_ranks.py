"""Jobs of three ranks over gloo in which one is refused when it attaches. Run as: refused_ranks.py FOLDER.

Each line on its stdin is a job, in JSON: {"job": NAME, "cause": FUNCTION, "rank": WHO, "then": WHAT IT DOES THEN}.
Imports torch once, forks all ranks, and prints how each ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.recovery import refusals
from lastgood.checkpointers.recovery.checkmate_job import JOB_FILE
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LastgoodError, StorageError
from lastgood.locks import FileLock
from lastgood.ports import free_ports
from lastgood.processes import die_with_parent
from lastgood.storage import files

RANKS = 3
LIMIT_S = 90.0

Job = dict[str, Any]


def place(folder: Path, rank: int) -> Path:
    """A disk of its own."""
    return folder / f"disk-{rank}"


def held(directory: Path, holders: list[FileLock]) -> None:
    directory.mkdir(parents=True)
    holders.append(FileLock(directory / "lock", "the test", shared_with_forks=False))
    holders[-1].acquire()


def damaged(directory: Path, holders: list[FileLock]) -> None:
    directory.mkdir(parents=True)
    (directory / JOB_FILE).write_text("{")


def full(directory: Path, holders: list[FileLock]) -> None:
    """The disk; see `_rank`."""


def options(directory: Path, holders: list[FileLock]) -> None:
    """No interval."""


def no_room(path: Path, *_: object, **named: object) -> None:
    raise StorageError(f"{path}: making a slot: No space left on device")


def attach(job: Job, folder: Path, rank: int, *, wrong: bool) -> None:
    knobs = {"control": "off"} if job["system"] == "pccheck" and not job.get("agree") else {}
    directory = folder if job.get("agree") else place(folder, rank)
    if not wrong or job["cause"] != "options":
        knobs["interval_steps"] = 1
    if wrong and job["cause"] == "full":
        files.make_slot_file = no_room
    checkpointer = checkpointer_class(job["system"])(directory, **knobs)
    model = torch.nn.Linear(2, 2)
    checkpointer.attach(model=model)
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
        checkpointer.step()
    checkpointer.close()


def run(job: Job, folder: Path, rank: int, port: int) -> str:
    """In a rank: how it went."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", LASTGOOD_JOB_TOKEN="a token of the tests")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    dist.barrier()
    wrong = rank == job["rank"]
    refusals.RETRY_S = LIMIT_S if job["then"] == "retry" else 2.0
    refusals.HEARD_S = 5.0 if job["then"] == "sleep" else LIMIT_S
    try:
        attach(job, folder, rank, wrong=wrong)
    except (LastgoodError, RuntimeError) as error:
        if wrong and job["then"] == "retry":
            attach(job, folder, rank, wrong=False)
            return "went on"
        return f"{type(error).__name__}: {error}"
    return "went on"


def fork_rank(job: Job, folder: Path, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent()
        name = folder.parent / f"{job['job']}-{rank}"
        log = os.open(f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 2)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        torch.set_num_threads(1)
        Path(f"{name}.said").write_text(run(job, folder, rank, port))
        if rank == job["rank"] and job["then"] == "sleep":  # its connections stay: nobody learns from them
            time.sleep(LIMIT_S)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def main() -> None:
    die_with_parent()
    jobs = [json.loads(line) for line in sys.stdin]
    holders: list[FileLock] = []
    ranks: dict[int, tuple[str, int, bool]] = {}
    base = Path(sys.argv[1])
    began = time.monotonic()
    for job in jobs:
        folder = base / job["job"]
        own = rank_directory if job.get("agree") else place
        globals()[job["cause"]](own(folder, job["rank"]), holders)
        port = free_ports()[0]
        for rank in range(RANKS):
            sleeps = rank == job["rank"] and job["then"] == "sleep"
            ranks[fork_rank(job, folder, rank, port)] = (job["job"], rank, sleeps)
    ended = {}
    while any(not sleeps for _, _, sleeps in ranks.values()) and time.monotonic() < began + LIMIT_S:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.05)
            continue
        name, rank, _ = ranks.pop(child)
        ended[f"{name}-{rank}"] = os.waitstatus_to_exitcode(status)
    for child in ranks:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(json.dumps({"ended": ended, "took_s": time.monotonic() - began}))


if __name__ == "__main__":
    main()
