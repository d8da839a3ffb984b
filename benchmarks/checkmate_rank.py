"""One trainer of checkmate.py: reads work as lines of JSON, and answers each with one line.

python checkmate_rank.py PLAN.json RANK
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training_state import LinearTraining

from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.processes import die_with_parent, keep_stdout

TIMEOUT_S = 120.0


class Trainer:
    """A training with DistributedDataParallel where `hook` is set; under Checkmate where `knobs` are given."""

    def __init__(self, plan: dict[str, Any], hook: bool, knobs: dict[str, Any] | None = None) -> None:
        self.training = LinearTraining(plan["state_bytes"], seed=dist.get_rank(), batch=plan["batch"])
        state = self.training.state
        if hook:
            self.training.model = DistributedDataParallel(self.training.model)
        self.checkpointer: Checkmate | None = None
        self.saved = 0
        if knobs is not None:
            self.checkpointer = Checkmate(plan["directory"], **plan["places"], **knobs)
            if hook:
                self.checkpointer.watch(self.training.model)
            self.checkpointer.events_kept = None
            self.checkpointer.start(state)

    def step(self) -> None:
        """One iteration, and its save."""
        self.training.step()
        self.saved += 1
        if self.checkpointer is not None:
            self.checkpointer.save(self.saved)

    def drain(self) -> None:
        """Wait until it is known what became of every save."""
        if self.checkpointer is not None:
            self.checkpointer.drain(TIMEOUT_S)

    def close(self) -> None:
        """End the checkpointer."""
        if self.checkpointer is not None:
            self.checkpointer.close()


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of other processes until now."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


def overhead(plan: dict[str, Any], asked: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each (round, side) of `order`: seconds of the iterations, CPU seconds for each of them."""
    sides = {"without": Trainer(plan, asked["hook"]), "tap": Trainer(plan, asked["hook"], plan["knobs"])}
    rows = []
    for number, side in [("warm-up", "without"), ("warm-up", "tap"), *asked["order"]]:
        trainer = sides[side]
        dist.barrier()
        cpu, shadows_cpu = time.process_time(), cpu_of(asked["shadow_pids"])
        # Shadows may hold a few iterations that they have not applied: the clock starts when there are some.
        for _ in range(asked["warm_up"]):
            trainer.step()
        begin = time.perf_counter()
        for _ in range(asked["iterations"]):
            trainer.step()
        seconds = time.perf_counter() - begin
        trainer.drain()
        steps = asked["warm_up"] + asked["iterations"]
        row = {
            "round": number,
            "side": side,
            "seconds": seconds,
            "cpu_s": (time.process_time() - cpu) / steps,
            "shadows_cpu_s": (cpu_of(asked["shadow_pids"]) - shadows_cpu) / steps,
        }
        if number != "warm-up":
            rows.append(row)
    for trainer in sides.values():
        trainer.close()
    return rows


def policy(plan: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Train until the file `stop` appears: when each iteration ended, what it had waited, what became of each save."""
    trainer = Trainer(plan, True, {**plan["knobs"], **asked["knobs"]})
    checkpointer = trainer.checkpointer
    assert checkpointer is not None
    for _ in range(asked["warm_up"]):
        trainer.step()
    trainer.drain()
    warm_saves = len(checkpointer.events)
    dist.barrier()
    waited = checkpointer.storage_facts()["waited_for_room_s"]
    answer({"began_s": time.perf_counter()})
    stop, last = Path(asked["stop"]), Path(asked["stop"] + ".last")
    iterations = []
    while True:
        if dist.get_rank() == 0 and stop.exists() and not last.exists():
            # No rank ends an iteration before rank 0 has begun it, so all of them find this in time.
            new = last.with_suffix(".new")
            new.write_text(str(trainer.saved + 1))
            new.replace(last)
        trainer.step()
        facts = checkpointer.storage_facts()
        iterations.append([time.perf_counter(), facts["waited_for_room_s"] - waited])
        if last.exists() and int(last.read_text()) == trainer.saved:
            break
    trainer.drain()
    events = checkpointer.events[warm_saves:]
    found = {
        "iterations": iterations,
        "saves": [[event.requested_s, event.outcome.value] for event in events],
        "errors": sorted({event.error for event in events if event.error}),
        "facts": checkpointer.storage_facts(),
    }
    trainer.close()
    return found


def answer(found: Any) -> None:
    """To checkmate.py."""
    print(json.dumps(found), flush=True)


def main() -> None:
    die_with_parent()
    keep_stdout()
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    warnings.filterwarnings("ignore")
    if plan["cores"]:
        os.sched_setaffinity(0, plan["cores"][rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{plan['meeting']}",
        rank=rank,
        world_size=plan["ranks"],
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    kinds = {"overhead": overhead, "policy": policy}
    for line in sys.stdin:
        asked = json.loads(line)
        answer(kinds[asked["work"]](plan, asked))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
